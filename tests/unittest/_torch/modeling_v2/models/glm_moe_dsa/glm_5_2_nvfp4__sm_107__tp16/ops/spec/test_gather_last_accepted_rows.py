"""glm_gather_last_accepted_rows: the rows, bit for bit, and what is refused."""

import numpy as np
import pytest
import torch
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, assert_bitwise
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.spec.gather_last_accepted_rows import (  # noqa: E501
    GatherLastAcceptedRows,
)

FOUR_REQUESTS = next(cell for cell in GatherLastAcceptedRows.CELLS if cell.spec["requests"] == 4)


@pytest.mark.parametrize("cell", GatherLastAcceptedRows.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(GatherLastAcceptedRows, cell)


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    row_offset=st.integers(0, 3),
    second=st.booleans(),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    data=st.data(),
)
def test_the_rows_are_those_of_the_last_accepted_tokens(
    counts, row_offset, second, index_dtype, dtype, data
) -> None:
    order = data.draw(st.permutations(range(len(counts))))
    rows = torch.randn(row_offset + 5 * len(counts), 4).to(dtype)
    g, first, other = GatherLastAcceptedRows.raw_call(
        rows,
        rows + 1 if second else None,
        torch.tensor(order, dtype=index_dtype),
        torch.tensor(counts, dtype=index_dtype),
        5,
        row_offset,
    )
    blocks = np.arange(5 * len(counts)).reshape(-1, 5) + row_offset  # a line per request
    expected = [blocks[place][:count][-1] for place, count in zip(order, counts, strict=True)]
    assert g.dtype == torch.int64 and g.tolist() == expected
    assert_bitwise([first], [torch.stack([rows[i] for i in expected])])
    if second:
        assert_bitwise([other], [torch.stack([(rows + 1)[i] for i in expected])])
    else:
        assert other.shape == (len(counts), 0)


def test_nan_and_negative_zero_keep_their_bits() -> None:
    bits = torch.tensor([[0x7FC1, 0x8000], [-1, 0x0001]], dtype=torch.int32).to(torch.int16)
    rows, one = bits.view(torch.bfloat16), torch.ones(1, dtype=torch.int32)
    for count in (1, 2):
        out = GatherLastAcceptedRows.raw_call(rows, None, 0 * one, count * one, 2, 0)[1]
        assert torch.equal(out.view(torch.int16), bits[count - 1 : count])


@pytest.mark.parametrize("count", [0, 9])
def test_counts_outside_of_the_request_are_refused(count) -> None:
    counts = torch.tensor([1, count, 1, 1])
    message = rf"num_accepted is \[1, {count}, 1, 1\]; each must be in \[1, 8\]"
    assert_refuses(GatherLastAcceptedRows, FOUR_REQUESTS, message, num_accepted=counts)


def test_strided_indices_are_refused() -> None:
    strided = torch.ones(8, dtype=torch.int32)[::2]
    for name in ("batch_indices", "num_accepted"):
        message = rf"{name} has the strides \[2\]; it must be contiguous"
        assert_refuses(GatherLastAcceptedRows, FOUR_REQUESTS, message, **{name: strided})


def test_other_bad_arguments_are_refused() -> None:
    def refuses(message: str, **changes: object) -> None:
        assert_refuses(GatherLastAcceptedRows, FOUR_REQUESTS, message, **changes)

    narrow = cell_inputs(GatherLastAcceptedRows, FOUR_REQUESTS)["rows"][:, :-1].contiguous()
    refuses(r"second is \[32, 6143\]; it must be \[32, 6144\]", second=narrow)
    refuses(r"rows has the strides", rows=torch.zeros(6144, 32).T)
    refuses(r"batch_indices is torch.float32", batch_indices=torch.zeros(4))
    refuses(r"num_accepted is \[3\]; it must be \[4\]", num_accepted=torch.ones(3).int())
    refuses(r"the selected rows are .* rows has \[0, 32\)", row_offset=32)
