"""Sparse attention against float64 loops with the split's rounding of the weights; the two ways of
naming rows; tokens without keys; guards."""

from typing import Any

import pytest
import torch
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell
from torch import Tensor

from tensorrt_llm._torch.custom_ops.sparse_mla import absence_bias, sparse_mla_attention
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.attention.sparse_mla_flash_decode import (  # noqa: E501
    SparseMlaFlashDecode,
    selected_rows,
)

# 300 slots: two whole splits and a part of one.
SMALL = Geometry(heads=3, kv_lora_rank=40, qk_rope_head_dim=8, v_head_dim=16, index_topk=300)
CELLS = [
    Cell(c.why, {**c.spec, "keys": min(c.spec["keys"], 640), "geometry": SMALL})
    for c in SparseMlaFlashDecode.CELLS
]
FULL, SHARED, _, ROWS_ONLY, SHORT, TWO = CELLS
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("cell", CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(SparseMlaFlashDecode, cell)


def exact_head(q: Tensor, keys: Tensor, scale: float, latent: int, rounds: bool) -> Tensor:
    """One token and head in float64, split by split; `keys` are the 128-slot splits' rows with
    -1 as None."""
    splits = []
    for split in keys:
        if not len(split):
            continue
        scores = split @ q
        p = torch.exp(scale * (scores - scores.max()))
        # The kernel rounds an fp32 weight, so float64 is narrowed first.
        rounded = (p.float() * 256).to(E4M3).double() / 256 if rounds else p
        splits.append((scores.max(), p.sum(), rounded @ split[:, :latent]))
    if not splits:
        return torch.zeros(latent, dtype=torch.float64)
    top = torch.stack([m for m, _, _ in splits]).max()
    factors = [torch.exp(scale * (m - top)) for m, _, _ in splits]
    values = sum(f * v for f, (_, _, v) in zip(factors, splits, strict=True))
    return values / sum(f * n for f, (_, n, _) in zip(factors, splits, strict=True))


def exact_output(inputs: dict[str, Any]) -> Tensor:
    """float64 [tokens, heads * v], but for the weights' rounding and the latent's to v_b's
    dtype."""
    q, pool, v_b = inputs["q"].double(), inputs["kv_pool"].double(), inputs["v_b"].double()
    names = ("topk_indices", "block_table", "block_size", "stride_factor", "layer_id")
    rows = selected_rows(*(inputs[name] for name in names))
    scale, latent, out = float(inputs["bmm1_scale"][0]), v_b.shape[2], []
    for t in range(q.shape[0]):
        splits = [pool[part[part >= 0]] for part in rows[t].split(128)]
        for h in range(q.shape[1]):
            rounds = inputs["kv_pool"].dtype == E4M3
            o = exact_head(q[t, h], splits, scale, latent, rounds)
            out.append(v_b[h] @ o.to(inputs["v_b"].dtype).double())
    return torch.stack(out).view(q.shape[0], -1)


@pytest.mark.parametrize("cell", [FULL, ROWS_ONLY, SHORT, TWO], ids=cell_id)
def test_numbers_are_the_formula(cell: Cell) -> None:
    inputs = cell_inputs(SparseMlaFlashDecode, cell)
    out, exact = SparseMlaFlashDecode.raw_call(**inputs), exact_output(inputs)
    assert out.dtype == torch.bfloat16 and out.is_contiguous()
    # One rounding of the result (half of 2^-8) and, where the latent lies on a boundary, one of it.
    assert float((out.double() - exact).abs().max()) <= 2 * 2**-8 * float(exact.abs().max())
    rms = (out.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert float(rms) <= 2**-8


@pytest.mark.parametrize("keys", [640, 100])
def test_fp32_is_plain_attention(keys: int) -> None:
    """No rounding anywhere: the built-in attention and the value projection."""
    spec = {**FULL.spec, "keys": keys, "dtype": torch.float32}
    inputs = cell_inputs(SparseMlaFlashDecode, Cell("fp32", spec))
    inputs |= {name: inputs[name].float() for name in ("q", "kv_pool")}
    names = ("topk_indices", "block_table", "block_size", "stride_factor", "layer_id")
    rows = selected_rows(*(inputs[name] for name in names))
    attended = sparse_mla_attention(
        inputs["q"],
        inputs["kv_pool"],
        rows.clamp(min=0),
        absence_bias(rows, torch.float32),
        float(inputs["bmm1_scale"][0]),
        SMALL.kv_lora_rank,
    )
    expected = torch.einsum("thl,hvl->thv", attended, inputs["v_b"]).flatten(1)
    out = SparseMlaFlashDecode.raw_call(**inputs)
    # fp32 sums of 48 (scores), 300 (values) and 40 (projection) terms, and exponents of scores
    # up to 2^5: all below 2^-24 * (32 * 48 + 300 + 40) of the largest value.
    assert float((out - expected).abs().max()) <= 2**-24 * 1876 * float(expected.abs().max())


def test_a_cache_in_bf16_is_plain_attention_with_rounded_weights() -> None:
    """Roundings of 2^-8 at most: of the weights, whose errors have random signs and so make less
    than 2^-8 of a sum of terms with random signs; of the latent, on either side; of the result."""
    inputs = cell_inputs(SparseMlaFlashDecode, FULL)
    inputs |= {name: inputs[name].bfloat16() for name in ("q", "kv_pool")}
    out, exact = SparseMlaFlashDecode.raw_call(**inputs), exact_output(inputs)
    assert out.dtype == torch.bfloat16
    rms = (out.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert float(rms) <= 4 * 2**-8


def test_weights_are_rounded_to_e4m3_within_their_split() -> None:
    """Two keys, one weight just above half an e4m3 step: it counts as rounded up in the values and
    as itself in the sum."""
    g = Geometry(heads=1, kv_lora_rank=2, qk_rope_head_dim=2, v_head_dim=2, index_topk=2)
    cell = Cell("two keys", {"rows": 1, "keys": 64, "geometry": g, "dtype": torch.float32})
    inputs = cell_inputs(SparseMlaFlashDecode, cell)
    weight = 1.0625 + 2**-7  # between 1.0 and 1.125, beyond the middle
    inputs["q"] = torch.tensor([[[0.0, 0.0, 1.0, 0.0]]]).to(E4M3)
    pool = torch.zeros_like(inputs["kv_pool"].float())
    pool[0, 2], pool[1, 2] = 1.0, 0.0
    pool[0, 0], pool[1, 1] = 1.0, 1.0
    inputs["kv_pool"] = pool.to(E4M3)
    inputs["topk_indices"] = torch.tensor([[0, 1]], dtype=torch.int32)
    inputs["bmm1_scale"] = torch.tensor([0.0, -torch.log2(torch.tensor(weight / 2)).item()])
    inputs["v_b"] = torch.eye(2).unsqueeze(0)
    out = SparseMlaFlashDecode.raw_call(**inputs)[0]
    total = 1 + weight / 2
    expected = torch.tensor([1 / total, 1.125 / 2 / total])
    assert float((out - expected).abs().max()) <= 2**-21


def test_positions_and_rows_name_the_same_keys() -> None:
    inputs = cell_inputs(SparseMlaFlashDecode, FULL)
    names = ("topk_indices", "block_table", "block_size", "stride_factor", "layer_id")
    rows = selected_rows(*(inputs[name] for name in names)).int()
    by_rows = {**inputs, "topk_indices": rows, "block_table": None, "kv_lens": None}
    calls = [inputs, by_rows, {**inputs, "gather_before_wait": True}]
    outs = [SparseMlaFlashDecode.raw_call(**call) for call in calls]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_a_token_without_keys_gets_zeros_and_harms_nobody() -> None:
    inputs = cell_inputs(SparseMlaFlashDecode, FULL)
    before = SparseMlaFlashDecode.raw_call(**inputs)
    inputs["topk_indices"][3] = -1
    out = SparseMlaFlashDecode.raw_call(**inputs)
    assert not out[3].any()
    assert torch.equal(out[:3], before[:3]) and torch.equal(out[4:], before[4:])


def test_rows_that_are_not_selected_are_not_seen() -> None:
    inputs = cell_inputs(SparseMlaFlashDecode, SHORT)
    names = ("topk_indices", "block_table", "block_size", "stride_factor", "layer_id")
    rows = selected_rows(*(inputs[name] for name in names))
    before = SparseMlaFlashDecode.raw_call(**inputs)
    others = torch.ones(inputs["kv_pool"].shape[0], dtype=torch.bool)
    others[rows[rows >= 0]] = False
    inputs["kv_pool"].view(torch.uint8)[others] = 255  # NaN
    assert torch.equal(SparseMlaFlashDecode.raw_call(**inputs), before)


def test_nan_of_a_selected_row_is_not_hidden() -> None:
    inputs = cell_inputs(SparseMlaFlashDecode, FULL)
    before = SparseMlaFlashDecode.raw_call(**inputs)
    names = ("topk_indices", "block_table", "block_size", "stride_factor", "layer_id")
    rows = selected_rows(*(inputs[name] for name in names))
    inputs["kv_pool"].view(torch.uint8)[rows[2, 140], 41] = 255  # in its rotary key
    touched = (rows == rows[2, 140]).any(1)
    out = SparseMlaFlashDecode.raw_call(**inputs)
    assert bool(out[touched].isnan().all())
    assert torch.equal(out[~touched], before[~touched])


def test_value_rows_may_be_a_view_of_kv_b() -> None:
    inputs = cell_inputs(SparseMlaFlashDecode, FULL)
    heads, v, latent = inputs["v_b"].shape
    kv_b = torch.zeros(heads, 5 + v, latent, dtype=torch.bfloat16)
    kv_b[:, 5:] = inputs["v_b"]
    view = {**inputs, "v_b": kv_b[:, 5:]}
    SparseMlaFlashDecode.is_valid(**view)
    out = SparseMlaFlashDecode.raw_call(**view)
    assert torch.equal(out, SparseMlaFlashDecode.raw_call(**inputs))


def test_guards_refuse_by_name() -> None:
    inputs = cell_inputs(SparseMlaFlashDecode, FULL)

    def refused(message: str, **changes: Any) -> None:
        assert_refuses(SparseMlaFlashDecode, FULL, message, **changes)

    refused("kv_pool is torch.float32", kv_pool=inputs["kv_pool"].float())
    refused(r"kv_pool has 1216 rows; row \d+ is selected", kv_pool=inputs["kv_pool"][:1216])
    refused("topk_indices is torch.int64", topk_indices=inputs["topk_indices"].long())
    refused("bmm1_scale is", bmm1_scale=torch.ones(1))
    refused(r"v_b is \[2, 16, 40\]", v_b=inputs["v_b"][:2])
    refused("v_b has the strides", v_b=torch.zeros(3, 40, 16).bfloat16().transpose(1, 2))
    refused("follow each other", v_b=torch.zeros(3, 32, 40).bfloat16()[:, ::2])
    refused("8 token rows do not split evenly over 3", block_table=torch.zeros(3, 4).int())
    refused("gather_before_wait needs", block_table=None, kv_lens=None, gather_before_wait=True)
    refused("gather_before_wait needs", kv_lens=None, gather_before_wait=True)
    refused(
        r"positions up to \[\d+\] are selected; kv_lens is \[500\]",
        kv_lens=torch.tensor([500], dtype=torch.int32),
    )
