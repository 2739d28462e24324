"""Shards of a request's pages: every key once, in rank order."""

from typing import Any

import pytest
import torch
from helpers.op_cells import assert_refuses, cell_id, check_cell
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer.hist_shard_meta import (  # noqa: E501
    HistShardMeta,
)


@pytest.mark.parametrize("cell", HistShardMeta.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(HistShardMeta, cell)


def shard(kv_len: int, table: list[int], size: int, rank: int, world: int) -> tuple[Any, ...]:
    length, start = (torch.full((1,), -9, dtype=torch.int32) for _ in range(2))
    own = torch.full((1, -(-len(table) // world) + 1), -9, dtype=torch.int32)
    arguments = (
        torch.tensor([kv_len], dtype=torch.int32),
        torch.tensor(table, dtype=torch.int32),
        size,
        rank,
        world,
        length,
        start,
        own,
    )
    HistShardMeta.is_valid(*arguments)
    HistShardMeta.raw_call(*arguments)
    return int(length), int(start), own[0].tolist()


@given(st.data(), st.integers(1, 5), st.integers(1, 12), st.integers(1, 17))
def test_every_key_belongs_to_one_rank(
    data: st.DataObject, size: int, pages: int, world: int
) -> None:
    kv_len = data.draw(st.integers(0, size * pages))
    table = data.draw(st.permutations(range(pages)))
    keys, longest = [], 0
    for rank in range(world):
        length, start, own = shard(kv_len, table, size, rank, world)
        assert length >= 0
        held = -(-length // size)
        assert own[held:] == [-1] * (len(own) - held)
        keys += [(start + i, own[i // size], i % size) for i in range(length)]
        longest = max(longest, held)
    assert keys == [(p, table[p // size], p % size) for p in range(kv_len)]
    in_use = -(-kv_len // size)
    assert longest == -(-in_use // world)  # no rank holds more than its share


def test_a_rank_behind_a_last_page_that_is_not_full_has_no_keys() -> None:
    assert shard(5, [7, 8], 4, 1, 4) == (1, 4, [8, -1])
    assert shard(5, [7, 8], 4, 2, 4) == (0, 8, [-1, -1])


def test_guards_refuse_by_name() -> None:
    def refused(message: str, **changes: Any) -> None:
        assert_refuses(HistShardMeta, HistShardMeta.CELLS[0], message, **changes)

    refused("rank is 16; world_size is 16", rank=16)
    refused("kv_len is torch.int64", kv_len=torch.tensor([5]))
    refused("kv_len is 70785", kv_len=torch.tensor([70785], dtype=torch.int32))
    refused("shard_table has 7 pages; 16", shard_table=torch.zeros(1, 7).int())
    refused("shard_start is torch.int64", shard_start=torch.zeros(1, dtype=torch.int64))
