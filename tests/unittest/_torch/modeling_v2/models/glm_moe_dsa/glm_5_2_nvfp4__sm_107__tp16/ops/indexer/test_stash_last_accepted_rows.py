"""Which row is kept, clamped counts, what stays."""

from typing import Any

import pytest
import torch
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer.stash_last_accepted_rows import (  # noqa: E501
    StashLastAcceptedRows,
)

CELL = StashLastAcceptedRows.CELLS[0]


@pytest.mark.parametrize("cell", StashLastAcceptedRows.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(StashLastAcceptedRows, cell)


@given(st.integers(1, 8), st.lists(st.integers(-3, 12), min_size=1, max_size=4), st.booleans())
def test_the_last_accepted_row_is_kept_and_the_rest_stays(
    rows: int, counts: list[int], wide: bool
) -> None:
    requests, topk = len(counts), 3
    chosen = torch.arange(requests * rows * topk, dtype=torch.int32).view(-1, topk)
    accepted = torch.tensor(counts, dtype=torch.int64 if wide else torch.int32)
    buffer = torch.full((requests + 2, topk), -9, dtype=torch.int32)
    StashLastAcceptedRows.is_valid(chosen, accepted, buffer, rows)
    StashLastAcceptedRows.raw_call(chosen, accepted, buffer, rows)
    for r, count in enumerate(counts):
        last = 0 if count < 1 else rows - 1 if count > rows else count - 1
        assert buffer[r].tolist() == chosen[r * rows + last].tolist()
    assert bool((buffer[requests:] == -9).all())


def test_guards_refuse_by_name() -> None:
    inputs = cell_inputs(StashLastAcceptedRows, CELL)

    def refused(message: str, **changes: Any) -> None:
        assert_refuses(StashLastAcceptedRows, CELL, message, **changes)

    refused("num_accepted is torch.float32", num_accepted=torch.ones(1))
    refused(r"topk_indices is \[8, 2048\]; it must be \[7, any\]", rows_per_request=7)
    refused("topk_indices is torch.int64", topk_indices=inputs["topk_indices"].long())
    refused(r"it must be \[2, 2048\]", shared_topk_indices=torch.zeros(2, 7).int())
    refused(r"it must be \[1, 2048\]", shared_topk_indices=torch.zeros(0, 2048).int())
