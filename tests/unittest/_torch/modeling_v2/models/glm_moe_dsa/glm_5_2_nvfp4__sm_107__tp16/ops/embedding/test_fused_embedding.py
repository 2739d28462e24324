"""glm_fused_embedding: bit copies, zero rows, and what is refused."""

import pytest
import torch
from helpers.op_cells import assert_refuses, cell_id, check_cell
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, assert_bitwise
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.embedding.fused_embedding import (  # noqa: E501
    FusedEmbedding,
)

# The table of the model has 1.9 GB.
SMALL = Geometry(vocab_size=4)


def small(cell: Cell) -> Cell:
    return Cell(cell.why, {**cell.spec, "geometry": SMALL})


@pytest.mark.parametrize("cell", FusedEmbedding.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(FusedEmbedding, small(cell))


@given(
    ids=st.lists(st.integers(-3, 12), min_size=1, max_size=12),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    table_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_rows_are_copies_and_ids_outside_give_zeros(ids, dtype, table_dtype) -> None:
    table = torch.randn(10, 6).to(table_dtype)
    out = FusedEmbedding.raw_call(torch.tensor(ids, dtype=dtype), table)
    for i, row in zip(ids, out, strict=True):
        assert_bitwise([row], [table[i] if 0 <= i < 10 else torch.zeros(6, dtype=table_dtype)])


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 3), (1, 2, 3)])
def test_ids_of_any_shape(shape: tuple[int, ...]) -> None:
    table = torch.randn(10, 6)
    ids = torch.randint(10, shape)
    assert_bitwise([FusedEmbedding.raw_call(ids, table)], [table[ids]])


def test_bits_that_arithmetic_would_change_stay() -> None:
    bits = torch.tensor([[0x7FC1, 0x7F81, -0x8000, 0x0001]]).to(torch.int16)
    out = FusedEmbedding.raw_call(torch.tensor([0, 5]), bits.view(torch.bfloat16))
    assert torch.equal(out.view(torch.int16), torch.cat([bits, torch.zeros_like(bits)]))


def test_bad_arguments_are_refused() -> None:
    def refuses(message: str, **changes: object) -> None:
        assert_refuses(FusedEmbedding, small(FusedEmbedding.CELLS[0]), message, **changes)

    refuses(r"input is torch.int16", input=torch.zeros(8, dtype=torch.int16))
    refuses(r"input has the strides \[2\]", input=torch.zeros(16).long()[::2])
    refuses(r"weight is \[6144\]", weight=torch.zeros(6144).bfloat16())
    refuses(
        r"weight has 6136 columns; .* multiples of 1024", weight=torch.zeros(2, 6136).bfloat16()
    )
    refuses(r"weight has the strides", weight=torch.zeros(6144, 2).bfloat16().T)
    shifted = torch.zeros(6145, dtype=torch.bfloat16)[1:].view(1, 6144)
    refuses(r"weight begins 2 bytes past", weight=shifted)
