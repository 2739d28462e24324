"""Key tail, query tail and prologue against one number at a time in float64, with the roundings
that their contracts name."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.numerics import nearest_e4m3, smallest_scale
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer._tail import (  # noqa: E501
    assert_same_queries,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer.indexer_k_tail import (  # noqa: E501
    IndexerKTail,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer.indexer_prologue import (  # noqa: E501
    IndexerPrologue,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer.indexer_q_tail import (  # noqa: E501
    IndexerQTail,
)

SMALL = Geometry(q_lora_rank=64, index_n_heads=3, index_head_dim=12, qk_rope_head_dim=4)
E4M3 = torch.float8_e4m3fn
PAGE = 64

Record = type[OpWrapper]
ALL_CELLS = [
    pytest.param(record, cell, id=f"{record.__name__}-{cell_id(cell)}")
    for record in (IndexerKTail, IndexerPrologue, IndexerQTail)
    for cell in record.CELLS
]


def small(cell: Cell, **spec: Any) -> Cell:
    return Cell(cell.why, {**cell.spec, "geometry": SMALL, **spec})


@pytest.mark.parametrize("record, cell", ALL_CELLS)
def test_cell(record: Record, cell: Cell) -> None:
    check_cell(record, small(cell) if record is IndexerQTail else cell)


def rounded(values: Sequence[float], dtype: torch.dtype) -> list[float]:
    return torch.tensor(values, dtype=torch.float64).to(dtype).tolist()


def rotated(x: list[float], cos_sin: Tensor, position: int, dtype: torch.dtype) -> list[float]:
    out = list(x)
    for j, (cos, sin) in enumerate(cos_sin[max(position, 0)].tolist()):
        a, b = x[2 * j], x[2 * j + 1]
        out[2 * j], out[2 * j + 1] = a * cos - b * sin, a * sin + b * cos
    return rounded(out, dtype)


def quantised(x: list[float]) -> tuple[list[float], float]:
    scale = float(smallest_scale(max(abs(v) for v in x)))
    return [float(nearest_e4m3(v / scale)) for v in x], scale


def expected_key(inputs: dict[str, Any], t: int) -> list[float]:
    x, dtype = inputs["k"][t].double().tolist(), inputs["k"].dtype
    mean = sum(x) / len(x)
    norm = math.sqrt(sum((v - mean) ** 2 for v in x) / len(x) + inputs["eps"])
    weight, bias = inputs["norm_weight"].tolist(), inputs["norm_bias"].tolist()
    normed = [(v - mean) / norm * w + b for v, w, b in zip(x, weight, bias, strict=True)]
    position = int(inputs["position_ids"][t])
    return rotated(rounded(normed, dtype), inputs["cos_sin"], position, dtype)


def expected_query(inputs: dict[str, Any], q: Tensor, t: int, h: int) -> tuple[list[float], float]:
    """Query values in e4m3 and the head's fp32 weight."""
    position, dtype = int(inputs["position_ids"][t]), inputs["weights"].dtype
    values, scale = quantised(rotated(q[t, h].tolist(), inputs["cos_sin"], position, dtype))
    factor = rounded([inputs["weight_scale"]], torch.float32)[0]
    weight = rounded([float(inputs["weights"][t, h]) * factor], torch.float32)[0]
    return values, weight * scale


def stored_key(pool: Tensor, inputs: dict[str, Any], t: int) -> tuple[list[float], float]:
    """Data and scale of a page: all tokens' data first, then all tokens' scales."""
    dim, offset = inputs["k"].shape[1], int(inputs["index_offset"][t])
    page = pool[int(inputs["index_block"][t]), inputs["layer_slot"]]
    data = page[offset * dim : (offset + 1) * dim].view(E4M3)
    scale = page[PAGE * dim + 4 * offset : PAGE * dim + 4 * offset + 4].clone().view(torch.float32)
    return data.float().tolist(), float(scale)


@pytest.mark.parametrize("record", [IndexerKTail, IndexerPrologue])
@pytest.mark.parametrize("make", [small, lambda cell: cell], ids=["small", "real"])
def test_stored_keys_are_the_formula(record: Record, make: Any) -> None:
    inputs = cell_inputs(record, make(record.CELLS[0]))
    pool = record.run(record.raw_call, inputs)[-1]
    for t in range(inputs["k"].shape[0]):
        assert stored_key(pool, inputs, t) == quantised(expected_key(inputs, t))


def test_queries_and_head_weights_are_the_formula() -> None:
    inputs = cell_inputs(IndexerPrologue, small(IndexerPrologue.CELLS[0]))
    out_q, out_w = IndexerPrologue.raw_call(**inputs)
    assert (out_q.dtype, out_w.dtype) == (E4M3, torch.float32)
    for t in range(out_q.shape[0]):
        for h in range(out_q.shape[1]):
            values, weight = expected_query(inputs, inputs["q"], t, h)
            assert out_q[t, h].float().tolist() == values
            assert float(out_w[t, h]) == weight


def test_the_folded_projection_is_norm_then_wq_b() -> None:
    inputs = cell_inputs(IndexerQTail, small(IndexerQTail.CELLS[0]))
    x, weight = inputs["q_a"].double(), inputs["weight"].double()
    factor = 1 / (x.square().mean(-1, keepdim=True) + inputs["eps"]).sqrt()
    q = torch.einsum("tr,hdr->thd", x * factor, weight).bfloat16().double()
    out_q, out_w = IndexerQTail.raw_call(**inputs)
    for t in range(out_q.shape[0]):
        for h in range(out_q.shape[1]):
            values, head_weight = expected_query(inputs, q, t, h)
            assert out_q[t, h].float().tolist() == values
            assert float(out_w[t, h]) == head_weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_fp8_keys_and_queries_keep_the_activation_dtype(dtype: torch.dtype) -> None:
    inputs = cell_inputs(IndexerPrologue, small(IndexerPrologue.CELLS[0], dtype=dtype))
    pool = torch.full((4, 2, PAGE * 12 * dtype.itemsize), 255, dtype=torch.uint8)
    inputs |= {"index_pool": pool, "key_dtype": dtype}
    IndexerPrologue.is_valid(**inputs)
    out_q, out_w, pool = IndexerPrologue.run(IndexerPrologue.raw_call, inputs)
    assert out_q.dtype == dtype
    assert torch.equal(out_w, inputs["weights"].float() * inputs["weight_scale"])
    rows = pool[2, 1].view(dtype).view(PAGE, 12)
    for t in range(8):
        key, stored = torch.tensor(expected_key(inputs, t)), rows[36 + t]
        # One unit in the last place: fp32 sums, of 12 terms, against float64.
        near = torch.finfo(dtype).eps * 8 * float(key.abs().max())
        assert float((stored.double() - key).abs().max()) <= near
    rest = torch.ones(PAGE, dtype=torch.bool)
    rest[36:44] = False
    assert bool((rows.view(torch.uint8)[rest] == 255).all())


@pytest.mark.parametrize("record", [IndexerKTail, IndexerPrologue])
def test_padding_and_all_other_bytes_stay(record: Record) -> None:
    inputs = cell_inputs(record, small(record.CELLS[-1]))
    pool = record.run(record.raw_call, inputs)[-1]
    expected, dim = inputs["index_pool"].clone(), 12
    for t in range(5):
        offset = int(inputs["index_offset"][t])
        for part in (
            slice(offset * dim, (offset + 1) * dim),
            slice(PAGE * dim + 4 * offset, PAGE * dim + 4 * offset + 4),
        ):
            assert not torch.equal(pool[2, 1, part], expected[2, 1, part])
            expected[2, 1, part] = pool[2, 1, part]
    assert torch.equal(pool, expected)


def test_the_prologue_is_both_tails() -> None:
    inputs = cell_inputs(IndexerPrologue, IndexerPrologue.CELLS[0])
    pool = IndexerPrologue.run(IndexerPrologue.raw_call, inputs)[-1]
    keys = {name: inputs[name] for name in IndexerKTail.arguments()}
    assert torch.equal(pool, IndexerKTail.run(IndexerKTail.raw_call, keys)[-1])


def test_zero_keys_have_the_smallest_scale() -> None:
    inputs = cell_inputs(IndexerKTail, small(IndexerKTail.CELLS[1]))
    inputs["norm_weight"].zero_()
    inputs["norm_bias"].zero_()
    pool = IndexerKTail.run(IndexerKTail.raw_call, inputs)[-1]
    assert stored_key(pool, inputs, 0) == ([0.0] * 12, 2.0**-22)  # at least 1e-4 / 448


def test_a_rescaled_head_is_the_same_query() -> None:
    inputs = cell_inputs(IndexerPrologue, small(IndexerPrologue.CELLS[0]))
    q, w = IndexerPrologue.raw_call(**inputs)
    halved, doubled = q.clone(), w.clone()
    halved[2, 1], doubled[2, 1] = (q[2, 1].float() / 2).to(E4M3), 2 * w[2, 1]
    assert_same_queries((halved, doubled), (q, w), 2.0**-8)
    with pytest.raises(AssertionError, match="more than a scale"):
        assert_same_queries((q, torch.where(doubled == w, w, 3 * w)), (q, w), 2.0**-8)
    with pytest.raises(AssertionError, match="of a rescaled head"):
        assert_same_queries((q, doubled), (q, w), 2.0**-8)


def test_key_guards_refuse_by_name() -> None:
    cell = IndexerKTail.CELLS[0]
    inputs = cell_inputs(IndexerKTail, cell)

    def refused(message: str, **changes: Any) -> None:
        assert_refuses(IndexerKTail, cell, message, **changes)

    refused("k is torch.float16", k=inputs["k"].half())
    refused("norm_bias is torch.float32", norm_bias=inputs["norm_bias"].float())
    refused("cos_sin rotates 130 channels; there are 128", cos_sin=torch.zeros(256, 65, 2))
    refused("positions reach from 100 to 107", cos_sin=inputs["cos_sin"][:104])
    refused("index_block is torch.int32", index_block=inputs["index_block"].int())
    refused("slots .* repeat", index_offset=torch.full((8,), 3))
    refused(r"slots \[\(2, 64\)\] .* outside of 4 blocks of 64", index_offset=torch.arange(57, 65))
    refused("slots .* are outside", index_block=torch.full((8,), 4))
    refused("layer_slot is 2; index_pool has 2 layers", layer_slot=2)
    refused("key_dtype is torch.float32", key_dtype=torch.float32)
    refused("hold no whole number of keys of 132", index_pool=torch.zeros(4, 2, 130).byte())


def test_query_guards_refuse_by_name() -> None:
    cell = IndexerPrologue.CELLS[0]
    inputs = cell_inputs(IndexerPrologue, cell)
    assert_refuses(IndexerPrologue, cell, "q is torch.float32", q=inputs["q"].float())
    weights = inputs["weights"][:, :31]
    assert_refuses(IndexerPrologue, cell, r"weights is \[8, 31\]", weights=weights)
    cell = small(IndexerQTail.CELLS[0])
    inputs = cell_inputs(IndexerQTail, cell)

    def refused(message: str, **changes: Any) -> None:
        assert_refuses(IndexerQTail, cell, message, **changes)

    refused("q_a is torch.float16", q_a=inputs["q_a"].half())
    refused(r"weight is \[3, 12, 63\]", weight=inputs["weight"][..., 1:])
    refused("weights is torch.float32", weights=inputs["weights"].float())
    refused("cos_sin rotates 14 channels; there are 12", cos_sin=torch.zeros(256, 7, 2))
    refused("256 channels have more than one scale", weight=torch.zeros(3, 256, 64).bfloat16())
