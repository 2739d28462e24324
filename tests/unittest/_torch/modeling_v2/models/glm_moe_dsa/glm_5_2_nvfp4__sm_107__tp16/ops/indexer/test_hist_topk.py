"""Exact choice with ties, against Python's sort of (value, column)."""

import math
from typing import Any

import pytest
import torch
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer.hist_topk import (  # noqa: E501
    HistTopK,
)

CELL = HistTopK.CELLS[0]
INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("cell", HistTopK.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(HistTopK, cell)


def best(row: list[float], length: int, topk: int) -> list[int]:
    """The contract, key by key: NaN above all, the larger column of equals, in rising order."""
    keys = [c for c in range(length) if row[c] != -INF]
    keys.sort(key=lambda c: (math.isnan(row[c]), 0.0 if math.isnan(row[c]) else row[c], c))
    chosen = sorted(keys[max(0, len(keys) - topk) :])
    return chosen + [-1] * (topk - len(chosen))


def choose(rows: list[list[float]], length: int, topk: int) -> list[list[int]]:
    logits, out = torch.tensor(rows), torch.full((len(rows), topk), -9, dtype=torch.int32)
    context_len = torch.tensor([length], dtype=torch.int32)
    HistTopK.is_valid(logits, context_len, out)
    HistTopK.raw_call(logits, context_len, out)
    return out.tolist()


values = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, -NAN, 1e-45]), st.floats(width=32)
)


@given(st.data(), st.integers(1, 12), st.integers(1, 3), st.integers(1, 9))
def test_every_choice_is_the_sorted_one(
    data: st.DataObject, columns: int, rows: int, topk: int
) -> None:
    row = st.lists(values, min_size=columns, max_size=columns)
    logits = data.draw(st.lists(row, min_size=rows, max_size=rows))
    length = data.draw(st.integers(0, columns))
    assert choose(logits, length, topk) == [best(row, length, topk) for row in logits]


@pytest.mark.parametrize("cell", [HistTopK.CELLS[i] for i in (1, 3)], ids=cell_id)
def test_cells_at_full_size_are_the_sorted_choice(cell: Cell) -> None:
    inputs = cell_inputs(HistTopK, cell)
    out = HistTopK.run(HistTopK.raw_call, inputs)[0]
    for row, chosen in zip(inputs["logits"].tolist(), out.tolist(), strict=True):
        assert chosen == best(row, 8192, 2048)


def test_the_larger_of_equals_wins() -> None:
    assert choose([[2.0, 1.0, 1.0, 1.0, 3.0, 1.0]], 6, 4) == [[0, 3, 4, 5]]
    assert choose([[0.0, -0.0, 0.0, -1.0]], 4, 2) == [[1, 2]]
    assert choose([[NAN, INF, NAN, 1.0]], 4, 1) == [[2]]


def test_a_short_row_is_padded_and_no_key_is_chosen_twice() -> None:
    assert choose([[-INF, 5.0, -INF, 4.0, NAN]], 4, 6) == [[1, 3, -1, -1, -1, -1]]
    assert choose([[1.0, 2.0]], 0, 2) == [[-1, -1]]


def test_guards_refuse_by_name() -> None:
    inputs = cell_inputs(HistTopK, CELL)

    def refused(message: str, **changes: Any) -> None:
        assert_refuses(HistTopK, CELL, message, **changes)

    refused("logits is torch.bfloat16", logits=inputs["logits"].bfloat16())
    refused("logits has the strides", logits=torch.zeros(8192, 8).T)
    refused("context_len is 9000; logits has 8256", context_len=torch.tensor([9000]).int())
    refused("context_len is -1", context_len=torch.tensor([-1]).int())
    refused(r"topk_indices is \[7, 2048\]", topk_indices=inputs["topk_indices"][:7])
    refused("topk_indices is torch.int64", topk_indices=inputs["topk_indices"].long())
