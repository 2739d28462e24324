"""Index keys in the cache against the formula; what stays; guards."""

from typing import Any

import pytest
import torch
from helpers.indexer_tails import expected_key, quantised, small, stored_key
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer.indexer_k_tail import (  # noqa: E501
    IndexerKTail,
)


@pytest.mark.parametrize("cell", IndexerKTail.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(IndexerKTail, cell)


@pytest.mark.parametrize("make", [small, lambda cell: cell], ids=["small", "real"])
def test_stored_keys_are_the_formula(make: Any) -> None:
    inputs = cell_inputs(IndexerKTail, make(IndexerKTail.CELLS[0]))
    pool = IndexerKTail.run(IndexerKTail.raw_call, inputs)[-1]
    for t in range(inputs["k"].shape[0]):
        assert stored_key(pool, inputs, t) == quantised(expected_key(inputs, t))


def test_padding_and_all_other_bytes_stay() -> None:
    inputs = cell_inputs(IndexerKTail, small(IndexerKTail.CELLS[-1]))
    pool = IndexerKTail.run(IndexerKTail.raw_call, inputs)[-1]
    expected, dim = inputs["index_pool"].clone(), 12
    for t in range(5):
        offset = int(inputs["index_offset"][t])
        for part in (
            slice(offset * dim, (offset + 1) * dim),
            slice(64 * dim + 4 * offset, 64 * dim + 4 * offset + 4),
        ):
            assert not torch.equal(pool[2, 1, part], expected[2, 1, part])
            expected[2, 1, part] = pool[2, 1, part]
    assert torch.equal(pool, expected)


def test_zero_keys_have_the_smallest_scale() -> None:
    inputs = cell_inputs(IndexerKTail, small(IndexerKTail.CELLS[1]))
    inputs["norm_weight"].zero_()
    inputs["norm_bias"].zero_()
    pool = IndexerKTail.run(IndexerKTail.raw_call, inputs)[-1]
    assert stored_key(pool, inputs, 0) == ([0.0] * 12, 2.0**-22)  # at least 1e-4 / 448


def test_guards_refuse_by_name() -> None:
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
