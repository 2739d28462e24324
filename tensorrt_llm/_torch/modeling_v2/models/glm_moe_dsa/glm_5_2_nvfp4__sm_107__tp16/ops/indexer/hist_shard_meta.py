"""Which of a request's index keys this rank scores."""

from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from .._cells import geometry_of
from .._checks import check_tensor, require
from .._inputs import poisoned, random_block_table


@define_op
class HistShardMeta(OpWrapper):
    """Cut one request's pages into contiguous shards, and give this rank its own.

    With P = ceil(kv_len / block_size) pages in use and S = ceil(P / world_size), rank r has the
    pages r S to min((r + 1) S, P):

        shard_len      = min(max(kv_len - r S block_size, 0), S block_size)
        shard_start    = min(r S, P) * block_size            position of the shard's first key
        shard_table[i] = block_table[r S + i]                for the pages it has, else -1

    So every key belongs to one rank, the ranks' keys follow each other in rank order, and of the
    last ranks some may have none. Exact integers; made once per step, on the device alone.

    Args:
        kv_len: int32 [1], cached tokens of the request, at least 0.
        block_table: int32 [pages], contiguous: the request's row of the index-key table.
        block_size: tokens of a page.
        rank, world_size: of the tensor-parallel group.
        shard_len, shard_start: int32 [1], written.
        shard_table: int32 [1, at least ceil(pages / world_size)], contiguous, all of it written.
    """

    schema = (
        "glm_dsa_hist_shard_meta(Tensor kv_len, Tensor block_table, int block_size, int rank, "
        "int world_size, Tensor(a!) shard_len, Tensor(b!) shard_start, Tensor(c!) shard_table) "
        "-> ()"
    )
    CELLS = (
        Cell("first rank of 16", {"kv_len": 70001, "rank": 0, "world_size": 16}),
        Cell("a rank whose last page is not full", {"kv_len": 70001, "rank": 15, "world_size": 16}),
        Cell("more ranks than pages", {"kv_len": 500, "rank": 12, "world_size": 16}),
        Cell("one rank", {"kv_len": 4097, "rank": 0, "world_size": 1}),
    )

    @staticmethod
    def raw_call(
        kv_len: Tensor,
        block_table: Tensor,
        block_size: int,
        rank: int,
        world_size: int,
        shard_len: Tensor,
        shard_start: Tensor,
        shard_table: Tensor,
    ) -> None:
        torch.ops.trtllm.glm_dsa_hist_shard_meta(
            kv_len, block_table, block_size, rank, world_size, shard_len, shard_start, shard_table
        )

    @staticmethod
    def reference(
        kv_len: Tensor,
        block_table: Tensor,
        block_size: int,
        rank: int,
        world_size: int,
        shard_len: Tensor,
        shard_start: Tensor,
        shard_table: Tensor,
    ) -> None:
        pages = (kv_len.long() + block_size - 1) // block_size
        per_rank = (pages + world_size - 1) // world_size
        first = torch.minimum(rank * per_rank, pages)
        last = torch.minimum(first + per_rank, pages)
        shard_start.copy_(first * block_size)
        # A rank without pages starts behind the last one, which may not be full.
        held = torch.minimum(kv_len.long(), last * block_size) - first * block_size
        shard_len.copy_(held.clamp(min=0))
        page = first + torch.arange(shard_table.shape[1], device=kv_len.device)
        blocks = block_table[page.clamp(max=block_table.shape[0] - 1)]
        shard_table.copy_(torch.where(page < last, blocks, -1).unsqueeze(0))

    @staticmethod
    def fake(
        kv_len: Tensor,
        block_table: Tensor,
        block_size: int,
        rank: int,
        world_size: int,
        shard_len: Tensor,
        shard_start: Tensor,
        shard_table: Tensor,
    ) -> None:
        pass

    @staticmethod
    def is_valid(
        kv_len: Tensor,
        block_table: Tensor,
        block_size: int,
        rank: int,
        world_size: int,
        shard_len: Tensor,
        shard_start: Tensor,
        shard_table: Tensor,
    ) -> None:
        check_tensor("kv_len", kv_len, (1,), torch.int32)
        check_tensor("block_table", block_table, (None,), torch.int32)
        check_tensor("shard_len", shard_len, (1,), torch.int32)
        check_tensor("shard_start", shard_start, (1,), torch.int32)
        check_tensor("shard_table", shard_table, (1, None), torch.int32)
        pages, width = block_table.shape[0], shard_table.shape[1]
        require(0 <= rank < world_size, f"rank is {rank}; world_size is {world_size}")
        require(
            width * world_size >= pages,
            f"shard_table has {width} pages; {world_size} of them do not hold the "
            f"{pages} of block_table",
        )
        require(
            0 <= int(kv_len) <= pages * block_size,
            f"kv_len is {int(kv_len)}; block_table has room for {pages * block_size} tokens",
        )

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        kv_len, world_size = cell.spec["kv_len"], cell.spec["world_size"]
        size = geometry_of(cell).tokens_per_block
        pages = -(-kv_len // size) + 8
        return {
            "kv_len": torch.tensor([kv_len], dtype=torch.int32, device=device),
            "block_table": random_block_table(1, pages, device, generator)[0],
            "block_size": size,
            "rank": cell.spec["rank"],
            "world_size": world_size,
            "shard_len": poisoned((1,), torch.int32, device),
            "shard_start": poisoned((1,), torch.int32, device),
            "shard_table": torch.full(
                (1, -(-pages // world_size)), -9, dtype=torch.int32, device=device
            ),
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        return 2 * inputs["shard_table"].nbytes + 12


hist_shard_meta = HistShardMeta()
