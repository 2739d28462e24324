"""What must hold for every operator record of modeling_v2, cell by cell.

A record's test file starts with

    @pytest.mark.parametrize("cell", RouterGemm.CELLS, ids=cell_id)
    def test_cell(cell: Cell) -> None:
        check_cell(RouterGemm, cell)

    @pytest.mark.gpu
    @pytest.mark.parametrize("cell", RouterGemm.CELLS, ids=cell_id)
    def test_kernel(cell: Cell) -> None:
        check_kernel(RouterGemm, cell)

and goes on with the op's own tests: its numbers against an independently written formula, its
guards (`assert_refuses`), what it leaves untouched. A collective's ranks call the same functions,
each on its own inputs.
"""

import re
from typing import Any

import pytest
import torch

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, as_bytes, assert_bitwise

RERUNS = 20
# Not "test_schema", which does arithmetic that torch lacks for FP8: `assert_untouched` finds hidden
# writes, and "test_faketensor" results that are views of arguments.
OPCHECKS = ("test_autograd_registration", "test_faketensor")

Record = type[OpWrapper]


def cell_id(cell: Cell) -> str:
    return re.sub(r"\W+", "-", cell.why)


def cell_inputs(
    record: Record, cell: Cell, device: str | torch.device = "cpu", seed: int = 0
) -> dict[str, Any]:
    """A cell's arguments; the same seed makes the same ones."""
    generator = torch.Generator(device).manual_seed(seed)
    return record.make_inputs(cell, torch.device(device), generator)


def check_cell(record: Record, cell: Cell) -> None:
    """Everything that needs no kernel: valid and reproducible inputs, equal reruns, opcheck, fakes,
    positive bytes, nothing written but what the schema declares.

    A cell whose real shapes take long on a CPU can be checked with a smaller `Cell` here.
    """
    inputs = cell_inputs(record, cell)
    record.is_valid(**inputs)
    assert_same_inputs(record, cell)
    assert_reruns_equal(record, inputs)
    record.compare(record.run(record.raw_call, inputs), record.run(record.reference, inputs))
    torch.library.opcheck(op_of(record), (), inputs, test_utils=opchecks(inputs))
    record.produced(None, inputs)  # opcheck makes one real call, whose effects may need taking up
    assert_fake_matches(record, inputs)
    assert record.bytes_moved(inputs) > 0
    assert_untouched(record, cell, inputs)


def assert_same_inputs(record: Record, cell: Cell) -> None:
    """All randomness comes from the generator, and another seed makes other numbers."""
    first, again, other = (tensors(cell_inputs(record, cell, seed=seed)) for seed in (0, 0, 1))
    assert_bitwise(first, again)
    differs = [not torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(first, other, strict=True)]
    assert any(differs), "make_inputs does not use its generator"


def assert_reruns_equal(record: Record, inputs: dict[str, Any], reruns: int = 2) -> None:
    first = record.run(record.raw_call, inputs)
    for _ in range(reruns):
        assert_bitwise(record.run(record.raw_call, inputs), first)


def assert_untouched(record: Record, cell: Cell, inputs: dict[str, Any]) -> None:
    """No call so far wrote into an argument that the schema does not declare as written."""
    untouched = cell_inputs(record, cell, tensors(inputs)[0].device)
    for name, value in untouched.items():
        if isinstance(value, torch.Tensor):
            same = torch.equal(as_bytes(inputs[name]), as_bytes(value))
            assert same, f"{name} was written, but the schema does not say (a!)"


def assert_fake_matches(record: Record, inputs: dict[str, Any]) -> None:
    """On meta tensors the op gives the shapes, dtypes and strides of the real result."""
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    faked = record.run(record.raw_call, meta)
    real = record.run(record.raw_call, inputs)
    assert [layout(t) for t in faked] == [layout(t) for t in real]


def assert_refuses(record: Record, cell: Cell, message: str, **changes: Any) -> None:
    """`is_valid` refuses the cell's inputs after the changes, in these words (a regex)."""
    inputs = cell_inputs(record, cell)
    unknown = changes.keys() - inputs.keys()
    assert not unknown, f"{record.name()} has no arguments {sorted(unknown)}"
    with pytest.raises(ValueError, match=message):
        record.is_valid(**{**inputs, **changes})


def check_kernel(record: Record, cell: Cell) -> None:
    """The kernel on this GPU: numbers, then bits over reruns, then a CUDA graph on fresh inputs."""
    assert record.has_kernel(), f"{record.name()} has no kernel in this process"
    inputs = cell_inputs(record, cell, "cuda")
    record.is_valid(**inputs)
    record.compare(record.run(record.raw_call, inputs), record.run(record.reference, inputs))
    assert_reruns_equal(record, inputs, RERUNS)
    assert_untouched(record, cell, inputs)
    assert_graph_equal(record, cell)


def assert_graph_equal(record: Record, cell: Cell) -> None:
    """A captured call, replayed on other values in the same buffers, gives the eager call's bits.

    The second seed may only change values: shapes and numbers of a cell are its own.
    """
    held, fresh = (cell_inputs(record, cell, "cuda", seed) for seed in (0, 1))
    expected = record.run(record.raw_call, fresh)
    record.produced(record.raw_call(**held), held)  # warm-up outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = record.raw_call(**held)
    for buffer, value in zip(tensors(held), tensors(fresh), strict=True):
        buffer.copy_(value)
    graph.replay()
    assert_bitwise(record.produced(returned, held), expected)


def opchecks(inputs: dict[str, Any]) -> tuple[str, ...]:
    """Torch's schema check compares the arguments before and after by torch.allclose, which has no
    fp8; for such arguments `assert_untouched` alone says what was written."""
    if any(t.dtype.is_floating_point and t.dtype.itemsize == 1 for t in tensors(inputs)):
        return tuple(check for check in OPCHECKS if check != "test_schema")
    return OPCHECKS


def op_of(record: Record) -> Any:
    return getattr(torch.ops.trtllm, record.name()).default


def tensors(inputs: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in inputs.values() if isinstance(value, torch.Tensor)]


def layout(t: torch.Tensor) -> tuple[torch.Size, torch.dtype, tuple[int, ...]]:
    return t.shape, t.dtype, t.stride()
