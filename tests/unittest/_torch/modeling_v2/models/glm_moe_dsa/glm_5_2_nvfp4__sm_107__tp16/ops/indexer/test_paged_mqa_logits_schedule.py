"""The processors' shares of the index keys, chunk by chunk."""

from typing import Any

import pytest
import torch
from helpers.op_cells import assert_refuses, cell_id, check_cell
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer.paged_mqa_logits_schedule import (  # noqa: E501
    PagedMqaLogitsSchedule,
)


@pytest.mark.parametrize("cell", PagedMqaLogitsSchedule.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(PagedMqaLogitsSchedule, cell)


@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=5),
    st.integers(1, 9),
)
def test_shares_are_whole_ordered_and_even(lens: list[int], processors: int) -> None:
    metadata = torch.full((processors + 1, 2), -7, dtype=torch.int32)
    order = torch.full((len(lens),), -7, dtype=torch.int32)
    kv_lens = torch.tensor(lens, dtype=torch.int32)
    PagedMqaLogitsSchedule.is_valid(kv_lens, metadata, order)
    PagedMqaLogitsSchedule.raw_call(kv_lens, metadata, order)
    assert order.tolist() == sorted(range(len(lens)), key=lambda r: (-lens[r], r))
    chunks = [(i, c) for i, r in enumerate(order.tolist()) for c in range(-(-lens[r] // 64))] + [
        (len(lens), 0)
    ]
    total, starts = len(chunks) - 1, [tuple(entry) for entry in metadata.tolist()]
    if total:
        assert starts == [chunks[p * total // processors] for p in range(processors + 1)]
    assert starts[-1] == (len(lens), 0)


def test_guards_refuse_by_name() -> None:
    def refused(message: str, **changes: Any) -> None:
        assert_refuses(PagedMqaLogitsSchedule, PagedMqaLogitsSchedule.CELLS[0], message, **changes)

    refused("kv_lens is torch.int64", kv_lens=torch.ones(1, dtype=torch.int64))
    refused(r"kv_lens has \[-1\]", kv_lens=torch.tensor([-1], dtype=torch.int32))
    refused("scheduler_metadata has 1 entries", scheduler_metadata=torch.zeros(1, 2).int())
    refused(r"row_order is \[2\]; it must be \[1\]", row_order=torch.zeros(2).int())
