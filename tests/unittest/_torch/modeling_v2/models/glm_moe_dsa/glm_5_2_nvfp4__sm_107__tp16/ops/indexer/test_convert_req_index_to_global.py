"""Pool rows of positions, against one look-up at a time and against the engine's own cache."""

from typing import Any

import pytest
import torch
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer.convert_req_index_to_global import (  # noqa: E501
    ConvertReqIndexToGlobal,
)

CELL = ConvertReqIndexToGlobal.CELLS[0]


@pytest.mark.parametrize("cell", ConvertReqIndexToGlobal.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(ConvertReqIndexToGlobal, cell)


@st.composite
def conversions(draw: st.DrawFn) -> dict[str, Any]:
    block_size, layers = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    requests, pages = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    tokens, topk = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    integers = lambda n, low, high: draw(  # noqa: E731
        st.lists(st.integers(low, high), min_size=n, max_size=n)
    )
    return {
        "req_id": torch.tensor(integers(tokens, 0, requests - 1), dtype=torch.int32),
        "block_table": torch.tensor(integers(requests * pages, -1, 9), dtype=torch.int32).view(
            requests, pages
        ),
        "token_indices": torch.tensor(
            integers(tokens * topk, -2, pages * block_size + 3), dtype=torch.int32
        ).view(tokens, topk),
        "block_size": block_size,
        "num_topk_tokens": topk,
        "stride_factor": layers * block_size,
        "layer_id": draw(st.integers(0, layers - 1)),
    }


def one_row(inputs: dict[str, Any], token: int, column: int) -> int:
    position, size = int(inputs["token_indices"][token, column]), inputs["block_size"]
    blocks = inputs["block_table"][int(inputs["req_id"][token])].tolist()
    if position < 0 or position // size >= len(blocks) or blocks[position // size] < 0:
        return -1
    first = blocks[position // size] * inputs["stride_factor"] + inputs["layer_id"] * size
    return first + position % size


@given(conversions())
def test_every_entry_is_the_formula(inputs: dict[str, Any]) -> None:
    ConvertReqIndexToGlobal.is_valid(**inputs)
    tokens, topk = inputs["token_indices"].shape
    expected = [[one_row(inputs, t, j) for j in range(topk)] for t in range(tokens)]
    out = ConvertReqIndexToGlobal.raw_call(**inputs)
    assert out.dtype == torch.int32
    assert out.tolist() == expected


def test_guards_refuse_by_name() -> None:
    def refused(message: str, **changes: Any) -> None:
        assert_refuses(ConvertReqIndexToGlobal, CELL, message, **changes)

    chosen = cell_inputs(ConvertReqIndexToGlobal, CELL)["token_indices"]
    refused(r"token_indices is \[1, 2048\]; it must be \[1, 7\]", num_topk_tokens=7)
    refused("token_indices is torch.int64", token_indices=chosen.long())
    refused(r"req_id has \[1\]; block_table has 1 rows", req_id=torch.tensor([1]))
    refused("page of layer_id 4, 64 rows, does not lie within a block of 256", layer_id=4)
    refused("int32 results do not hold them", stride_factor=1 << 30)
    strided = torch.zeros(1, 256, dtype=torch.int32)[:, ::2]
    refused("block_table has the strides", block_table=strided)
