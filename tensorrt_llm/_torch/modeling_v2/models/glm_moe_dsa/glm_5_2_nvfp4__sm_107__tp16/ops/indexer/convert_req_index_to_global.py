"""Positions within a request -> rows of the latent pool."""

from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from .._cells import geometry_of
from .._checks import INDEX_DTYPES, check_tensor, require
from .._inputs import random_block_table, random_selection
from .._paging import check_paging, pool_rows


@define_op
class ConvertReqIndexToGlobal(OpWrapper):
    """Map request-local key positions to rows of the latent pool.

    For position p of token t, with r = req_id[t] and b = block_table[r, p // block_size]:

        out[t, j] = b * stride_factor + layer_id * block_size + p % block_size

    and -1 where p is negative, p // block_size is past the table or b is negative. Exact integers.
    In the draft loop it runs once, on each request's stashed row; all later steps read its result.

    Args:
        req_id: int32 or int64 [tokens], row of the block table of each token.
        block_table: int32 [requests, pages], blocks of the pool, contiguous; negative: none.
        token_indices: int32 [tokens, num_topk_tokens], contiguous.
        block_size: tokens of a page (tokens_per_block).
        num_topk_tokens: columns of `token_indices`.
        stride_factor: rows from a block to the next one: layers of the pool * block_size.
        layer_id: the layer's place in a block of the pool; 0 for a pool view that begins there.

    Returns:
        int32 [tokens, num_topk_tokens]. Rows are counted from row 0 of the pool.

    Source: TensorRT-LLM's operator of this name.
    """

    schema = (
        "convert_req_index_to_global(Tensor req_id, Tensor block_table, Tensor token_indices, "
        "int block_size, int num_topk_tokens, int stride_factor, int layer_id) -> Tensor"
    )
    CELLS = (
        Cell("the draft loop's one stashed row", {"rows": 1, "requests": 1, "pages": 128}),
        Cell("verify rows of one request", {"rows": 8, "requests": 1, "pages": 128}),
        Cell("two requests", {"rows": 2, "requests": 2, "pages": 64}),
        Cell("short context, most columns without a key", {"rows": 1, "requests": 1, "pages": 3}),
    )

    @staticmethod
    def raw_call(
        req_id: Tensor,
        block_table: Tensor,
        token_indices: Tensor,
        block_size: int,
        num_topk_tokens: int,
        stride_factor: int,
        layer_id: int,
    ) -> Tensor:
        return torch.ops.trtllm.convert_req_index_to_global(
            req_id, block_table, token_indices, block_size, num_topk_tokens, stride_factor, layer_id
        )

    @staticmethod
    def reference(
        req_id: Tensor,
        block_table: Tensor,
        token_indices: Tensor,
        block_size: int,
        num_topk_tokens: int,
        stride_factor: int,
        layer_id: int,
    ) -> Tensor:
        return pool_rows(
            req_id, block_table, token_indices, block_size, stride_factor, layer_id
        ).int()

    @staticmethod
    def fake(
        req_id: Tensor,
        block_table: Tensor,
        token_indices: Tensor,
        block_size: int,
        num_topk_tokens: int,
        stride_factor: int,
        layer_id: int,
    ) -> Tensor:
        return torch.empty_like(token_indices)

    @staticmethod
    def is_valid(
        req_id: Tensor,
        block_table: Tensor,
        token_indices: Tensor,
        block_size: int,
        num_topk_tokens: int,
        stride_factor: int,
        layer_id: int,
    ) -> None:
        tokens, requests = token_indices.shape[0], block_table.shape[0]
        check_tensor("req_id", req_id, (tokens,), *INDEX_DTYPES)
        check_tensor("block_table", block_table, (None, None), torch.int32)
        check_tensor("token_indices", token_indices, (tokens, num_topk_tokens), torch.int32)
        require(
            bool(((req_id >= 0) & (req_id < requests)).all()),
            f"req_id has {req_id.tolist()}; block_table has {requests} rows",
        )
        check_paging(block_size, stride_factor, layer_id)
        rows = (int(block_table.max()) + 1) * stride_factor
        require(
            rows <= torch.iinfo(torch.int32).max,
            f"the pool has {rows} rows or more; int32 results do not hold them",
        )

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        rows, requests, pages = (cell.spec[name] for name in ("rows", "requests", "pages"))
        g, layers = geometry_of(cell), 4
        return {
            "req_id": torch.arange(rows, device=device) * requests // rows,
            "block_table": random_block_table(requests, pages, device, generator),
            "token_indices": random_selection(
                rows, g.index_topk, pages * g.tokens_per_block, device, generator
            ),
            "block_size": g.tokens_per_block,
            "num_topk_tokens": g.index_topk,
            "stride_factor": layers * g.tokens_per_block,
            "layer_id": 2,
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        return 2 * inputs["token_indices"].nbytes + inputs["block_table"].nbytes


convert_req_index_to_global = ConvertReqIndexToGlobal()
