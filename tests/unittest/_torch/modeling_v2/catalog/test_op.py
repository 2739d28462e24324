"""Op records: definition, dispatch, binding, staleness, comparison."""

from typing import Any

import pytest
import torch
from helpers.example_op import ScaledAppend
from helpers.op_cells import (
    assert_refuses,
    cell_id,
    cell_inputs,
    check_cell,
    check_kernel,
)
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog import _op
from tensorrt_llm._torch.modeling_v2.catalog._op import (
    REFERENCE_OPS_ENV,
    ULP,
    Arch,
    Cell,
    OpWrapper,
    advance_step_generation,
    all_ops,
    assert_bitwise,
    assert_within_ulp,
    define_op,
    true_fp32_matmul,
    validating,
)

ONE_ROW = ScaledAppend.CELLS[0]


@pytest.fixture(autouse=True)
def no_steps_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_op._Steps, "generation", 0)


@pytest.fixture
def inputs() -> dict[str, Any]:
    return cell_inputs(ScaledAppend, ONE_ROW)


@pytest.mark.parametrize("cell", ScaledAppend.CELLS, ids=cell_id)
def test_cells_hold_what_records_promise(cell: Cell) -> None:
    check_cell(ScaledAppend, cell)


def test_the_cpu_runs_the_reference_and_writes_in_place(inputs: dict[str, Any]) -> None:
    sums = ScaledAppend.raw_call(**inputs)
    slot = int(inputs["slots"])
    assert torch.equal(inputs["pool"][slot], (0.5 * inputs["x"][0]).bfloat16())
    assert torch.equal(sums, inputs["x"].sum(-1))
    assert int((inputs["pool"] != 0).any(-1).sum()) == 1


def test_guards_refuse_by_name() -> None:
    assert_refuses(ScaledAppend, ONE_ROW, "x is 3 wide", x=torch.zeros(1, 3))
    assert_refuses(ScaledAppend, ONE_ROW, r"slots \[1, 1\] repeat", slots=torch.tensor([1, 1]))


def test_an_invalid_cell_is_found() -> None:
    with pytest.raises(ValueError, match="repeat"):
        check_cell(_broken(is_valid=_refuse_all), ONE_ROW)


def test_a_wrong_fake_is_found() -> None:
    wrong = _define("test_wrong_fake", fake=lambda x, slots, pool, scale: x.new_empty(7))
    with pytest.raises(Exception, match=r"(?i)shape|size|metadata"):
        check_cell(wrong, ONE_ROW)


def test_an_undeclared_write_is_found() -> None:
    schema = "test_undeclared(Tensor x, Tensor slots, Tensor pool, float scale) -> Tensor"
    hidden = _define("test_undeclared", schema=schema)
    with pytest.raises(AssertionError, match="pool was written, but the schema does not say"):
        check_cell(hidden, ONE_ROW)


def test_a_result_that_is_a_view_of_an_argument_is_found() -> None:
    view = _define("test_view", reference=staticmethod(lambda x, slots, pool, scale: x[:, 0]))
    with pytest.raises(Exception, match="outputs_alias_inputs"):
        check_cell(view, ONE_ROW)


@pytest.mark.parametrize("counts", [True, False])
def test_fp8_and_optional_arguments_can_be_written(counts: bool) -> None:
    """With and without the optional count, the FP8 rows are quantised in place."""
    record = _quantise(counts)
    check_cell(record, ONE_ROW)
    produced = record.run(record.raw_call, cell_inputs(record, ONE_ROW))
    assert len(produced) == 1 + counts


def test_inputs_that_ignore_the_generator_are_found() -> None:
    fixed = cell_inputs(ScaledAppend, ONE_ROW)
    with pytest.raises(AssertionError, match="does not use its generator"):
        check_cell(_broken(make_inputs=lambda *_: fixed), ONE_ROW)


def _on_cuda(inputs: dict[str, Any]) -> Tensor:
    """The call that CUDA tensors would dispatch to when no kernel is there."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return torch.ops.trtllm.test_scaled_append.default.redispatch(keys, *inputs.values())


def test_without_a_kernel_a_gpu_call_is_refused(inputs: dict[str, Any]) -> None:
    assert not ScaledAppend.has_kernel()
    with pytest.raises(RuntimeError, match=f"no kernel.*CMake.*{REFERENCE_OPS_ENV}=1"):
        _on_cuda(inputs)


def test_for_bring_up_the_reference_stands_in(
    inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REFERENCE_OPS_ENV, "1")
    assert torch.equal(_on_cuda(inputs), inputs["x"].sum(-1))


def test_a_kernel_wins_over_the_stand_in(inputs: dict[str, Any]) -> None:
    op = _define("test_kernel_later")
    library = torch.library.Library("trtllm", "FRAGMENT")
    library.impl("test_kernel_later", lambda x, slots, pool, scale: x.sum(-1) + 1, "CUDA")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    out = torch.ops.trtllm.test_kernel_later.default.redispatch(keys, *inputs.values())
    assert torch.equal(out, inputs["x"].sum(-1) + 1)
    assert op.has_kernel()


@pytest.mark.gpu
def test_on_a_gpu_the_reference_stands_in_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = cell_inputs(ScaledAppend, ONE_ROW, "cuda")
    with pytest.raises(RuntimeError, match="no kernel"):
        ScaledAppend.raw_call(**inputs)
    monkeypatch.setenv(REFERENCE_OPS_ENV, "1")
    assert torch.equal(ScaledAppend.raw_call(**inputs), inputs["x"].sum(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ScaledAppend.CELLS, ids=cell_id)
def test_the_kernel_check_runs_on_a_gpu(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REFERENCE_OPS_ENV, "1")
    monkeypatch.setattr(ScaledAppend, "has_kernel", lambda: True)
    check_kernel(ScaledAppend, cell)


def test_bound_arguments_are_merged_and_the_call_wins(inputs: dict[str, Any]) -> None:
    op = ScaledAppend()
    op.bind_const(scale=2.0, pool=inputs["pool"])
    op.bind_layered(0, pool=(first := inputs["pool"].clone()))
    op.bind_layered(1, pool=(second := inputs["pool"].clone()), scale=3.0)
    slot = int(inputs["slots"])
    for layer, pool, scale in ((0, first, 2.0), (1, second, 3.0), (None, inputs["pool"], 2.0)):
        op(inputs["x"], inputs["slots"], layer=layer)
        assert torch.equal(pool[slot], (scale * inputs["x"][0]).bfloat16())
    op(inputs["x"], inputs["slots"], layer=1, scale=0.0)
    assert not second.any()


def test_later_binds_update_and_do_not_replace(inputs: dict[str, Any]) -> None:
    op = ScaledAppend()
    op.bind_const(**inputs)
    op.bind_const(x=inputs["x"] + 1)
    assert torch.equal(op(), (inputs["x"] + 1).sum(-1))


def test_wrong_binds_are_refused_by_name() -> None:
    op = ScaledAppend()
    with pytest.raises(ValueError, match=r"no arguments \['weight'\]; it has \['x', 'slots'"):
        op.bind_const(weight=1)
    with pytest.raises(ValueError, match=r"no arguments \['scales'\]"):
        op.bind_layered(0, scales=1.0)
    op.bind_layered(2, scale=1.0)
    with pytest.raises(ValueError, match=r"nothing is bound for layer 3, only for layers \[2\]"):
        op(layer=3)


def test_a_previous_steps_argument_is_stale_only_while_validating(inputs: dict[str, Any]) -> None:
    op = ScaledAppend()
    op.bind_const(scale=1.0, pool=inputs["pool"])
    advance_step_generation()
    op.bind_const(slots=inputs["slots"])
    with validating():
        op(inputs["x"])
        advance_step_generation()
        with pytest.raises(RuntimeError, match="'slots' is a previous step's .bound in step 1"):
            op(inputs["x"])
        op(inputs["x"], slots=inputs["slots"])
        op.bind_const(slots=inputs["slots"])
        op(inputs["x"])
        advance_step_generation()
    op(inputs["x"])


def test_a_layers_fresh_argument_hides_a_stale_constant(inputs: dict[str, Any]) -> None:
    op = ScaledAppend()
    advance_step_generation()
    op.bind_const(**inputs)
    advance_step_generation()
    op.bind_layered(0, **inputs)
    with validating():
        op(layer=0)
        with pytest.raises(RuntimeError, match="previous step"):
            op()


def test_validating_checks_arguments(inputs: dict[str, Any]) -> None:
    op = ScaledAppend()
    wide = {**inputs, "x": torch.zeros(1, 1)}
    op(**wide)  # broadcasting makes this work, wrongly
    with validating(), pytest.raises(ValueError, match="x is 1 wide"):
        op(**wide)
    op(**wide)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"CELLS": ()}, "0 cells"),
        ({"__doc__": None}, "contract docstring: False"),
        ({"fake": OpWrapper.fake}, "missing members .'fake'"),
        ({"fake": staticmethod(lambda x: x)}, r"has the parameters \('x',\)"),
    ],
)
def test_an_incomplete_record_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        _define("test_incomplete", **changes)


def test_a_cell_says_why_it_is_there() -> None:
    with pytest.raises(ValueError, match="does not say why"):
        Cell("", {"rows": 1})


def test_the_packages_ops_are_listed_and_the_tests_are_not() -> None:
    ops = all_ops()
    assert list(ops) == sorted(ops)
    assert "test_scaled_append" not in ops


def test_architectures_have_their_capability() -> None:
    assert Arch.of((9, 0)) is Arch.SM_90
    assert Arch.of((10, 7)) is Arch.SM_107
    with pytest.raises(ValueError, match="sm_80"):
        Arch.of((8, 0))


def test_true_fp32_matmul_restores_what_was_set() -> None:
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    with true_fp32_matmul():
        assert [backend.fp32_precision for backend in backends] == ["ieee", "ieee"]
    assert [backend.fp32_precision for backend in backends] == before


def test_a_ulp_is_the_spacing_above_one() -> None:
    for dtype, ulp in ULP.items():
        one = torch.ones((), dtype=torch.float64)
        assert (one + ulp).to(dtype).double() == one + ulp
        assert (one + ulp / 4).to(dtype).double() == one


def test_within_ulp_measures_against_the_rows_largest() -> None:
    ref = torch.tensor([[1.0, 100.0], [1.0, 1.0]])
    off = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert_within_ulp(ref + off, ref, element_ulp=1.0, rms_ulp=1.0, ulp=0.01)
    with pytest.raises(AssertionError, match="1 of 4 elements are off by more than 1.0 ulp"):
        assert_within_ulp(ref + off.flip(0), ref, element_ulp=1.0, rms_ulp=1.0, ulp=0.01)
    with pytest.raises(AssertionError, match="rms of the errors is"):
        assert_within_ulp(ref + off, ref, element_ulp=1.0, rms_ulp=0.1, ulp=0.01)
    with pytest.raises(AssertionError, match="elements"):
        assert_within_ulp(ref * float("nan"), ref, element_ulp=1e9, rms_ulp=1e9)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ((), "0 tensors instead of 1"),
        ((torch.zeros(2, dtype=torch.int32),), "dtype torch.int32"),
        ((torch.zeros(1, 2),), "shape"),
        ((torch.tensor([0.0, -0.0]),), "1 of 8 bytes differ"),
    ],
)
def test_bitwise_sees_every_difference(other: tuple[Tensor, ...], message: str) -> None:
    assert_bitwise((torch.zeros(2),), (torch.zeros(2),))
    with pytest.raises(AssertionError, match=message):
        assert_bitwise(other, (torch.zeros(2),))


def _refuse_all(x: Tensor, slots: Tensor, pool: Tensor, scale: float) -> None:
    raise ValueError("slots repeat")


def _broken(**changes: Any) -> type[OpWrapper]:
    """The example with other members; its op in torch stays the example's."""
    return type("Broken", (ScaledAppend,), {k: staticmethod(v) for k, v in changes.items()})


def _define(name: str, **changes: Any) -> type[OpWrapper]:
    """The example as an op of its own, with other members."""
    members = {
        "__doc__": ScaledAppend.__doc__,
        "schema": ScaledAppend.schema.replace("test_scaled_append", name),
        "raw_call": staticmethod(
            lambda x, slots, pool, scale: getattr(torch.ops.trtllm, name)(x, slots, pool, scale)
        ),
        **{k: staticmethod(v) if k == "fake" and callable(v) else v for k, v in changes.items()},
    }
    return define_op(type("Changed", (ScaledAppend,), members))


def _quantise(counts: bool) -> type[OpWrapper]:
    """An op that returns nothing and writes FP8 rows, and a count where it gets one."""
    name = f"test_quantise_{int(counts)}"

    def call(x: Tensor, rows: Tensor, count: Tensor | None = None) -> None:
        getattr(torch.ops.trtllm, name)(x, rows, count)

    def reference(x: Tensor, rows: Tensor, count: Tensor | None = None) -> None:
        rows.copy_(x.to(rows.dtype))
        if count is not None:
            count.add_(1)

    def nothing(x: Tensor, rows: Tensor, count: Tensor | None = None) -> None:
        return None

    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        x = torch.randn(4, 16, device=device, generator=generator)
        rows = torch.zeros(4, 16, dtype=torch.float8_e4m3fn, device=device)
        return {"x": x, "rows": rows, "count": torch.zeros(1, device=device) if counts else None}

    members = {"raw_call": call, "reference": reference, "fake": nothing, "is_valid": nothing}
    return define_op(
        type(
            "Quantise",
            (ScaledAppend,),
            {
                "__doc__": "Quantise rows.",
                "schema": f"{name}(Tensor x, Tensor(a!) rows, Tensor(b!)? count=None) -> ()",
                "make_inputs": staticmethod(make_inputs),
                "bytes_moved": staticmethod(lambda inputs: inputs["x"].nbytes),
                **{key: staticmethod(value) for key, value in members.items()},
            },
        )
    )
