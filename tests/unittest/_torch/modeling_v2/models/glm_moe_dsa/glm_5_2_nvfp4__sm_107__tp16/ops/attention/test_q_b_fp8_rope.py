"""Absorbed, rotated queries against the unfolded chain in float64; saturation; guards."""

from typing import Any

import pytest
import torch
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.attention.q_b_fp8_rope import (  # noqa: E501
    Plan,
    QBFp8Rope,
)

CELL = QBFp8Rope.CELLS[0]
HEADS, NOPE, ROPE, LATENT, RANK, ROWS = 2, 3, 4, 6, 8, 3


@pytest.mark.parametrize("cell", QBFp8Rope.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(QBFp8Rope, Cell(cell.why, {**cell.spec, "geometry": Geometry(q_lora_rank=128)}))


def unfolded_layer() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return {
        "q_a": randn(ROWS, RANK),
        "norm": randn(RANK),
        "w_qb": randn(HEADS, NOPE + ROPE, RANK),
        "w_uk": randn(HEADS, NOPE, LATENT),
        "cos_sin": randn(16, ROPE // 2, 2),
        "positions": torch.tensor([2, 7, 15]),
    }


def exact_query(layer: dict[str, Tensor], t: int, h: int) -> list[float]:
    """Norm, q_b_proj, absorption and rotation, one after the other."""
    x = layer["q_a"][t]
    x = x / (x.square().mean() + 1e-5).sqrt() * layer["norm"]
    q = layer["w_qb"][h] @ x
    out = (layer["w_uk"][h].T @ q[:NOPE]).tolist()
    r = q[NOPE:].tolist()
    for j, (cos, sin) in enumerate(layer["cos_sin"][int(layer["positions"][t])].tolist()):
        out += [r[2 * j] * cos - r[2 * j + 1] * sin, r[2 * j] * sin + r[2 * j + 1] * cos]
    return out


def folded_inputs(layer: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Any]:
    nope, rope = layer["w_qb"].split([NOPE, ROPE], dim=1)
    weight = torch.cat([layer["w_uk"].transpose(1, 2) @ nope, rope], dim=1) * layer["norm"]
    return {
        "q_a": layer["q_a"].float(),
        "weight": weight.float().contiguous(),
        "eps": 1e-5,
        "cos_sin": layer["cos_sin"].float(),
        "position_ids": layer["positions"],
        "dtype": dtype,
        "plan": int(Plan.REGULAR),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_queries_are_the_unfolded_chain_rounded_once(dtype: torch.dtype) -> None:
    layer = unfolded_layer()
    inputs = folded_inputs(layer, dtype)
    QBFp8Rope.is_valid(**inputs)
    out = QBFp8Rope.raw_call(**inputs)
    assert out.dtype == dtype and out.is_contiguous()
    for t in range(ROWS):
        for h in range(HEADS):
            exact = torch.tensor(exact_query(layer, t, h), dtype=torch.float64)
            # fp32 inputs, weights and about RANK + 8 operations, each of 2^-24 of a row's size.
            slack = 2 * (RANK + 8) * 2**-24 * float(exact.abs().max()) * RANK
            half_step = torch.zeros_like(exact)
            if dtype == torch.float8_e4m3fn:
                half_step = torch.clamp(exact.abs() * 2**-4, min=2**-10)
            assert bool(((out[t, h].double() - exact).abs() <= half_step + slack).all())


def test_nothing_but_the_last_rounding() -> None:
    """bf16 inputs: e4m3 of the fp64 value, but where it lies on a rounding boundary."""
    inputs = cell_inputs(QBFp8Rope, CELL)
    out = QBFp8Rope.raw_call(**inputs)
    x, weight = inputs["q_a"].double(), inputs["weight"].double()
    factor = (x.square().mean(-1, keepdim=True) + inputs["eps"]).rsqrt()
    y = torch.einsum("tr,hwr->thw", x * factor, weight)
    pairs = y[..., 512:].unflatten(-1, (32, 2))
    cos, sin = inputs["cos_sin"][inputs["position_ids"]].double().unsqueeze(1).unbind(-1)
    even, odd = pairs.unbind(-1)
    y[..., 512:] = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    differing = int((out.float() != y.float().to(torch.float8_e4m3fn).float()).sum())
    assert differing <= 16 * 2**-20 * out.numel() + 1  # fp32 is 2^-20 near, see assert_e4m3_sum


def test_plans_are_one_function_on_the_reference() -> None:
    inputs = cell_inputs(QBFp8Rope, CELL)
    outs = [QBFp8Rope.raw_call(**{**inputs, "plan": int(plan)}) for plan in Plan]
    assert all(torch.equal(out.view(torch.uint8), outs[0].view(torch.uint8)) for out in outs)


def test_e4m3_saturates_and_padding_is_finite() -> None:
    inputs = cell_inputs(QBFp8Rope, CELL)
    inputs["weight"][0, 0] = 1e4 * inputs["q_a"][0]
    inputs["position_ids"][7] = -1
    out = QBFp8Rope.raw_call(**inputs).float()
    assert float(out[0, 0, 0]) == 448.0
    assert bool(out.isfinite().all())


def test_guards_refuse_by_name() -> None:
    inputs = cell_inputs(QBFp8Rope, CELL)

    def refused(message: str, **changes: Any) -> None:
        assert_refuses(QBFp8Rope, CELL, message, **changes)

    refused("q_a is torch.float16", q_a=inputs["q_a"].half())
    refused("q_a has the strides", q_a=torch.zeros(2048, 8).bfloat16().T)
    refused("weight is torch.float32", weight=inputs["weight"].float())
    refused(r"weight is \[4, 576, 2047\]", weight=inputs["weight"][..., :-1])
    refused("cos_sin rotates 576 channels", cos_sin=torch.zeros(256, 288, 2))
    refused("positions reach from 100 to 107; cos_sin has 104", cos_sin=inputs["cos_sin"][:104])
    refused("dtype is torch.float16", dtype=torch.float16)
    refused(r"plan is 3; it must be one of \[0, 1, 2\]", plan=3)
