"""Index scores of the verify rows over the paged index keys of this rank."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.attention.backends.sparse.dsa.cache_manager import DSACacheLayout
from tensorrt_llm._torch.custom_ops.paged_mqa_logits import (
    check_paged_mqa_logits,
    paged_mqa_logits,
    paged_mqa_logits_schedule,
)
from tensorrt_llm._torch.modeling_v2.catalog._op import (
    Cell,
    OpWrapper,
    assert_within_ulp,
    define_op,
)

from ...geometry import GLM_5_2_TP16
from .._cells import Draw, geometry_of
from .._checks import require
from .._inputs import poisoned, random_block_table
from .._paging import check_positions
from ._tail import E4M3


@define_op
class Fp8PagedMqaLogits(OpWrapper):
    """Score each request's cached index keys for each of its rows.

    For row t of request r and the key at position c of its block table, all fp32:

        logits[t, c] = scale_c * sum_h w[r, t, h] * max(0, q[r, t, h] . key_c)     c <= position_ids
        logits[t, c] = -inf                                                        c >  position_ids

    scale_c is the key's fp32 scale, 1 where the cache is not FP8. Every element of logits is
    written, so nothing has to be cleared before. Products of e4m3 are exact; a dot product sums dim
    terms, the outer sum the heads, both in an order that depends on nothing but the place in the
    key's tile: neither the schedule, nor the rest of the batch, nor early_keys changes a bit. NaN
    comes through wherever the row sees it; keys that no row sees are not read.

    The verify rows of a request are one tile of rows * heads columns. Under programmatic dependent
    launch everything is read after the wait, but with `early_keys` the keys older than the
    request's newest `rows` keys are loaded before it: right if no kernel just before writes them.

    The positions are those of this rank's keys. With a shard of the request's keys the table is the
    shard's, and a row's position is its own minus the shard's first, at most the shard's last key
    and at least -1.

    Args:
        q: e4m3 [requests, rows, heads, dim], contiguous, from `glm_indexer_q_tail` or
            `glm_indexer_prologue`; also bf16 or fp32 with such keys. 16, 32 or 64 heads of 32, 64
            or 128 channels.
        w: fp32 [requests, rows, heads], contiguous, from the same.
        index_pool: uint8 [blocks, layers, page bytes], contiguous; see `glm_indexer_k_tail`.
        layer_slot: which of the pool's layers.
        key_dtype: of the keys: e4m3, bf16 or fp32.
        block_table: int32 [requests, pages]; rows may lie apart.
        position_ids: int64 [requests * rows]; -1 sees no key.
        scheduler_metadata, row_order: from `glm_paged_mqa_logits_schedule`, for lengths of at least
            each request's last position + 1.
        logits: fp32 [requests * rows, pages * tokens per page], written; rows may lie apart, so it
            can be a part of a padded buffer that is kept for captured graphs. What is past its
            columns stays.
        early_keys: see above.

    Source: DeepSeek-V3.2's lightning indexer (arXiv 2512.02556).
    """

    schema = (
        "glm_fp8_paged_mqa_logits(Tensor q, Tensor w, Tensor index_pool, int layer_slot, "
        "ScalarType key_dtype, Tensor block_table, Tensor position_ids, "
        "Tensor scheduler_metadata, Tensor row_order, Tensor(a!) logits, bool early_keys) -> ()"
    )
    CELLS = (
        Cell("verify rows over one rank's shard", {"rows": 8, "keys": 8192, "early_keys": True}),
        Cell("every key read after the wait", {"rows": 8, "keys": 8192, "early_keys": False}),
        Cell("no drafts", {"rows": 1, "keys": 8192, "early_keys": True}),
        Cell("rows that do not fill a tile", {"rows": 5, "keys": 4100, "early_keys": True}),
        Cell("two requests", {"rows": 8, "keys": 4096, "early_keys": False, "requests": 2}),
    )

    @staticmethod
    def raw_call(
        q: Tensor,
        w: Tensor,
        index_pool: Tensor,
        layer_slot: int,
        key_dtype: torch.dtype,
        block_table: Tensor,
        position_ids: Tensor,
        scheduler_metadata: Tensor,
        row_order: Tensor,
        logits: Tensor,
        early_keys: bool,
    ) -> None:
        torch.ops.trtllm.glm_fp8_paged_mqa_logits(
            q,
            w,
            index_pool,
            layer_slot,
            key_dtype,
            block_table,
            position_ids,
            scheduler_metadata,
            row_order,
            logits,
            early_keys,
        )

    @staticmethod
    def reference(
        q: Tensor,
        w: Tensor,
        index_pool: Tensor,
        layer_slot: int,
        key_dtype: torch.dtype,
        block_table: Tensor,
        position_ids: Tensor,
        scheduler_metadata: Tensor,
        row_order: Tensor,
        logits: Tensor,
        early_keys: bool,
    ) -> None:
        paged_mqa_logits(
            q,
            w,
            index_pool,
            layer_slot,
            key_dtype,
            block_table,
            position_ids,
            scheduler_metadata,
            row_order,
            logits,
        )

    @staticmethod
    def fake(
        q: Tensor,
        w: Tensor,
        index_pool: Tensor,
        layer_slot: int,
        key_dtype: torch.dtype,
        block_table: Tensor,
        position_ids: Tensor,
        scheduler_metadata: Tensor,
        row_order: Tensor,
        logits: Tensor,
        early_keys: bool,
    ) -> None:
        pass

    @staticmethod
    def is_valid(
        q: Tensor,
        w: Tensor,
        index_pool: Tensor,
        layer_slot: int,
        key_dtype: torch.dtype,
        block_table: Tensor,
        position_ids: Tensor,
        scheduler_metadata: Tensor,
        row_order: Tensor,
        logits: Tensor,
        early_keys: bool,
    ) -> None:
        check_paged_mqa_logits(
            q,
            w,
            index_pool,
            layer_slot,
            key_dtype,
            block_table,
            position_ids,
            scheduler_metadata,
            row_order,
            logits,
        )
        check_positions(position_ids, logits.shape[1], "logits")
        last = position_ids.view(q.shape[:2]).amax(1)
        for request, pages in enumerate((last * block_table.shape[1] // logits.shape[1]).tolist()):
            used = block_table[request, : pages + 1] if last[request] >= 0 else block_table[0, :0]
            require(
                bool(((used >= 0) & (used < index_pool.shape[0])).all()),
                f"block_table of request {request} has {used.tolist()} up to its last position; "
                f"index_pool has {index_pool.shape[0]} blocks",
            )
        _check_schedule(last, scheduler_metadata, row_order)

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        g, draw, layers, processors = geometry_of(cell), Draw(device, generator), 2, 148
        rows, keys, requests = cell.spec["rows"], cell.spec["keys"], cell.spec.get("requests", 1)
        pages = -(-keys // g.tokens_per_block)
        layout = DSACacheLayout(0, g.index_head_dim, E4M3, fp8=True)
        blocks = requests * pages
        pool = poisoned(
            (blocks, layers, g.tokens_per_block * layout.index_key_bytes), torch.uint8, device
        )
        place = torch.arange(blocks * g.tokens_per_block, device=device)
        layout.write_index_pool(
            pool,
            1,
            draw.normal(place.numel(), g.index_head_dim),
            place // g.tokens_per_block,
            place % g.tokens_per_block,
        )
        metadata = poisoned((processors + 1, 2), torch.int32, device)
        order = poisoned((requests,), torch.int32, device)
        lens = torch.full((requests,), keys, dtype=torch.int32, device=device)
        paged_mqa_logits_schedule(lens, metadata, order)
        buffer = poisoned(
            (requests * rows, pages * g.tokens_per_block + 256), torch.float32, device
        )
        return {
            "q": draw.normal(requests, rows, g.index_n_heads, g.index_head_dim).to(E4M3),
            "w": draw.normal(requests, rows, g.index_n_heads),
            "index_pool": pool,
            "layer_slot": 1,
            "key_dtype": E4M3,
            "block_table": random_block_table(requests, pages, device, generator),
            "position_ids": (keys - rows + torch.arange(rows, device=device)).repeat(requests),
            "scheduler_metadata": metadata,
            "row_order": order,
            "logits": buffer[:, : pages * g.tokens_per_block],
            "early_keys": cell.spec["early_keys"],
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        q, w, logits = inputs["q"], inputs["w"], inputs["logits"]
        last = inputs["position_ids"].view(q.shape[:2]).amax(1)
        scale_bytes = 4 if inputs["key_dtype"] == E4M3 else 0
        keys = int((last + 1).sum()) * (q.shape[3] * inputs["key_dtype"].itemsize + scale_bytes)
        return q.nbytes + w.nbytes + keys + inputs["block_table"].nbytes + logits.nbytes

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """-inf at the same places; else two fp32 sums of exact products.

        Each is within (dim + heads) * 2^-24 of the exact one, relative to the sum of magnitudes,
        which in a cell stays below 16 times a row's largest score. In ulp, 2^-23, the two differ by
        at most 16 * (dim + heads). Errors of random sign leave the root of the terms of that.
        """
        g, absent = GLM_5_2_TP16, ref[0] == float("-inf")
        assert torch.equal(out[0] == float("-inf"), absent), "-inf at other places"
        terms = g.index_head_dim + g.index_n_heads
        scores, expected = (t[0].masked_fill(absent, 0.0) for t in (out, ref))
        assert_within_ulp(scores, expected, 16 * terms, 16 * terms**0.5)


fp8_paged_mqa_logits = Fp8PagedMqaLogits()


def _check_schedule(last: Tensor, scheduler_metadata: Tensor, row_order: Tensor) -> None:
    """Raises ValueError unless the schedule is one of as many requests."""
    order = sorted(row_order.tolist())
    require(
        order == list(range(last.shape[0])),
        f"row_order is {row_order.tolist()}; each of {last.shape[0]} requests must be there once",
    )
    end = scheduler_metadata[-1].tolist()
    require(
        end == [last.shape[0], 0],
        f"the schedule ends at {end}; for {last.shape[0]} requests that is [{last.shape[0]}, 0]",
    )
