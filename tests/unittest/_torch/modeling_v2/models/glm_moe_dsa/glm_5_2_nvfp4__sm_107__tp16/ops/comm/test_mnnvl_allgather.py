"""glm_mnnvl_allgather on real rank processes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.engine import run_ranks
from helpers.op_cells import assert_refuses, check_cell

from tensorrt_llm._torch.distributed import (
    LamportWorkspace,
    Payload,
    allgather,
    lamport,
    lamport_workspace,
)
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.comm.mnnvl_allgather import (  # noqa: E501
    MnnvlAllgather,
)
from tensorrt_llm.mapping import Mapping

RANKS, COLUMNS, MAX_ROWS = 2, 24, 8
ROW_COUNTS = (8, 1, 8, 3, 1, 8)
SMALL = Cell("small", {"rows": 3, "dtype": torch.float32, "geometry": Geometry(vocab_size=COLUMNS)})
# One row of rank 0 in bf16 bits: -0.0, infinities, NaNs of several payloads, a word of all ones
# (two elements, the first at an even place), and the same bits across two words.
SPECIAL = [0x8000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFC3, 0xFFFF, 0xFFFF, 0, 0xFFFF, 0xFFFF, 1]


def bits(x: torch.Tensor) -> list[list[int]]:
    """Of fp32."""
    return x.view(torch.int32).tolist()


def shard(rank: int, call: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * call + rank)
    return torch.randn(rows, COLUMNS, generator=generator).to(torch.bfloat16)


def workspace_of(mapping: Mapping, tag: str = "logits") -> torch.Tensor:
    size = RANKS * MAX_ROWS * COLUMNS * 2
    return lamport_workspace(mapping, tag, Payload.EXCHANGE, size).descriptor


def special_row() -> torch.Tensor:
    row = torch.zeros(1, COLUMNS, dtype=torch.int32)
    row[0, : len(SPECIAL)] = torch.tensor(SPECIAL)
    return row.to(torch.int16).view(torch.bfloat16)


def sequence(mapping: Mapping) -> list[tuple[list[list[int]], list[list[int]], list[bool]]]:
    """Bits of the op, of the plain chain, and which buffers hold anything after the call."""
    workspace, seen = workspace_of(mapping), []
    local = LamportWorkspace.at(workspace).transport.local
    for call, rows in enumerate(ROW_COUNTS):
        mine = shard(mapping.rank, call, rows)
        got = MnnvlAllgather.raw_call(mine, workspace)
        dist.barrier()
        filled = (local != Payload.EXCHANGE.empty).any(-1).tolist()
        dist.barrier()
        seen.append((bits(got), bits(allgather(mine, mapping).float()), filled))
    return seen


def special(mapping: Mapping) -> list[list[int]]:
    mine = special_row() if mapping.rank == 0 else torch.ones(1, COLUMNS, dtype=torch.bfloat16)
    return bits(MnnvlAllgather.raw_call(mine, workspace_of(mapping)))


def side_by_side(mapping: Mapping) -> list[list[list[int]]]:
    """Two private workspaces in turn, with unequal numbers of rows."""
    first, second = (workspace_of(mapping, tag) for tag in ("first", "second"))
    results = []
    for call in range(4):
        for workspace, rows in ((first, 1 + call), (second, 4 - call)):
            results.append(MnnvlAllgather.raw_call(shard(mapping.rank, rows, rows), workspace))
    return [bits(result) for result in results]


def late_step(mapping: Mapping) -> str:
    """Rank 1 has skipped a call and comes with the next step's rows."""
    workspace, rows = workspace_of(mapping, "late"), 2 if mapping.rank else 1
    with pytest.raises(RuntimeError) as caught:
        MnnvlAllgather.raw_call(shard(mapping.rank, 0, rows), workspace)
    return str(caught.value)


def work(mapping: Mapping) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(lamport.TIMEOUT_ENV, "20")  # a loaded host
        for cell in MnnvlAllgather.CELLS:
            check_cell(MnnvlAllgather, cell)
        cases = (sequence, special, side_by_side)
        answers = {case.__name__: case(mapping) for case in cases}
        patch.setenv(lamport.TIMEOUT_ENV, "2")
        return {**answers, "late_step": late_step(mapping)}


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """Checks every cell on the way."""
    return run_ranks(RANKS, work)


def test_it_is_the_gathered_concatenation_bit_for_bit(answers) -> None:
    for answer in answers:
        for call, (got, chain, _) in enumerate(answer["sequence"]):
            parts = [shard(rank, call, ROW_COUNTS[call]).float() for rank in range(RANKS)]
            assert got == chain == bits(torch.cat(parts, dim=1))


def test_the_previous_buffer_is_refilled_with_the_empty_word(answers) -> None:
    for answer in answers:
        for call, (_, _, filled) in enumerate(answer["sequence"]):
            assert filled == [buffer == call % 3 for buffer in range(3)]


def test_special_values_keep_their_bits_but_for_a_word_of_ones(answers) -> None:
    """The lowest bit of the word belongs to its first element."""
    sent = [value << 16 for value in SPECIAL]
    sent[6] = 0xFFFE << 16
    ones = [0x3F800000] * COLUMNS
    row = sent + [0] * (COLUMNS - len(sent)) + ones
    for answer in answers:
        assert [value & 0xFFFFFFFF for value in answer["special"][0]] == row


def test_private_workspaces_do_not_meet(answers) -> None:
    for answer in answers:
        got = iter(answer["side_by_side"])
        for call in range(4):
            for rows in (1 + call, 4 - call):
                parts = [shard(rank, rows, rows).float() for rank in range(RANKS)]
                assert next(got) == bits(torch.cat(parts, dim=1))


def test_unequal_calls_are_an_error_that_names_both(answers) -> None:
    for rank, answer in enumerate(answers):
        mine, theirs = (2, 1) if rank else (1, 2)
        assert (
            f"rank {rank} makes glm_mnnvl_allgather of {mine} rows of {COLUMNS * 2} bytes, but "
            f"rank {1 - rank} makes glm_mnnvl_allgather of {theirs} rows of {COLUMNS * 2} bytes"
        ) in answer["late_step"]


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("input is torch.float16", {"input": torch.ones(3, COLUMNS).half()}),
        (r"input is \[24\]", {"input": torch.ones(COLUMNS)}),
        ("input has the strides", {"input": torch.ones(COLUMNS, 3).t()}),
        ("bytes per buffer; the call takes", {"input": torch.ones(9, COLUMNS)}),
        ("ranks is 1", {"input": torch.ones(3, COLUMNS).bfloat16()}),
        ("no open Lamport workspace", {"workspace": torch.zeros(6, dtype=torch.int64)}),
    ],
)
def test_refuses(message: str, changes: dict[str, Any]) -> None:
    assert_refuses(MnnvlAllgather, SMALL, message, **changes)


def test_refuses_the_workspace_of_the_sums() -> None:
    sums = lamport_workspace(Mapping(), "gather guards: sums", Payload.SUM, 1024)
    assert_refuses(MnnvlAllgather, SMALL, "is for SUM; it must be", workspace=sums.descriptor)
