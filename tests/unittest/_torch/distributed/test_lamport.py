"""Lamport workspaces between real rank processes."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.engine import run_ranks
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.distributed import (
    LamportWorkspace,
    Payload,
    destroy_process_group,
    lamport,
    lamport_workspace,
)
from tensorrt_llm.mapping import Mapping

RANKS, COLUMNS, MAX_ROWS = 4, 6, 8
ROW_COUNTS = (8, 1, 8, 3, 3, 8, 1, 1, 8, 2)  # falls and grows back in every buffer
BYTES = RANKS * MAX_ROWS * COLUMNS * 4
DEADLINE_S = 2.0
ALONE = Mapping()


def rows_of(rank: int, call: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(rows, COLUMNS, generator=generator).to(dtype)


def side_by_side(call: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([rows_of(rank, call, rows, dtype) for rank in range(RANKS)], dim=1)


def message_of(call: Callable[[], object]) -> str:
    """Of the error that the call must raise."""
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


def changing_rows(mapping: Mapping) -> list[tuple[bool, list[int], list[bool]]]:
    """After each call: did the rows arrive, the flags, which buffers hold anything."""
    workspace = lamport_workspace(mapping, "changing", Payload.SUM, BYTES)
    seen = []
    for call, rows in enumerate(ROW_COUNTS):
        dtype = (torch.float32, torch.bfloat16)[call % 2]
        if call % RANKS == mapping.rank:
            time.sleep(0.05)  # a late rank
        got = workspace.exchange("op", rows_of(mapping.rank, call, rows, dtype))
        dist.barrier()
        filled = (workspace.transport.local != Payload.SUM.empty).any(-1).tolist()
        dist.barrier()
        arrived = torch.equal(got, side_by_side(call, rows, dtype))
        seen.append((arrived, workspace.flags.tolist(), filled))
    return seen


def interleaved(mapping: Mapping) -> list[bool]:
    """Two private workspaces; every rank goes through them in an order of its own."""
    first, second = (
        lamport_workspace(mapping, tag, payload, BYTES)
        for tag, payload in (("first", Payload.SUM), ("second", Payload.EXCHANGE))
    )
    seen = []
    for call in range(12):
        rows = 1 + call % 3
        mine = rows_of(mapping.rank, call, rows, torch.float32)
        order = [first, second] if (mapping.rank + call) % 2 else [second, first]
        for workspace in order:
            workspace.publish("op", mine)
        for workspace in reversed(order):
            got = workspace.collect("op", rows, COLUMNS, torch.float32)
            seen.append(torch.equal(got, side_by_side(call, rows, torch.float32)))
    return seen


def many_calls(mapping: Mapping) -> bool:
    workspace = lamport_workspace(mapping, "many", Payload.EXCHANGE, BYTES)
    values = [
        workspace.exchange("op", torch.full((1 + i % 3, 1), i * RANKS + mapping.rank))
        for i in range(100)
    ]
    return all(
        value.squeeze(-1).tolist() == [list(range(i * RANKS, (i + 1) * RANKS))] * (1 + i % 3)
        for i, value in enumerate(values)
    )


def other_op(mapping: Mapping) -> list[str]:
    """The second call of rank 2 is another op; then nobody gets any further."""
    workspace = lamport_workspace(mapping, "other op", Payload.SUM, BYTES)
    x = torch.ones(2, COLUMNS)
    workspace.exchange("hop", x)
    op = "finalize" if mapping.rank == 2 else "hop"
    return [
        message_of(lambda: workspace.exchange(op, x)),
        message_of(lambda: workspace.exchange("hop", x)),
    ]


def other_size(mapping: Mapping) -> str:
    workspace = lamport_workspace(mapping, "other size", Payload.SUM, BYTES)
    rows = 1 if mapping.rank == 0 else 2
    return message_of(lambda: workspace.exchange("hop", torch.ones(rows, COLUMNS)))


def missing_call(mapping: Mapping) -> tuple[str, float]:
    """Rank 3 stops after one call."""
    workspace = lamport_workspace(mapping, "missing", Payload.SUM, BYTES)
    workspace.exchange("gather", torch.ones(1, COLUMNS))
    begun = time.monotonic()
    if mapping.rank == 3:
        return "", 0.0
    message = message_of(lambda: workspace.exchange("hop", torch.ones(2, COLUMNS)))
    return message, time.monotonic() - begun


def disagreeing_requests(mapping: Mapping) -> str:
    size = 16 * (1 + mapping.rank % 2)
    return message_of(lambda: lamport_workspace(mapping, "unequal", Payload.SUM, size))


def failing_construction(mapping: Mapping) -> tuple[str, bool]:
    """It fails on rank 1, so on all; asked for again it is made."""

    def make() -> LamportWorkspace:
        return lamport_workspace(mapping, "failing", Payload.SUM, 16)

    with pytest.MonkeyPatch.context() as patch:
        if mapping.rank == 1:
            patch.setattr(lamport, "SharedMemoryTransport", _refuse)
        message = message_of(make)
    return message, torch.equal(make().exchange("op", torch.ones(1, 1)), torch.ones(1, RANKS, 1))


def _refuse(*_args: object) -> None:
    raise OSError("no memory here")


def work(mapping: Mapping) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(lamport.TIMEOUT_ENV, str(DEADLINE_S))
        cases = (
            changing_rows,
            interleaved,
            many_calls,
            other_op,
            other_size,
            missing_call,
            disagreeing_requests,
            failing_construction,
        )
        return {case.__name__: case(mapping) for case in cases}


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return run_ranks(RANKS, work)


@pytest.fixture
def leave():
    yield
    destroy_process_group()


def test_rows_arrive_in_rank_order_while_their_number_changes(answers) -> None:
    for answer in answers:
        assert all(arrived for arrived, _, _ in answer["changing_rows"])


def test_flags_rotate_and_record_what_the_next_call_clears(answers) -> None:
    for answer in answers:
        for call, (_, flags, _) in enumerate(answer["changing_rows"]):
            itemsize = (4, 2)[call % 2]
            used = ROW_COUNTS[call] * RANKS * COLUMNS * itemsize
            assert flags == [(call + 1) % 3, call % 3, BYTES, 1, used, 0, 0, 0, 0]


def test_after_a_call_only_its_own_buffer_is_not_empty(answers) -> None:
    """So the previous call's was cleared as far as the previous call had filled it."""
    for answer in answers:
        for call, (_, _, filled) in enumerate(answer["changing_rows"]):
            assert filled == [buffer == call % 3 for buffer in range(3)]


def test_private_workspaces_do_not_meet(answers) -> None:
    assert all(all(answer["interleaved"]) for answer in answers)


def test_a_hundred_calls_stay_in_step(answers) -> None:
    assert all(answer["many_calls"] for answer in answers)


def test_another_op_is_an_error_that_names_both(answers) -> None:
    size = f"of 2 rows of {COLUMNS * 4} bytes"
    for rank, answer in enumerate(answers):
        mine, other = ("finalize", "hop") if rank == 2 else ("hop", "finalize")
        at_fault = 0 if rank == 2 else 2
        error, afterwards = answer["other_op"]
        assert error == (
            f"call 2 on workspace 'other op': rank {rank} makes {mine} {size}, "
            f"but rank {at_fault} makes {other} {size}"
        )
        assert afterwards == f"workspace 'other op' is out of step since {error}"


def test_another_size_is_an_error_that_names_both(answers) -> None:
    for rank, answer in enumerate(answers):
        rows, other = (1, 2) if rank == 0 else (2, 1)
        at_fault = 1 if rank == 0 else 0
        width = COLUMNS * 4
        assert answer["other_size"] == (
            f"call 1 on workspace 'other size': rank {rank} makes hop of {rows} rows of {width} "
            f"bytes, but rank {at_fault} makes hop of {other} rows of {width} bytes"
        )


def test_a_missing_call_is_an_error_within_the_deadline(answers) -> None:
    for rank, answer in enumerate(answers[:3]):
        message, seconds = answer["missing_call"]
        assert message == (
            f"call 2 on workspace 'missing': rank {rank} waits in hop of 2 rows of {COLUMNS * 4} "
            f"bytes, but rank 3 made its call 1, gather of 1 rows of {COLUMNS * 4} bytes, last"
        )
        assert DEADLINE_S <= seconds < 2 * DEADLINE_S


def test_unequal_requests_are_an_error_on_all_ranks(answers) -> None:
    messages = {answer["disagreeing_requests"] for answer in answers}
    assert len(messages) == 1
    assert "rank 1: 'unequal' for SUM with 32 bytes per buffer" in messages.pop()


def test_a_rank_that_cannot_make_it_stops_all_of_them(answers) -> None:
    for answer in answers:
        message, made_afterwards = answer["failing_construction"]
        assert message == "no shared memory for a Lamport workspace: rank 1: no memory here"
        assert made_afterwards


@given(words=st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=8))
def test_no_exchanged_word_is_empty_and_all_others_stay(words: list[int]) -> None:
    sent = Payload.EXCHANGE.words(torch.tensor([words], dtype=torch.int32))
    assert sent.tolist() == [[-2 if word == -1 else word for word in words]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_word_of_addends_is_empty(dtype: torch.dtype) -> None:
    """-0.0 travels as +0.0; the rest, NaN payloads included, keeps its bits."""
    x = torch.tensor([[0.0, -0.0, -0.0, -0.0, -1.0, torch.nan, torch.inf, 0.0]], dtype=dtype)
    sent = Payload.SUM.words(x)
    assert not (sent == Payload.SUM.empty).any()
    bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    expected = x.view(bits).clone()
    expected[0, 1:4] = 0
    assert torch.equal(sent.view(bits), expected)


def test_a_rank_alone_has_its_own_rows_and_the_initial_flags(leave) -> None:
    workspace = lamport_workspace(ALONE, "alone", Payload.SUM, 64)
    assert workspace.flags.dtype == torch.uint32
    assert workspace.flags.tolist() == [0, 2, 64, 0, 0, 0, 0, 0, 0]
    x = torch.tensor([[1.0, 2.0]])
    assert torch.equal(workspace.exchange("op", x), x.unsqueeze(1))


def test_the_descriptor_says_where_everything_is(leave) -> None:
    workspace = lamport_workspace(ALONE, "described", Payload.SUM, 64)
    addresses = [workspace.flags.data_ptr(), 0, workspace.transport.local.data_ptr()]
    assert workspace.descriptor.tolist()[1:] == [0, 64, *addresses]
    assert LamportWorkspace.world_size_of(workspace.descriptor) == 1
    assert LamportWorkspace.at(workspace.descriptor) is workspace


def test_one_tag_is_one_workspace(leave) -> None:
    made = lamport_workspace(ALONE, "once", Payload.SUM, 64)
    assert lamport_workspace(ALONE, "once", Payload.SUM, 32) is made
    for payload, size in ((Payload.SUM, 128), (Payload.EXCHANGE, 64)):
        with pytest.raises(ValueError, match="'once' exists for SUM with 64 bytes"):
            lamport_workspace(ALONE, "once", payload, size)


def test_it_ends_with_the_group_and_leaves_no_file(monkeypatch) -> None:
    paths = []
    make_file = lamport.SharedMemoryTransport.make_file

    def recorded(*args: int) -> str:
        paths.append(make_file(*args))
        return paths[-1]

    monkeypatch.setattr(lamport.SharedMemoryTransport, "make_file", recorded)
    first, last = (lamport_workspace(ALONE, tag, Payload.SUM, 64) for tag in ("first", "last"))
    assert len(paths) == 2 and not any(Path(path).exists() for path in paths)
    destroy_process_group()
    for workspace in (first, last):
        with pytest.raises(ValueError, match="no open Lamport workspace"):
            LamportWorkspace.at(workspace.descriptor)
    again = lamport_workspace(ALONE, "first", Payload.SUM, 64)
    assert again is not first
    destroy_process_group()


@pytest.mark.parametrize("size", [0, -16, 24, 1 << 32])
def test_sizes_that_no_buffer_can_have_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"'sized' has {size} bytes per buffer"):
        lamport_workspace(ALONE, "sized", Payload.SUM, size)


def test_graph_capture_makes_none_but_finds_what_was_made(monkeypatch, leave) -> None:
    made = lamport_workspace(ALONE, "before", Payload.SUM, 64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert lamport_workspace(ALONE, "before", Payload.SUM, 64) is made
    with pytest.raises(RuntimeError, match="'during' is asked for first under CUDA graph capture"):
        lamport_workspace(ALONE, "during", Payload.SUM, 64)


def test_rows_that_do_not_fit_are_refused(leave) -> None:
    workspace = lamport_workspace(ALONE, "small", Payload.SUM, 64)
    refused = (
        (torch.ones(3, 8), "3 rows of 32 bytes from each of 1 ranks do not fit into the 64 bytes"),
        (torch.ones(1, 3, dtype=torch.bfloat16), "rows of 3 torch.bfloat16 are 6 bytes"),
        (torch.ones(1, 2, dtype=torch.int32), "torch.int32 is no floating type"),
    )
    for rows, message in refused:
        with pytest.raises(ValueError, match=message):
            workspace.publish("hop", rows)


def test_published_rows_wait_for_the_call_that_fits_them(leave) -> None:
    workspace = lamport_workspace(ALONE, "published", Payload.SUM, 64)
    with pytest.raises(
        RuntimeError, match="collect hop of 1 rows of 8 bytes; published is nothing"
    ):
        workspace.collect("hop", 1, 2, torch.float32)
    workspace.publish("hop", torch.ones(2, 2))
    both = "publish op of 1 rows of 8 bytes, but .* nothing has collected yet: hop of 2 rows of 8"
    with pytest.raises(RuntimeError, match=both):
        workspace.publish("op", torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="1 rows of 8 bytes; published is hop of 2 rows of 8"):
        workspace.collect("hop", 1, 2, torch.float32)
    assert torch.equal(workspace.collect("hop", 2, 2, torch.float32), torch.ones(2, 1, 2))


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_deadline_that_is_no_time_is_refused(monkeypatch, leave, text: str) -> None:
    workspace = lamport_workspace(ALONE, "timed", Payload.SUM, 64)
    monkeypatch.setenv(lamport.TIMEOUT_ENV, text)
    with pytest.raises(ValueError, match=f"TRTLLM_LAMPORT_TIMEOUT_S is '{text}'"):
        workspace.exchange("op", torch.ones(1, 1))
