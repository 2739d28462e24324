"""glm_routed_experts: both operand forms in float64 with their rounding points, routing, what is
read and left alone, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.numerics import Float64, gamma, nearest_bf16, nearest_e4m3, swiglu, to_numpy
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, assert_bitwise
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops._numerics import (  # noqa: E501
    noaux_tc,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.gemm.router_gemm import (  # noqa: E501
    router_gemm,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.moe.lowm_bf16_moe import (  # noqa: E501
    lowm_bf16_moe,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.moe.routed_experts import (  # noqa: E501
    RoutedExperts,
    fused_router_workspace,
)

# The real experts have 0.3 GB.
TINY = Geometry(
    hidden_size=48, moe_intermediate_size=32, n_routed_experts=24, num_experts_per_tok=4
)
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FUSED, LOGITS = RoutedExperts.CELLS[0], RoutedExperts.CELLS[2]


def tiny(cell: Cell, dtype: torch.dtype = torch.float32, nvfp4: bool = True) -> Cell:
    return Cell(cell.why, {**cell.spec, "geometry": TINY, "dtype": dtype, "nvfp4": nvfp4})


each_form = pytest.mark.parametrize("nvfp4", [True, False], ids=["nvfp4", "plain"])
each_cell = pytest.mark.parametrize("cell", RoutedExperts.CELLS, ids=cell_id)


@each_form
@each_cell
def test_cell(cell: Cell, nvfp4: bool) -> None:
    check_cell(RoutedExperts, tiny(cell, nvfp4=nvfp4))


def decoded(codes: torch.Tensor, scale: torch.Tensor | None) -> Float64:
    """code * block scale, or the plain values."""
    if scale is None:
        return to_numpy(codes)
    nibbles = np.stack([codes.numpy() & 0xF, codes.numpy() >> 4], axis=-1)
    table = np.array(VALUES + tuple(-v for v in VALUES))
    values = table[nibbles].reshape(*codes.shape[:-1], -1, 16)
    return (values * to_numpy(scale)[..., None]).reshape(*codes.shape[:-1], -1)


def requantised(h: Float64) -> Float64:
    """fp32 values to NVFP4 with a global scale of 1 and back, number by number."""
    out = np.zeros_like(h)
    for i in range(0, len(h), 16):
        group = h[i : i + 16].astype(np.float32)
        scale = float(nearest_e4m3(np.float64(np.abs(group).max() / np.float32(6))))
        inverse = np.float32(1 / np.float32(scale)) if scale else np.float32(0)
        for j, x in enumerate(group * inverse):
            code = min(range(8), key=lambda c: (abs(VALUES[c] - abs(float(x))), c % 2))
            out[i + j] = np.copysign(VALUES[code], x) * scale
    return out


def silu(x: Float64) -> Float64:
    return x / (1 + np.exp(-x))


def expert_rows(inputs: dict[str, Any], ids: np.ndarray, rounded: bool) -> Float64:
    """[rows, top_k, hidden], in the order of routing."""
    nearest = nearest_bf16 if rounded else lambda x: x
    x, fc1, fc2 = (
        decoded(inputs[n], inputs[f"{n}_scale"])
        for n in ("hidden_states", "gemm1_weights", "gemm2_weights")
    )
    out = np.zeros((*ids.shape, fc2.shape[1]))
    for (t, k), e in np.ndenumerate(ids):
        up, gate = np.split(fc1[e] @ x[t], 2)
        if inputs["output1_scale_scalar"] is None:
            h = nearest(silu(nearest(gate)) * nearest(up))
            out[t, k] = nearest(fc2[e] @ h)
            continue
        s1, s1_gate, s2 = (
            float(inputs[n][e])
            for n in ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
        )
        h = requantised(silu(gate * s1_gate) * up * s1)
        out[t, k] = nearest(fc2[e] @ h * s2)
    return out


def in_order_of_routing(out: tuple[torch.Tensor, ...], top_k: int) -> Float64:
    rows, _, places = out[:3]
    assert places.shape[1] == top_k
    return to_numpy(rows)[places.numpy()]


def chosen(inputs: dict[str, Any]) -> np.ndarray:
    """Expert ids [rows, top_k] by sorting each token's choices."""
    logits = inputs["routing_logits"]
    if logits is None:
        logits = router_gemm(inputs["router_hidden_states"], inputs["router_weight"])
    half = np.float32(0.5)
    scores = half * torch.tanh(half * logits).numpy() + half
    choices = scores + inputs["routing_bias"].numpy()
    return np.argsort(-choices, axis=1, kind="stable")[:, : inputs["top_k"]]


@each_form
@each_cell
def test_bf16_rounds_where_the_contract_says(cell: Cell, nvfp4: bool) -> None:
    inputs = cell_inputs(RoutedExperts, tiny(cell, torch.bfloat16, nvfp4))
    out = RoutedExperts.run(RoutedExperts.raw_call, inputs)
    expected = expert_rows(inputs, chosen(inputs), rounded=True)
    # Where a sum lies within its fp32 error of a border between two bf16 numbers, either is right.
    got = in_order_of_routing(out, inputs["top_k"])
    assert (got != expected).mean() < 1e-3
    assert (np.abs(got - expected) <= 2**-7 * np.abs(expected)).all()


@each_cell
def test_fp32_output_of_nvfp4_is_the_scaled_sum(cell: Cell) -> None:
    inputs = cell_inputs(RoutedExperts, tiny(cell))
    out = RoutedExperts.run(RoutedExperts.raw_call, inputs)
    assert out[0].dtype == torch.float32
    expected = expert_rows(inputs, chosen(inputs), rounded=False)
    # h is the same codes, so what is left are the sum's rounding and the scale's.
    off = np.abs(in_order_of_routing(out, inputs["top_k"]) - expected)
    assert (off <= gamma(2) * np.abs(expected)).all()


@each_cell
def test_plain_fp32_rounds_nothing(cell: Cell) -> None:
    inputs = cell_inputs(RoutedExperts, tiny(cell, nvfp4=False))
    out = RoutedExperts.run(RoutedExperts.raw_call, inputs)
    got, ids = in_order_of_routing(out, inputs["top_k"]), chosen(inputs)
    x, fc1, fc2 = (to_numpy(inputs[n]) for n in ("hidden_states", "gemm1_weights", "gemm2_weights"))
    for (t, k), e in np.ndenumerate(ids):
        up, gate = np.split(fc1[e], 2)
        expected, off = swiglu(x[t], gate, up, fc2[e], torch.float32)
        assert (np.abs(got[t, k] - expected) <= off).all()


@each_cell
def test_places_group_rows_by_expert_then_by_token(cell: Cell) -> None:
    inputs = cell_inputs(RoutedExperts, tiny(cell))
    places = RoutedExperts.run(RoutedExperts.raw_call, inputs)[2].flatten().tolist()
    pairs = [(e, t * 4 + k) for (t, k), e in np.ndenumerate(chosen(inputs))]
    ranked = sorted(pairs)
    assert places == [ranked.index(pair) for pair in pairs]


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_router_gives_the_bits_of_the_router_gemm(rows: int, dtype: torch.dtype) -> None:
    spec = {**FUSED.spec, "rows": rows, "geometry": TINY, "dtype": dtype}
    inputs = cell_inputs(RoutedExperts, Cell(FUSED.why, spec))
    fused = RoutedExperts.run(RoutedExperts.raw_call, inputs)
    logits = router_gemm(inputs["router_hidden_states"], inputs["router_weight"])
    without = dict.fromkeys(("router_hidden_states", "router_weight", "router_workspace"))
    given = {**inputs, **without, "routing_logits": logits}
    assert_bitwise(fused[:3], RoutedExperts.run(RoutedExperts.raw_call, given))


def test_rows_do_not_depend_on_each_other() -> None:
    inputs = cell_inputs(RoutedExperts, tiny(LOGITS, torch.bfloat16))
    together = in_order_of_routing(RoutedExperts.run(RoutedExperts.raw_call, inputs), 4)
    names = ("routing_logits", "hidden_states", "hidden_states_scale")
    alone = {**inputs, **{name: inputs[name][5:6] for name in names}}
    single = in_order_of_routing(RoutedExperts.run(RoutedExperts.raw_call, alone), 4)
    assert np.array_equal(together[5:6], single)


def test_one_plain_row_is_summed_to_the_low_m_moes_result() -> None:
    spec = {"rows": 1, "geometry": TINY, "dtype": torch.float32, "nvfp4": False}
    inputs = cell_inputs(RoutedExperts, Cell("one", {**spec, "fused_router": False}))
    rows, weights, places = RoutedExperts.raw_call(**inputs)
    total = torch.zeros(1, 48)
    for k in range(4):
        total += weights[0, k] * rows[places[0, k]]
    whole = lowm_bf16_moe(
        inputs["hidden_states"],
        inputs["routing_logits"],
        inputs["routing_bias"],
        inputs["gemm1_weights"],
        inputs["gemm2_weights"],
        4,
        2.5,
    )
    assert torch.equal(total, whole)


@each_form
def test_experts_that_are_not_chosen_are_not_read(nvfp4: bool) -> None:
    spec = {"rows": 2, "fused_router": False, "geometry": TINY, "nvfp4": nvfp4}
    inputs = cell_inputs(RoutedExperts, Cell("two", {**spec, "dtype": torch.float32}))
    before = RoutedExperts.raw_call(**inputs)
    others = np.setdiff1d(np.arange(24), chosen(inputs))
    spoilt = "output1_scale_scalar" if nvfp4 else "gemm1_weights"
    inputs[spoilt][others] = torch.nan
    assert_bitwise(RoutedExperts.raw_call(**inputs), before)


def test_a_launch_leaves_the_workspace_idle_and_counts_itself() -> None:
    inputs = cell_inputs(RoutedExperts, tiny(FUSED))
    for launches in (1, 2):
        RoutedExperts.raw_call(**inputs)
        expected = fused_router_workspace(torch.device("cpu"), 8, 24)
        expected[0] = launches
        assert torch.equal(inputs["router_workspace"], expected)
        RoutedExperts.is_valid(**inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_rounded_once_to_the_output_dtype(dtype: torch.dtype) -> None:
    inputs = cell_inputs(RoutedExperts, tiny(LOGITS, dtype))
    weights = RoutedExperts.raw_call(**inputs)[1]
    exact, _ = noaux_tc(inputs["routing_logits"], inputs["routing_bias"], 4, 2.5)
    assert weights.dtype == dtype and torch.equal(weights, exact.to(dtype))


def test_an_idle_word_is_negative_zero() -> None:
    idle = fused_router_workspace(torch.device("cpu"))[1:].view(torch.float32)
    assert idle.numel() == 2 * 8 * 256 * 4
    assert (idle == 0).all() and torch.signbit(idle).all()


def test_bad_arguments_are_refused() -> None:
    def refuses(message: str, cell: Cell = FUSED, **changes: object) -> None:
        assert_refuses(RoutedExperts, tiny(cell), message, **changes)

    both = r"give either routing_logits, or router_hidden_states"
    refuses(both, routing_logits=torch.zeros(8, 24))
    refuses(both, router_weight=None)
    refuses(both, cell=LOGITS, routing_logits=None)
    refuses(r"event is 0, an event that was never recorded", hidden_states_ready_event=0)
    busy = fused_router_workspace(torch.device("cpu"), 8, 24)
    busy[7] = 0
    refuses(r"router_workspace has 1 words that are not idle", router_workspace=busy)
    refuses(r"router_workspace has 1000 words; 8 rows need", router_workspace=busy[:1000])
    refuses(r"hidden_states has the strides", hidden_states=torch.zeros(24, 8).byte().mT)
    refuses(r"gemm1_weights has the strides", gemm1_weights=torch.zeros(24, 24, 64).byte().mT)
    refuses(r"gemm1_weights is \[24, 32, 24\]", gemm1_weights=torch.zeros(24, 32, 24).byte())
    refuses(r"gemm2_weights_scale is None", gemm2_weights_scale=None)
    refuses(r"output2_scale_scalar is \[23\]", output2_scale_scalar=torch.ones(23))
    refuses(r"hidden_states_scale is torch.uint8", hidden_states_scale=torch.zeros(8, 3).byte())
    refuses(r"routing_bias is torch.bfloat16", routing_bias=torch.zeros(24).bfloat16())
    refuses(r"routing_logits is \[32, 23\]", cell=LOGITS, routing_logits=torch.zeros(32, 23))
    refuses(r"top_k is 25; it must be in \[1, 24\]", top_k=25)


def test_plain_operands_take_no_scales_and_keep_their_dtype() -> None:
    cell = tiny(LOGITS, nvfp4=False)
    message = "output2_scale_scalar is given, but hidden_states is not NVFP4"
    assert_refuses(RoutedExperts, cell, message, output2_scale_scalar=torch.ones(24))
    message = "output_dtype is torch.bfloat16; it must be torch.float32"
    assert_refuses(RoutedExperts, cell, message, output_dtype=torch.bfloat16)
    plain = tiny(LOGITS, torch.bfloat16, nvfp4=False)
    assert_refuses(RoutedExperts, plain, "hidden_states is bf16; the kernels serve NVFP4")


@pytest.mark.parametrize(
    "message, rows, fused, sizes",
    [
        (r"number of rows is 9; the kernels serve range\(1, 9\)", 9, True, {}),
        (r"number of rows is 33; the kernels serve range\(1, 33\)", 33, False, {}),
        (r"number of experts is 24", 8, True, {}),
        (r"top_k is 4; the kernels serve 8", 8, True, {"n_routed_experts": 256}),
        (
            r"hidden size is 48; the kernels serve 6144",
            8,
            True,
            {"n_routed_experts": 256, "num_experts_per_tok": 8},
        ),
    ],
)
def test_shapes_that_the_kernels_do_not_serve_are_refused(
    message: str, rows: int, fused: bool, sizes: dict[str, int]
) -> None:
    geometry = Geometry(
        **{
            "hidden_size": 48,
            "moe_intermediate_size": 32,
            "n_routed_experts": 24,
            "num_experts_per_tok": 4,
            **sizes,
        }
    )
    spec = {"rows": rows, "fused_router": fused, "geometry": geometry}
    assert_refuses(RoutedExperts, Cell("unserved", spec), message)
