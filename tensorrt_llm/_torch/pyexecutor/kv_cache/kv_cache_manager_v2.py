"""Paged KV cache: one pool of blocks per role, and which request holds which block.

This file is the one owner of page strides: nobody else multiplies tokens, layers and bytes. A pool
is laid out as [block, layer, page]; one page holds `tokens_per_block` tokens of one layer.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

BAD_PAGE_INDEX = -1  # block table entry without a block
COPY_ENTRIES = 4  # block table entries of a 16-byte access


class Role(StrEnum):
    """What a pool holds; a role is its own string, so "key" works wherever `Role.KEY` does."""

    KEY = "key"
    INDEX_KEY = "index_key"


@dataclass(frozen=True)
class BufferConfig:
    """One role's cache: the model layers with a page in each block, and one token's bytes there."""

    role: Role
    layers: tuple[int, ...]
    bytes_per_token: int

    def block_bytes(self, tokens_per_block: int) -> int:
        """Bytes of one block: a page of every layer."""
        return len(self.layers) * tokens_per_block * self.bytes_per_token


class _Pool:
    """Memory and free list of one role."""

    def __init__(
        self, config: BufferConfig, tokens_per_block: int, num_blocks: int, device: torch.device
    ) -> None:
        self.config = config
        self.page_bytes = tokens_per_block * config.bytes_per_token
        self.num_blocks = num_blocks
        self.slots = {layer: slot for slot, layer in enumerate(config.layers)}
        shape = (num_blocks, len(config.layers), self.page_bytes)
        self.memory = torch.zeros(shape, dtype=torch.uint8, device=device)
        # A sorted list is a heap. Lowest block first, so that every rank hands out the same blocks.
        self.free = list(range(num_blocks))

    def take(self, count: int) -> list[int]:
        return [heapq.heappop(self.free) for _ in range(count)]

    def give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heapq.heappush(self.free, block)


@dataclass
class _Sequence:
    """What one request holds: a row of the host tables, and blocks per role in token order."""

    row: int
    blocks: dict[str, list[int]] = field(default_factory=dict)


class KVCacheManagerV2:
    """Blocks of all roles, handed out and taken back together.

    Args:
        buffers: one entry per role.
        tokens_per_block: tokens of one page, the same in all pools.
        max_seq_len: longest sequence in tokens, prompt and output.
        max_batch_size: requests that can hold blocks at the same time.
        num_blocks: blocks of each role's pool.
        device: where the pools live.
        num_extra_kv_tokens: tokens beyond `max_seq_len` that a step may write (speculation).

    Raises:
        ValueError: no buffers, two for one role, sizes below 1, or a role without a block count.
    """

    def __init__(
        self,
        *,
        buffers: Sequence[BufferConfig],
        tokens_per_block: int,
        max_seq_len: int,
        max_batch_size: int,
        num_blocks: Mapping[Role, int],
        device: torch.device,
        num_extra_kv_tokens: int = 0,
    ) -> None:
        _check_buffers(buffers, tokens_per_block, num_blocks)
        self.tokens_per_block = tokens_per_block
        self.max_seq_len = max_seq_len
        self.max_batch_size = max_batch_size
        self.num_extra_kv_tokens = num_extra_kv_tokens
        self.max_blocks_per_seq = self.blocks_for(max_seq_len + num_extra_kv_tokens)
        self._pools: dict[str, _Pool] = {
            b.role: _Pool(b, tokens_per_block, num_blocks[b.role], device) for b in buffers
        }
        self._sequences: dict[int, _Sequence] = {}
        self._free_rows = list(range(max_batch_size))
        self.table_version = 0  # counts the changes of any block table
        shape = (max_batch_size, self.max_blocks_per_seq)
        self._tables = {
            role: torch.full(shape, BAD_PAGE_INDEX, dtype=torch.int32) for role in self._pools
        }

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self._pools)

    # --- memory -----------------------------------------------------------------------------------

    def pool(self, role: str) -> torch.Tensor:
        """uint8 [num_blocks, layers, page_bytes], contiguous."""
        return self._pool(role).memory

    def page_bytes(self, role: str) -> int:
        """Bytes of one page: `tokens_per_block` tokens of one layer."""
        return self._pool(role).page_bytes

    def page_stride(self, role: str) -> int:
        """Bytes from a layer's page to the same layer's page in the next block."""
        pool = self._pool(role)
        return len(pool.slots) * pool.page_bytes

    @property
    def total_bytes(self) -> int:
        """Memory of all pools."""
        return sum(pool.memory.nbytes for pool in self._pools.values())

    def has_buffer(self, role: str, layer_idx: int) -> bool:
        return role in self._pools and layer_idx in self._pools[role].slots

    def layer_slot(self, role: str, layer_idx: int) -> int:
        """Place of a model layer's page inside a block.

        Raises:
            KeyError: the layer has no such buffer.
        """
        slots = self._pool(role).slots
        if layer_idx not in slots:
            raise KeyError(
                f"layer {layer_idx} has no {role} buffer; layers {sorted(slots)} have one"
            )
        return slots[layer_idx]

    def layer_pages(
        self, role: str, layer_idx: int, dtype: torch.dtype = torch.uint8
    ) -> torch.Tensor:
        """One layer's pages as `dtype`: [num_blocks, page_bytes / itemsize], a view with the pool's
        block stride.

        Raises:
            KeyError: the layer has no such buffer.
            ValueError: a page is not a whole number of `dtype` items.
        """
        pages = self.pool(role)[:, self.layer_slot(role, layer_idx)]
        if pages.shape[1] % dtype.itemsize:
            raise ValueError(
                f"a {role} page has {pages.shape[1]} bytes, which is not a multiple of "
                f"the {dtype.itemsize} bytes of {dtype}"
            )
        return pages.view(dtype)

    # --- counts -----------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of each pool that `num_tokens` tokens fill, the last one perhaps partly."""
        return -(-num_tokens // self.tokens_per_block)

    def num_blocks(self, role: str) -> int:
        return self._pool(role).num_blocks

    def num_free_blocks(self, role: str) -> int:
        return len(self._pool(role).free)

    def num_used_blocks(self, role: str) -> int:
        pool = self._pool(role)
        return pool.num_blocks - len(pool.free)

    def can_hold(self, num_tokens: Iterable[int]) -> bool:
        """Whether every pool has the blocks for new requests of these lengths, all at once."""
        needed = sum(self.blocks_for(n) for n in num_tokens)
        return all(needed <= len(pool.free) for pool in self._pools.values())

    # --- requests ---------------------------------------------------------------------------------

    def add_request(self, request_id: int) -> None:
        """Start a request that holds nothing yet.

        Raises:
            ValueError: the id is in use.
            RuntimeError: `max_batch_size` requests are there already.
        """
        if request_id in self._sequences:
            raise ValueError(f"request {request_id} is in the KV cache already")
        if not self._free_rows:
            raise RuntimeError(
                f"request {request_id} finds no place: {self.max_batch_size} are there already"
            )
        row = heapq.heappop(self._free_rows)
        self._sequences[request_id] = _Sequence(row, {role: [] for role in self._pools})

    def resize(self, request_id: int, num_tokens: int) -> bool:
        """Let the request hold exactly the blocks of `num_tokens` tokens, in all pools or, if one
        is short, in none.

        Returns:
            False when some pool is short; nothing has changed then.

        Raises:
            KeyError: unknown request.
            ValueError: `num_tokens` is negative or above `max_seq_len` + `num_extra_kv_tokens`.
        """
        sequence, limit = self._sequence(request_id), self.max_seq_len + self.num_extra_kv_tokens
        if not 0 <= num_tokens <= limit:
            raise ValueError(
                f"request {request_id} asks for {num_tokens} tokens; it must be 0 to {limit}"
            )
        wanted = self.blocks_for(num_tokens)
        if any(
            wanted - len(sequence.blocks[role]) > len(pool.free)
            for role, pool in self._pools.items()
        ):
            return False
        for role in self._pools:
            self._set_length(sequence, role, wanted)
        return True

    def free(self, request_id: int) -> None:
        """Take all blocks of a request back and forget it.

        Raises:
            KeyError: unknown request, or freed before.
        """
        sequence = self._sequence(request_id)
        for role in self._pools:
            self._set_length(sequence, role, 0)
        heapq.heappush(self._free_rows, sequence.row)
        del self._sequences[request_id]

    def row(self, request_id: int) -> int:
        """The request's place among `max_batch_size`, the same from `add_request` to `free`."""
        return self._sequence(request_id).row

    def block_ids(self, request_id: int, role: str) -> list[int]:
        """The request's blocks of one role in token order."""
        return list(self._sequence(request_id).blocks[self._pool(role).config.role])

    def check_empty(self) -> None:
        """Raises RuntimeError, naming the requests and counts, unless every block is free."""
        used = {role: self.num_used_blocks(role) for role in self._pools}
        if self._sequences or any(used.values()):
            raise RuntimeError(
                f"KV cache blocks leaked: used {used}, held by requests {sorted(self._sequences)}"
            )

    def max_held_blocks(self, request_ids: Sequence[int], role: str) -> int:
        """Blocks of the batch's longest request."""
        return max((len(self._sequence(r).blocks[role]) for r in request_ids), default=0)

    def copy_batch_block_offsets(
        self,
        dst: torch.Tensor,
        request_ids: Sequence[int],
        role: str,
        max_blocks: int | None = None,
    ) -> None:
        """Block tables of a batch onto the device of `dst`.

        Args:
            dst: int32 [at least len(request_ids), max_blocks_per_seq]; entries without a block
                become -1, rows past the batch keep their values.
            request_ids: the batch in row order.
            role: whose blocks.
            max_blocks: columns to copy, rounded up to whole 16-byte accesses; those after them
                keep their values. None or negative copies whole rows.

        Raises:
            KeyError: unknown request or role.
            ValueError: `dst` has another width or too few rows.
        """
        table, count = self._tables[self._pool(role).config.role], len(request_ids)
        if dst.shape[0] < count or dst.shape[1] != table.shape[1]:
            raise ValueError(
                f"block table has shape {tuple(dst.shape)}; {count} requests need at least "
                f"{count} rows of exactly {table.shape[1]}"
            )
        columns = table.shape[1]
        if max_blocks is not None and max_blocks >= 0:
            columns = min(columns, -(-max_blocks // COPY_ENTRIES) * COPY_ENTRIES)
        rows = torch.tensor([self._sequence(r).row for r in request_ids], dtype=torch.int64)
        # A fresh pinned buffer: the next step may fill its own while this copy is still on its way.
        host = torch.empty((count, columns), dtype=torch.int32, pin_memory=dst.is_cuda)
        torch.index_select(table[:, :columns], 0, rows, out=host)
        dst[:count, :columns].copy_(host, non_blocking=True)

    def report(self) -> str:
        """Exact bytes of every pool, for people."""
        lines = [
            f"KV cache: {self.tokens_per_block} tokens per block, "
            f"{self.max_blocks_per_seq} blocks for the longest sequence ({self.max_seq_len} tokens)"
        ]
        lines += [self._report_pool(role, pool) for role, pool in self._pools.items()]
        per_token = sum(
            len(pool.slots) * pool.config.bytes_per_token for pool in self._pools.values()
        )
        return "\n".join([*lines, f"  total: {per_token:,} B per token, {self.total_bytes:,} B"])

    def _report_pool(self, role: str, pool: _Pool) -> str:
        layers, per_token = len(pool.slots), pool.config.bytes_per_token
        return (
            f"  {role}: {layers} layers x {per_token:,} B = {layers * per_token:,} B per token, "
            f"{pool.page_bytes:,} B per page, {self.page_stride(role):,} B per block, "
            f"{pool.num_blocks:,} blocks = {pool.num_blocks * self.tokens_per_block:,} tokens = "
            f"{pool.memory.nbytes:,} B"
        )

    def _pool(self, role: str) -> _Pool:
        if role not in self._pools:
            raise KeyError(f"no pool for role {role!r}; there are {', '.join(self._pools)}")
        return self._pools[role]

    def _sequence(self, request_id: int) -> _Sequence:
        if request_id not in self._sequences:
            raise KeyError(f"request {request_id} is not in the KV cache")
        return self._sequences[request_id]

    def _set_length(self, sequence: _Sequence, role: str, length: int) -> None:
        """Grow or shrink a sequence's blocks of one role; the caller knows there are enough."""
        pool, blocks, row = (
            self._pools[role],
            sequence.blocks[role],
            self._tables[role][sequence.row],
        )
        old = len(blocks)
        self.table_version += length != old
        if length > old:
            blocks += pool.take(length - old)
            row[old:length] = torch.tensor(blocks[old:], dtype=torch.int32)
        elif length < old:
            pool.give_back(blocks[length:])
            del blocks[length:]
            row[length:old] = BAD_PAGE_INDEX


def num_blocks_for_memory(
    buffers: Sequence[BufferConfig], tokens_per_block: int, free_bytes: int
) -> dict[Role, int]:
    """Blocks of each pool so that all of them cover the same number of tokens and fit into
    `free_bytes`.

    Raises:
        ValueError: not even one block of every role fits.
    """
    block_bytes = sum(b.block_bytes(tokens_per_block) for b in buffers)
    count = free_bytes // block_bytes
    if count < 1:
        raise ValueError(
            f"{free_bytes:,} B are free for the KV cache, but one block of "
            f"{tokens_per_block} tokens takes {block_bytes:,} B"
        )
    return {b.role: count for b in buffers}


def _check_buffers(
    buffers: Sequence[BufferConfig], tokens_per_block: int, num_blocks: Mapping[Role, int]
) -> None:
    roles = [b.role for b in buffers]
    if not roles or len(set(roles)) != len(roles):
        raise ValueError(f"KV cache buffers have roles {roles}; each role needs one entry")
    if tokens_per_block < 1:
        raise ValueError(f"tokens_per_block is {tokens_per_block}; it must be at least 1")
    for b in buffers:
        if not b.layers or len(set(b.layers)) != len(b.layers) or b.bytes_per_token < 1:
            raise ValueError(f"{b} needs distinct layers and at least one byte per token")
        if num_blocks.get(b.role, 0) < 1:
            raise ValueError(f"num_blocks is {dict(num_blocks)}; {b.role} needs at least 1")
