"""Cached rows against float64 loops; what stays; scales; guards."""

import math
from typing import Any

import pytest
import torch
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.attention.mla_kv_half_append import (  # noqa: E501
    MlaKvHalfAppend,
)

CELL, TWO_SEQUENCES, PADDED = (MlaKvHalfAppend.CELLS[i] for i in (0, 3, 4))
LATENT, ROPE, PAGE, LAYERS = 6, 4, 4, 3


@pytest.mark.parametrize("cell", MlaKvHalfAppend.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(MlaKvHalfAppend, cell)


def exact_rows(inputs: dict[str, Any]) -> list[list[float]]:
    """The unrounded cache row of each token, one number at a time."""
    weight, rows = inputs["norm_weight"].tolist(), []
    for x, position in zip(inputs["kv_a"].tolist(), inputs["position_ids"].tolist(), strict=True):
        c, r = x[: len(weight)], x[len(weight) :]
        norm = math.sqrt(sum(v * v for v in c) / len(c) + inputs["eps"])
        row = [v / norm * w for v, w in zip(c, weight, strict=True)]
        for j, (cos, sin) in enumerate(inputs["cos_sin"][max(position, 0)].tolist()):
            row += [r[2 * j] * cos - r[2 * j + 1] * sin, r[2 * j] * sin + r[2 * j + 1] * cos]
        rows.append(row)
    return rows


def written_row(inputs: dict[str, Any], token: int) -> int:
    position, size = int(inputs["position_ids"][token]), inputs["block_size"]
    request = token * inputs["block_table"].shape[0] // inputs["kv_a"].shape[0]
    block = int(inputs["block_table"][request, position // size])
    return block * inputs["stride_factor"] + inputs["layer_id"] * size + position % size


def run(inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    pool, bmm1, bmm2 = MlaKvHalfAppend.run(MlaKvHalfAppend.raw_call, inputs)
    return pool, bmm1, bmm2


def small_inputs(dtype: torch.dtype, pool_dtype: torch.dtype) -> dict[str, Any]:
    """Another geometry: 6 + 4 channels, 2 requests of 2 rows, pages of 4 tokens, 3 layers."""
    generator = torch.Generator().manual_seed(3)
    randn = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    pool = torch.full((8 * LAYERS * PAGE, LATENT + ROPE), -7.0).to(pool_dtype)
    return {
        "kv_a": randn(4, 32)[:, 8 : 8 + LATENT + ROPE],
        "norm_weight": randn(LATENT),
        "eps": 1e-5,
        "cos_sin": torch.randn(16, ROPE // 2, 2, generator=generator),
        "position_ids": torch.tensor([3, 4, 9, -1]),
        "block_table": torch.tensor([[5, 2, -1, -1], [7, 0, 3, -1]], dtype=torch.int32),
        "block_size": PAGE,
        "stride_factor": LAYERS * PAGE,
        "layer_id": 2,
        "softmax_scale": 0.25,
        "kv_pool": pool,
        "bmm1_scale": torch.zeros(2),
        "bmm2_scale": torch.zeros(1),
        "trigger_at_entry": False,
    }


@pytest.mark.parametrize("cell", [CELL, TWO_SEQUENCES], ids=cell_id)
def test_rows_are_the_exact_values_rounded_once(cell: Cell) -> None:
    inputs = cell_inputs(MlaKvHalfAppend, cell)
    pool = run(inputs)[0].double()
    for token, exact in enumerate(exact_rows(inputs)):
        stored = pool[written_row(inputs, token)]
        value = torch.tensor(exact, dtype=torch.float64)
        # Half a step of e4m3: 2^-4 of the value, 2^-10 below 2^-6; the rest is fp32's share.
        bound = torch.clamp(value.abs() * 2**-4, min=2**-10) * (1 + 2**-10)
        assert bool(((stored - value).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_geometry_keeps_the_activation_dtype(dtype: torch.dtype) -> None:
    inputs = small_inputs(dtype, dtype)
    MlaKvHalfAppend.is_valid(**inputs)
    pool = run(inputs)[0]
    for token, exact in enumerate(exact_rows(inputs)[:3]):
        value = torch.tensor(exact, dtype=torch.float64)
        stored = pool[written_row(inputs, token)].double()
        # Half a unit in the last place, and some fp32 roundings before it.
        eps = torch.finfo(dtype).eps / 2 + 16 * 2**-24
        assert float((stored - value).abs().max()) <= eps * float(value.abs().max())


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float8_e4m3fn])
def test_padding_and_other_rows_stay(pool_dtype: torch.dtype) -> None:
    inputs = small_inputs(torch.float32, pool_dtype)
    pool = run(inputs)[0]
    rest = torch.ones(pool.shape[0], dtype=torch.bool)
    rest[[written_row(inputs, token) for token in range(3)]] = False
    assert torch.equal(pool[rest].float(), torch.full_like(pool[rest].float(), -7.0))
    assert not bool((pool[~rest].float() == -7.0).all(-1).any())


def test_a_position_without_a_block_is_padding() -> None:
    inputs = small_inputs(torch.float32, torch.float32)
    inputs["position_ids"] = torch.tensor([8, 8, 13, -1])  # -1 in both tables
    assert torch.equal(run(inputs)[0], inputs["kv_pool"])


def test_e4m3_saturates_and_keeps_nan() -> None:
    inputs = cell_inputs(MlaKvHalfAppend, MlaKvHalfAppend.CELLS[2])
    inputs["kv_a"][0, 512], inputs["kv_a"][0, 513] = 30000.0, 0.0
    inputs["kv_a"][0, 575] = float("nan")
    inputs["cos_sin"][:, 0] = torch.tensor([1.0, -1.0])
    row = run(inputs)[0][written_row(inputs, 0)].float()
    assert row[512:514].tolist() == [448.0, -448.0]
    assert row[574:].isnan().all() and not row[:574].isnan().any()


def test_the_scales_are_written_even_if_every_row_is_padding() -> None:
    inputs = cell_inputs(MlaKvHalfAppend, PADDED)
    inputs["position_ids"].fill_(-1)
    _, bmm1, bmm2 = run(inputs)
    scale = torch.tensor([1 / 16, math.log2(math.e) / 16])  # 256^-0.5
    assert torch.equal(bmm1, scale) and torch.equal(bmm2, torch.ones(1))


def test_a_second_run_writes_the_same_bytes() -> None:
    inputs = cell_inputs(MlaKvHalfAppend, CELL)
    once = run(inputs)[0]
    twice = run({**inputs, "kv_pool": once})[0]
    assert torch.equal(once.view(torch.uint8), twice.view(torch.uint8))


def test_guards_refuse_by_name() -> None:
    inputs = cell_inputs(MlaKvHalfAppend, CELL)

    def refused(message: str, **changes: Any) -> None:
        assert_refuses(MlaKvHalfAppend, CELL, message, **changes)

    refused("kv_a is torch.float16", kv_a=inputs["kv_a"].half())
    refused("kv_a has the strides", kv_a=torch.zeros(576, 8).bfloat16().T)
    refused("norm_weight is torch.float32", norm_weight=inputs["norm_weight"].float())
    refused("575 columns, 63 more than norm_weight", kv_a=torch.zeros(8, 576).bfloat16()[:, :575])
    refused("cos_sin is", cos_sin=inputs["cos_sin"][:, :16])
    refused("positions reach from 100 to 107; cos_sin has 104", cos_sin=inputs["cos_sin"][:104])
    refused(
        "positions reach from 100 to 107; block_table has 64",
        block_table=inputs["block_table"][:, :1].contiguous(),
    )
    refused("8 token rows do not split evenly over 3", block_table=torch.zeros(3, 2).int())
    refused("layer_id 2, 64 rows, does not lie within a block of 128", layer_id=2)
    refused("kv_pool is torch.float16", kv_pool=inputs["kv_pool"].half())
    refused("kv_pool has 64 rows", kv_pool=inputs["kv_pool"][:64])
    refused("repeat; each token needs its own", position_ids=torch.full((8,), 100))
    refused("bmm1_scale is", bmm1_scale=torch.zeros(1))
    refused("bmm2_scale is", bmm2_scale=torch.zeros(2))
