"""glm_lowm_bf16_moe: routing and experts in fp64 with the rounding points, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.numerics import Float64, gamma, nearest_bf16, round_to_bits, to_numpy
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops._numerics import (  # noqa: E501
    noaux_tc,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.moe.lowm_bf16_moe import (  # noqa: E501
    LowmBf16Moe,
)
from tensorrt_llm._torch.modules.fused_moe import DeepseekV3Gate

FULL = LowmBf16Moe.CELLS[0]
# The real experts have 1.2 GB.
TINY = Geometry(
    hidden_size=48, moe_intermediate_size=16, n_routed_experts=24, num_experts_per_tok=4
)


def tiny(cell: Cell, dtype: torch.dtype = torch.float32) -> Cell:
    return Cell(cell.why, {**cell.spec, "geometry": TINY, "dtype": dtype})


@pytest.mark.parametrize("cell", LowmBf16Moe.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(LowmBf16Moe, tiny(cell))


def routed(inputs: dict[str, Any]) -> list[tuple[int, float]]:
    """(expert, weight) in the order of routing. Scores and choices are fp32, the rest is fp64."""
    bias = inputs["routing_bias"].numpy()
    half = np.float32(0.5)
    scores = half * torch.tanh(half * inputs["router_logits"][0]).numpy() + half
    choices = scores + bias
    assert choices.dtype == np.float32
    order = sorted(range(len(bias)), key=lambda e: (-choices[e], e))[: inputs["top_k"]]
    total = sum(float(scores[e]) for e in order) + 1e-20
    factor = inputs["routed_scaling_factor"]
    return [(e, float(scores[e]) * factor / total) for e in order]


def experts_sum(inputs: dict[str, Any], rounded: bool) -> Float64:
    nearest = nearest_bf16 if rounded else lambda x: x
    x, fc1, fc2 = (to_numpy(inputs[name]) for name in ("x", "fc1_weight", "fc2_weight"))
    total = np.zeros_like(x)
    for expert, weight in routed(inputs):
        up, gate = np.split(nearest(x @ fc1[expert].T), 2, axis=1)
        h = nearest(gate / (1 + np.exp(-gate)) * up)
        total = total + nearest(weight * (h @ fc2[expert].T))
    return nearest(total)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cell", LowmBf16Moe.CELLS, ids=cell_id)
def test_bf16_rounds_where_the_contract_says(cell: Cell, seed: int) -> None:
    inputs = cell_inputs(LowmBf16Moe, tiny(cell, torch.bfloat16), seed=seed)
    assert np.array_equal(to_numpy(LowmBf16Moe.raw_call(**inputs)), experts_sum(inputs, True))


@pytest.mark.parametrize("cell", LowmBf16Moe.CELLS, ids=cell_id)
def test_fp32_rounds_nothing(cell: Cell) -> None:
    inputs = cell_inputs(LowmBf16Moe, tiny(cell))
    out = to_numpy(LowmBf16Moe.raw_call(**inputs))
    exact = experts_sum(inputs, False)
    # fp32 sums of 48, 16 and 4 terms and a few products, against the magnitudes that they add.
    x, fc1, fc2 = (np.abs(to_numpy(inputs[n])) for n in ("x", "fc1_weight", "fc2_weight"))
    size = np.zeros_like(x)
    for expert, weight in routed(inputs):
        up, gate = np.split(x @ fc1[expert].T, 2, axis=1)
        size += weight * ((gate * up) @ fc2[expert].T)
    assert (np.abs(out - exact) <= gamma(2 * 48 + 16 + 4 + 10) * size).all()


@pytest.mark.parametrize("cell", LowmBf16Moe.CELLS, ids=cell_id)
def test_routing_is_noaux_tc(cell: Cell) -> None:
    inputs = cell_inputs(LowmBf16Moe, tiny(cell))
    arguments = (inputs["router_logits"], inputs["routing_bias"], 4, 2.5)
    weights, ids = noaux_tc(*arguments)
    expected = routed(inputs)
    assert ids[0].tolist() == [expert for expert, _ in expected]
    exact = np.array([weight for _, weight in expected])
    assert weights.dtype == torch.float32
    assert np.array_equal(to_numpy(weights[0]), round_to_bits(exact, 23))


def test_equal_choices_go_by_rising_id_also_at_the_cut() -> None:
    logits, bias = torch.zeros(1, 24), torch.full((24,), 7.0)
    logits[0, [20, 3]] = 1.0
    weights, ids = noaux_tc(logits, bias, 4, 2.5)
    assert ids.tolist() == [[3, 20, 0, 1]]
    assert math.isclose(float(weights.sum()), 2.5, rel_tol=gamma(8))


def test_scores_of_zero_give_no_contribution() -> None:
    inputs = cell_inputs(LowmBf16Moe, tiny(FULL))
    inputs["router_logits"][:] = -100.0
    assert LowmBf16Moe.raw_call(**inputs).count_nonzero() == 0


def test_experts_that_are_not_chosen_are_not_read() -> None:
    inputs = cell_inputs(LowmBf16Moe, tiny(FULL))
    out = LowmBf16Moe.raw_call(**inputs)
    chosen = [expert for expert, _ in routed(inputs)]
    others = [e for e in range(24) if e not in chosen]
    inputs["fc1_weight"][others] = torch.nan
    inputs["fc2_weight"][others] = torch.nan
    assert torch.equal(LowmBf16Moe.raw_call(**inputs), out)


def test_routing_agrees_with_the_built_in_router() -> None:
    gate = DeepseekV3Gate(8, 24, 4, 2.5, True, torch.device("cpu"))
    torch.manual_seed(3)
    gate.weight.copy_(torch.randn(24, 8))
    gate.e_score_correction_bias.copy_(6.94 + 0.06 * torch.randn(24))
    x = torch.randn(64, 8)
    weights, ids = noaux_tc(x @ gate.weight.T, gate.e_score_correction_bias, 4, 2.5)
    own, chosen = (t.gather(1, chosen_order) for t, chosen_order in _sorted_by_id(weights, ids))
    expected, built_in = (t.gather(1, order) for t, order in _sorted_by_id(*gate(x)))
    assert torch.equal(chosen, built_in)
    # Scores in two forms, each a few fp32 roundings of numbers of up to 1 from the exact one.
    assert ((own - expected).abs() <= gamma(16) * 2.5).all()


def _sorted_by_id(
    weights: torch.Tensor, ids: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    order = ids.argsort(dim=1)
    return [(weights, order), (ids, order)]


@pytest.mark.parametrize(
    "message, experts, hidden, part, top_k",
    [
        (r"number of experts is 128; .* \(256,\)", 128, 2048, 64, 8),
        (r"top_k is 6; the kernel serves \(8,\)", 256, 2048, 64, 6),
        (r"hidden size is 1024", 256, 1024, 64, 8),
        (r"hidden size is 10240", 256, 10240, 64, 8),
        (r"expert slice is 96", 256, 2048, 96, 8),
        (r"expert slice is 576", 256, 2048, 576, 8),
        (r"top_k is 257; it must be in \[1, 256\]", 256, 2048, 64, 257),
    ],
)
def test_shapes_that_the_kernels_do_not_serve_are_refused(
    message: str, experts: int, hidden: int, part: int, top_k: int
) -> None:
    changes = {
        "x": torch.zeros(1, hidden, dtype=torch.bfloat16),
        "router_logits": torch.zeros(1, experts),
        "routing_bias": torch.zeros(experts),
        "fc1_weight": torch.empty(experts, 2 * part, hidden, dtype=torch.bfloat16),
        "fc2_weight": torch.empty(experts, hidden, part, dtype=torch.bfloat16),
        "top_k": top_k,
    }
    assert_refuses(LowmBf16Moe, tiny(FULL), message, **changes)


def test_other_bad_arguments_are_refused() -> None:
    def refuses(message: str, **changes: object) -> None:
        assert_refuses(LowmBf16Moe, tiny(FULL), message, **changes)

    refuses(r"x is \[2, 48\]; it must be \[1, any\]", x=torch.zeros(2, 48))
    refuses(r"router_logits is torch.bfloat16", router_logits=torch.zeros(1, 24).bfloat16())
    refuses(r"router_logits is \[1, 23\]", router_logits=torch.zeros(1, 23))
    refuses(r"routing_bias is torch.bfloat16", routing_bias=torch.zeros(24).bfloat16())
    refuses(r"fc1_weight is \[24, 16, 48\]", fc1_weight=torch.zeros(24, 16, 48))
    refuses(r"fc2_weight is torch.bfloat16", fc2_weight=torch.zeros(24, 48, 16).bfloat16())
    refuses(r"fc2_weight has the strides", fc2_weight=torch.zeros(24, 16, 48).mT)
