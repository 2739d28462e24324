"""glm_argmax_pack: the engine's own pairs bit for bit, a loop's tokens, and what is refused."""

import math
from typing import Any

import pytest
import torch
from helpers.draft_ops import first_largest
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, assert_bitwise
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.spec.argmax_pack import (  # noqa: E501
    ArgmaxPack,
)
from tensorrt_llm._torch.speculative.interface import draft_tokens_from_gathered
from tensorrt_llm._torch.speculative.mtp_tail_trim import LOGIT_DTYPES, MAX_VOCAB

FIRST = ArgmaxPack.CELLS[0]
INF, NAN = math.inf, math.nan
values = st.one_of(st.sampled_from([0.0, -0.0, 1.0, INF, -INF, NAN, -NAN]), st.floats(width=16))


@pytest.mark.parametrize("cell", ArgmaxPack.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(ArgmaxPack, cell)


@given(st.data(), st.integers(1, 9), st.integers(1, 3), st.sampled_from(LOGIT_DTYPES))
def test_pairs_are_the_loops(data: st.DataObject, columns: int, rows: int, dtype) -> None:
    row = st.lists(values, min_size=columns, max_size=columns)
    logits = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows))).to(dtype)
    out = torch.full((rows, 4), 7.0)
    ArgmaxPack.is_valid(logits, 100, out)
    ArgmaxPack.raw_call(logits, 100, out)
    for got, x in zip(out, logits, strict=True):
        at = first_largest(x.tolist())
        value = x[at].float()
        if dtype == torch.bfloat16 and x[at].isnan():
            value = torch.tensor(0x7FFF0000, dtype=torch.int32).view(torch.float32)
        expected = torch.stack([torch.tensor(100.0 + at), value, *torch.full((2,), 7.0)])
        assert_bitwise([got], [expected])


def test_columns_around_a_slot_stay() -> None:
    logits = torch.tensor([[0.0, 3.0], [4.0, 3.0]])
    wide = torch.full((2, 8), 7.0)
    ArgmaxPack.raw_call(logits, 10, wide[:, 4:6])
    assert wide.tolist() == [
        [7.0] * 4 + [11.0, 3.0] + [7.0] * 2,
        [7.0] * 4 + [10.0, 4.0] + [7.0] * 2,
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_pairs_give_the_whole_vocabularys_token(ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 40, generator=generator).round().bfloat16()  # many ties
    logits[4, [17, 33]], logits[5] = NAN, -INF
    pairs = torch.empty(6, 2 * ranks)
    for rank, shard in enumerate(logits.chunk(ranks, dim=1)):
        ArgmaxPack.raw_call(shard, rank * shard.shape[1], pairs[:, 2 * rank :])
    expected = [first_largest(row) for row in logits.tolist()]
    assert draft_tokens_from_gathered(pairs).tolist() == expected


@pytest.mark.parametrize("cell", ArgmaxPack.CELLS, ids=cell_id)
def test_the_baseline_is_the_same(cell: Cell) -> None:
    inputs = cell_inputs(ArgmaxPack, cell)
    call = ArgmaxPack.baseline(inputs)
    assert call is not None
    assert_bitwise([call()], ArgmaxPack.run(ArgmaxPack.reference, inputs))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("logits are torch.float64", {"logits": torch.zeros(1, 5, dtype=torch.float64)}),
        (r"logits are \[5\]", {"logits": torch.zeros(5)}),
        (r"logits are \[0, 5\]", {"logits": torch.zeros(0, 5)}),
        ("columns of logits are 2 apart", {"logits": torch.zeros(1, 10)[:, ::2]}),
        ("vocab_offset -1", {"first_id": -1}),
        (f"vocab_offset {MAX_VOCAB} with 9680 columns", {"first_id": MAX_VOCAB}),
        ("out is torch.float64", {"out": torch.zeros(1, 2, dtype=torch.float64)}),
        (r"out is \[2, 2\]", {"out": torch.zeros(2, 2)}),
        (r"slot 0 is not in \[0, 0\)", {"out": torch.zeros(1, 1)}),
        ("with strides", {"out": torch.zeros(1, 4)[:, ::2]}),
    ],
)
def test_refuses(message: str, changes: dict[str, Any]) -> None:
    assert_refuses(ArgmaxPack, FIRST, message, **changes)
