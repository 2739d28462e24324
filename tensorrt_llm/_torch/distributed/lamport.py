"""Lamport workspaces: exchanges between ranks in which the data itself says that it has arrived.

A workspace is three equal buffers per rank. In a call every rank stores its rows into the current
buffer of every rank and then polls its own one until no word of it is the empty word any more; no
flag or barrier follows the data. The call also empties what the previous call has filled and
rotates, so over four calls the buffers are used like this:

    call       1         2         3         4
    buffer 0   exchange  clear     -         exchange
    buffer 1   -         exchange  clear     -
    buffer 2   (clear)   -         exchange  clear

Two buffers would not do: a rank that is through call n may already store for call n + 1 while
another one still reads call n, and what call n + 1 stores into must have been empty before any rank
could get there. A rank stores for call n + 2, into the buffer of call n - 1, only after it has seen
every rank's rows of call n + 1, which each rank stored after it had cleared that buffer in call n.

All ranks must make the same calls in the same order on a workspace. Workspaces of different tags
share nothing, so their calls may be interleaved in any way.
"""

import itertools
import os
import struct
import tempfile
import time
import zlib
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import torch

from tensorrt_llm._torch.distributed.communicator import (
    before_leaving,
    broadcast_object,
    gather_objects,
)
from tensorrt_llm.mapping import Mapping

# Seconds that a rank waits for the others' part of a call before it says who is missing.
TIMEOUT_ENV = "TRTLLM_LAMPORT_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 120.0

BUFFERS = 3
WORD_BYTES = 4
BUFFER_ALIGNMENT = 16
# descriptor: handle, rank, bytes per buffer, address of the flags, of the multicast mapping.
DESCRIPTOR_HEAD = 5
# flags: see LamportWorkspace.
CURRENT, DIRTY, BUFFER_BYTES, DIRTY_STAGES, BYTES_TO_CLEAR = range(5)
FLAGS = 9

_POLL_S = 20e-6
_SHARED_MEMORY_DIRECTORY = "/dev/shm"


class Payload(IntEnum):
    """What a workspace carries; the value is its empty word.

    SUM: floating-point addends; a word of zeros with the sign set (-0.0 in fp32) is empty, and a
        -0.0 element travels as +0.0. In half precision two elements share a word.
    EXCHANGE: any bits; a word of all ones is empty, and such a word of data arrives with its lowest
        bit cleared. Everything else, -0.0 included, arrives as it is.
    """

    SUM = 0x80000000
    EXCHANGE = 0xFFFFFFFF

    @property
    def empty(self) -> int:
        """The empty word as an int32."""
        return self.value - (1 << 32)

    def words(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, columns] as int32 words [rows, words of a row], none of them empty."""
        if self is Payload.SUM:
            return torch.where(x == 0, 0, x).contiguous().view(torch.int32)
        words = x.contiguous().view(torch.int32)
        return torch.where(words == self.empty, self.empty - 1, words)


class Transport(Protocol):
    """Memory of all ranks, as this rank can reach it.

    Attributes:
        local: int32 [3, words], this rank's buffers, into which every rank stores.
        addresses: of the multicast mapping (0: there is none), then of every rank's buffers as this
            process maps them.
    """

    local: torch.Tensor
    addresses: list[int]

    def store(self, buffer: int, rows: torch.Tensor) -> None:
        """Store int32 rows [rows, words] at [row][this rank][word] of every rank's buffer."""

    def announce(self, number: int, call: str) -> None:
        """Tell the other ranks which call this one makes, the `number`-th (from 1)."""

    def announced(self, rank: int, number: int) -> str | None:
        """The `number`-th call of a rank, None if it has not announced it yet.

        The last three calls can be asked for.
        """

    def latest(self, rank: int) -> tuple[int, str]:
        """The number of a rank's latest call and what it is; 0 and "" before the first."""


class SharedMemoryTransport:
    """Rank processes of one host that map one file: the transport of a CPU.

    Every rank has its own buffers in it, as with peer memory between GPUs, and beside them a record
    of its last three calls. A record begins with its number and checksum, so that a half-written
    one reads as not yet written.

    Raises:
        OSError: the file cannot be mapped.
    """

    RECORD_BYTES = 256
    _STAMP = struct.Struct("<II")  # number of the call (modulo 2^32), CRC-32 of its text

    def __init__(self, path: str, rank: int, world_size: int, bytes_per_buffer: int) -> None:
        size = self.file_bytes(world_size, bytes_per_buffer)
        memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        calls, buffers = memory.split(
            [self._calls_bytes(world_size), size - self._calls_bytes(world_size)]
        )
        self.rank = rank
        self._buffers = buffers.view(torch.int32).view(world_size, BUFFERS, -1)
        self._calls = calls.view(world_size, BUFFERS, self.RECORD_BYTES).numpy()
        self.local = self._buffers[rank]
        self.addresses = [0, *(buffer.data_ptr() for buffer in self._buffers)]

    @classmethod
    def _calls_bytes(cls, world_size: int) -> int:
        return world_size * BUFFERS * cls.RECORD_BYTES

    @classmethod
    def file_bytes(cls, world_size: int, bytes_per_buffer: int) -> int:
        return cls._calls_bytes(world_size) + world_size * BUFFERS * bytes_per_buffer

    @classmethod
    def make_file(cls, world_size: int, bytes_per_buffer: int) -> str:
        """A file of zeros with its memory reserved. -> its path.

        Raises:
            OSError: the host has no room for it.
        """
        file, path = tempfile.mkstemp(prefix="lamport-", dir=_SHARED_MEMORY_DIRECTORY)
        try:
            os.posix_fallocate(file, 0, cls.file_bytes(world_size, bytes_per_buffer))
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(file)
        return path

    def store(self, buffer: int, rows: torch.Tensor) -> None:
        count, words = rows.shape
        world_size = len(self._buffers)
        for target in self._buffers[:, buffer]:
            target[: count * world_size * words].view(count, world_size, words)[:, self.rank] = rows

    def announce(self, number: int, call: str) -> None:
        text = call.encode().ljust(self.RECORD_BYTES - self._STAMP.size)
        record = self._calls[self.rank, number % BUFFERS].data
        record[self._STAMP.size :] = text
        self._STAMP.pack_into(record, 0, number % (1 << 32), zlib.crc32(text))

    def announced(self, rank: int, number: int) -> str | None:
        found, call = self._record(rank, number % BUFFERS)
        return call if found == number % (1 << 32) else None

    def latest(self, rank: int) -> tuple[int, str]:
        return max(self._record(rank, slot) for slot in range(BUFFERS))

    def _record(self, rank: int, slot: int) -> tuple[int, str]:
        record = bytes(self._calls[rank, slot])
        number, checksum = self._STAMP.unpack_from(record)
        text = record[self._STAMP.size :]
        if not number or zlib.crc32(text) != checksum:
            return 0, ""
        return number, text.decode().rstrip()


class LamportWorkspace:
    """This rank's end of a workspace. `lamport_workspace` makes one.

    Attributes:
        flags: uint32 [9]: current buffer, dirty buffer (the previous call's, cleared by the next
            call), bytes per buffer, stages of the previous call (1: one-shot), its bytes to clear
            by stage (4 words), arrivals of the running call (a kernel's CTAs count themselves; 0
            between calls). The initial value is [0, 2, bytes per buffer, 0, 0, 0, 0, 0, 0]; each
            call rotates it.
        descriptor: int64 [5 + world_size] on the host, what an op takes as its workspace: handle
            in this process, rank, bytes per buffer, address of the flags, address of the multicast
            mapping of all ranks' buffers (0: none), address of each rank's three buffers.
    """

    def __init__(
        self,
        tag: str,
        payload: Payload,
        bytes_per_buffer: int,
        mapping: Mapping,
        transport: Transport,
        handle: int,
    ) -> None:
        self.tag, self.payload, self.bytes_per_buffer = tag, payload, bytes_per_buffer
        self.rank, self.world_size = mapping.tp_rank, mapping.tp_size
        self.transport = transport
        self.flags = torch.tensor([0, BUFFERS - 1, bytes_per_buffer] + [0] * 6, dtype=torch.uint32)
        head = [handle, self.rank, bytes_per_buffer, self.flags.data_ptr()]
        self.descriptor = torch.tensor(head + transport.addresses)
        self._calls = 0
        self._published = ""  # the call that has published and not collected yet
        self._failure = ""

    @staticmethod
    def at(descriptor: torch.Tensor) -> "LamportWorkspace":
        """The open workspace that a descriptor stands for.

        Raises:
            ValueError: there is none in this process (any more).
        """
        handle = int(descriptor[0])
        for workspace in _OPEN.values():
            if int(workspace.descriptor[0]) == handle:
                return workspace
        raise ValueError(f"no open Lamport workspace of this process has the handle {handle}")

    @staticmethod
    def world_size_of(descriptor: torch.Tensor) -> int:
        """Ranks of a workspace; reads the shape of its descriptor alone."""
        return descriptor.shape[0] - DESCRIPTOR_HEAD

    def exchange(self, call: str, shard: torch.Tensor) -> torch.Tensor:
        """`publish`, then `collect`."""
        self.publish(call, shard)
        rows, columns = shard.shape
        return self.collect(call, rows, columns, shard.dtype).to(shard.device)

    def publish(self, call: str, shard: torch.Tensor) -> None:
        """Store this rank's rows into every rank's current buffer.

        Args:
            call: that will collect them, the same on all ranks: the op's name.
            shard: [rows, columns], rows of whole 4-byte words; for sums a floating dtype.

        Raises:
            ValueError: rows that do not fit.
            RuntimeError: published rows that no call has collected yet, or a workspace that has
                failed.
        """
        self._refuse_failed()
        rows, columns = shard.shape
        sized_call = self._sized(call, rows, columns, shard.dtype)
        if self._published:
            raise RuntimeError(
                f"workspace {self.tag!r} is to publish {sized_call}, but holds published rows that "
                f"nothing has collected yet: {self._published}"
            )
        self._calls += 1
        self._published = sized_call
        self.transport.announce(self._calls, sized_call)
        self.transport.store(int(self.flags[CURRENT]), self.payload.words(shard))

    def collect(self, call: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """All ranks' published rows; clears the previous call's buffer and rotates.

        Returns:
            dtype [rows, world_size, columns], a copy on the transport's device.

        Raises:
            ValueError: rows that do not fit.
            RuntimeError: something else is published here; another rank makes another call now, or
                none within the deadline (TRTLLM_LAMPORT_TIMEOUT_S seconds, 120 if not set). Both
                are named. The workspace takes no more calls after that.
        """
        self._refuse_failed()
        mine = self._sized(call, rows, columns, dtype)
        if self._published != mine:
            raise RuntimeError(
                f"workspace {self.tag!r} is to collect {mine}; published is "
                f"{self._published or 'nothing'}"
            )
        deadline = time.monotonic() + _timeout_s()
        for rank in range(self.world_size):
            self._await_same_call(rank, mine, deadline)
        gathered = self._await_words(self._bytes(rows, columns, dtype), mine, deadline)
        self._clear_and_rotate(gathered.nbytes)
        self._published = ""
        return gathered.view(dtype).view(rows, self.world_size, columns)

    def _bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """What all ranks' rows take in a buffer."""
        return rows * self.world_size * columns * dtype.itemsize

    def _sized(self, call: str, rows: int, columns: int, dtype: torch.dtype) -> str:
        """The call as ranks compare it. Raises ValueError if the rows do not fit."""
        row_bytes = columns * dtype.itemsize
        if row_bytes % WORD_BYTES:
            raise ValueError(
                f"workspace {self.tag!r} carries words of {WORD_BYTES} bytes; rows of {columns} "
                f"{dtype} are {row_bytes} bytes"
            )
        if self.payload is Payload.SUM and not dtype.is_floating_point:
            raise ValueError(f"workspace {self.tag!r} carries addends; {dtype} is no floating type")
        if self._bytes(rows, columns, dtype) > self.bytes_per_buffer:
            raise ValueError(
                f"{rows} rows of {row_bytes} bytes from each of {self.world_size} ranks do not fit "
                f"into the {self.bytes_per_buffer} bytes per buffer of workspace {self.tag!r}"
            )
        return f"{call} of {rows} rows of {row_bytes} bytes"

    def _await_same_call(self, rank: int, mine: str, deadline: float) -> None:
        while (theirs := self.transport.announced(rank, self._calls)) is None:
            if time.monotonic() > deadline:
                number, latest = self.transport.latest(rank)
                did = f"made its call {number}, {latest}, last" if number else "has made no call"
                raise self._failed(f"rank {self.rank} waits in {mine}, but rank {rank} {did}")
            time.sleep(_POLL_S)
        if theirs != mine:
            raise self._failed(f"rank {self.rank} makes {mine}, but rank {rank} makes {theirs}")

    def _await_words(self, size: int, mine: str, deadline: float) -> torch.Tensor:
        """A copy of the current buffer's first `size` bytes without an empty word."""
        arriving = self.transport.local[int(self.flags[CURRENT])][: size // WORD_BYTES]
        while True:
            words = arriving.clone()
            empty = words == self.payload.empty
            if not empty.any():
                return words
            if time.monotonic() > deadline:
                raise self._failed(
                    f"rank {self.rank} waits in {mine}, but {int(empty.sum())} words of it have "
                    "not arrived"
                )
            time.sleep(_POLL_S)

    def _clear_and_rotate(self, used: int) -> None:
        flags = self.flags.tolist()
        dirty = sum(flags[BYTES_TO_CLEAR : BYTES_TO_CLEAR + flags[DIRTY_STAGES]])
        self.transport.local[flags[DIRTY], : dirty // WORD_BYTES] = self.payload.empty
        current = flags[CURRENT]
        rotated = [(current + 1) % BUFFERS, current, self.bytes_per_buffer, 1, used, 0, 0, 0, 0]
        self.flags.copy_(torch.tensor(rotated, dtype=torch.uint32))

    def _failed(self, what: str) -> RuntimeError:
        self._failure = f"call {self._calls} on workspace {self.tag!r}: {what}"
        return RuntimeError(self._failure)

    def _refuse_failed(self) -> None:
        if self._failure:
            raise RuntimeError(f"workspace {self.tag!r} is out of step since {self._failure}")


def lamport_workspace(
    mapping: Mapping, tag: str, payload: Payload, bytes_per_buffer: int
) -> LamportWorkspace:
    """The workspace of a tag, made at the first call by all ranks together.

    It lives until the ranks leave their process group; then the last made goes first.

    Args:
        tag: whose it is, such as "model"; no two tags share buffers or rotation.
        bytes_per_buffer: rows * world_size * bytes of a row, at most; a multiple of 16.

    Raises:
        ValueError: a size that is no multiple of 16 or over uint32; a tag that exists with another
            payload or less room.
        RuntimeError: under CUDA graph capture; ranks that ask for different workspaces; ranks on
            which it could not be made, on all ranks then, with their reasons.
    """
    if bytes_per_buffer % BUFFER_ALIGNMENT or not 0 < bytes_per_buffer < 1 << 32:
        raise ValueError(
            f"workspace {tag!r} has {bytes_per_buffer} bytes per buffer; it must be a positive "
            f"multiple of {BUFFER_ALIGNMENT} below 2^32"
        )
    if (made := _OPEN.get(tag)) is not None:
        if made.payload is not payload or made.bytes_per_buffer < bytes_per_buffer:
            raise ValueError(
                f"workspace {tag!r} exists for {made.payload.name} with {made.bytes_per_buffer} "
                f"bytes per buffer; asked for is {payload.name} with {bytes_per_buffer}"
            )
        return made
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"workspace {tag!r} is asked for first under CUDA graph capture; make it before"
        )
    _agree(mapping, f"{tag!r} for {payload.name} with {bytes_per_buffer} bytes per buffer")
    transport = _shared_memory(mapping, payload, bytes_per_buffer)
    handle = next(_HANDLES)
    workspace = LamportWorkspace(tag, payload, bytes_per_buffer, mapping, transport, handle)
    _OPEN[tag] = workspace
    before_leaving(lambda: _OPEN.pop(tag))
    return workspace


_OPEN: dict[str, LamportWorkspace] = {}
_HANDLES = itertools.count(1)


def _timeout_s() -> float:
    text = os.environ.get(TIMEOUT_ENV, str(DEFAULT_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{TIMEOUT_ENV} is {text!r}; it must be a positive number of seconds")
    return seconds


def _agree(mapping: Mapping, request: str) -> None:
    requests = gather_objects(request, mapping)
    if len(set(requests)) > 1:
        asked = "; ".join(f"rank {rank}: {request}" for rank, request in enumerate(requests))
        raise RuntimeError(f"the ranks ask for different workspaces: {asked}")


def _shared_memory(
    mapping: Mapping, payload: Payload, bytes_per_buffer: int
) -> SharedMemoryTransport:
    """A transport whose buffers are empty on all ranks, or an error on all of them."""
    path, transport, error = "", None, ""
    try:
        if mapping.tp_rank == 0:
            path = SharedMemoryTransport.make_file(mapping.tp_size, bytes_per_buffer)
    except OSError as reason:
        error = str(reason)
    shared_path = broadcast_object(path, mapping)
    try:
        if shared_path:
            transport = SharedMemoryTransport(
                shared_path, mapping.tp_rank, mapping.tp_size, bytes_per_buffer
            )
            transport.local.fill_(payload.empty)
    except (OSError, RuntimeError) as reason:  # torch reports a failing open as the latter
        error = str(reason)
    errors = gather_objects(error, mapping)
    if path:
        Path(path).unlink()  # the mappings keep it alive
    failed = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(errors) if reason)
    if failed or transport is None:
        raise RuntimeError(f"no shared memory for a Lamport workspace: {failed}")
    return transport
