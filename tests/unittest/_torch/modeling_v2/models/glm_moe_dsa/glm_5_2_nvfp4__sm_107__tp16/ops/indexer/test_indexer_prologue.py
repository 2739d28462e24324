"""Index queries, head weights and keys of one call; both tails in one; guards."""

import pytest
import torch
from helpers.indexer_tails import E4M3, PAGE, expected_key, expected_query, small
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer._tail import (  # noqa: E501
    assert_same_queries,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer.indexer_k_tail import (  # noqa: E501
    IndexerKTail,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer.indexer_prologue import (  # noqa: E501
    IndexerPrologue,
)


@pytest.mark.parametrize("cell", IndexerPrologue.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(IndexerPrologue, cell)


def test_queries_and_head_weights_are_the_formula() -> None:
    inputs = cell_inputs(IndexerPrologue, small(IndexerPrologue.CELLS[0]))
    out_q, out_w = IndexerPrologue.raw_call(**inputs)
    assert (out_q.dtype, out_w.dtype) == (E4M3, torch.float32)
    for t in range(out_q.shape[0]):
        for h in range(out_q.shape[1]):
            values, weight = expected_query(inputs, inputs["q"], t, h)
            assert out_q[t, h].float().tolist() == values
            assert float(out_w[t, h]) == weight


def test_the_prologue_is_both_tails() -> None:
    inputs = cell_inputs(IndexerPrologue, IndexerPrologue.CELLS[0])
    pool = IndexerPrologue.run(IndexerPrologue.raw_call, inputs)[-1]
    keys = {name: inputs[name] for name in IndexerKTail.arguments()}
    assert torch.equal(pool, IndexerKTail.run(IndexerKTail.raw_call, keys)[-1])


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


def test_guards_refuse_by_name() -> None:
    cell = IndexerPrologue.CELLS[0]
    inputs = cell_inputs(IndexerPrologue, cell)
    assert_refuses(IndexerPrologue, cell, "q is torch.float32", q=inputs["q"].float())
    weights = inputs["weights"][:, :31]
    assert_refuses(IndexerPrologue, cell, r"weights is \[8, 31\]", weights=weights)
