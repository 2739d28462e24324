"""Sparse MLA attention of a generation step: flash decoding over the selected latent rows."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorrt_llm._torch.custom_ops.fp8 import saturating_cast
from tensorrt_llm._torch.custom_ops.sparse_mla import gather_rows
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from .._cells import Draw, dtype_of, geometry_of
from .._checks import check_tensor, require
from .._inputs import random_block_table, random_selection
from .._numerics import assert_chained, project
from .._paging import check_paging, pool_rows, rows_per_request

SPLIT = 128  # slots of the selection that one CTA attends to
# Weights up to 1 times this still fit e4m3, and those down to 2^-18 are not lost.
P_SCALE = 256.0


@define_op
class SparseMlaFlashDecode(OpWrapper):
    """softmax(q . k) v over each token's selected cache rows, then the value half of kv_b_proj.

    The selection of a token is cut into splits of 128 slots, one CTA of a cluster each (16 for 2048
    slots). With k_j the row of slot j, e = bmm1_scale[1] (softmax scale times log2 e), per split i
    and head h, all fp32:

        s_j = q[t, h] . k_j                              exact products, sums in any fixed order
        m_i = max_j s_j
        p_j = 2^(e (s_j - m_i))                          0 where slot j has no key
        l_i = sum_j p_j                                  of p_j before it is rounded
        o_i = sum_j P(p_j) k_j[:latent]

    P(p) = round(256 p) / 256 in the pool's dtype (e4m3: to nearest even; 256 keeps 2^-18 from
    being lost and is exact). With M = max_i m_i and w_i = 2^(e (m_i - M)), in rising i:

        o = bmm2_scale[0] * (sum_i w_i o_i) / (sum_i w_i l_i)
        out[t, h] = v_b[h] . round(o)                    o rounded to v_b's dtype, sum fp32,
                                                         rounded once to v_b's dtype

    A split without keys adds nothing; a token without any key gets zeros. NaN in a token's q or in
    one of its rows makes its result NaN; rows that are not selected are not seen, whatever they
    hold. Reruns are equal to the bit. Nothing is written but the result.

    With a block table the slots hold positions within the token's request t // (tokens / requests),
    and the kernel maps them as `convert_req_index_to_global` does; without one they hold rows of
    the pool. Negative slots, and positions without a block, have no key. They may stand anywhere.

    Under programmatic dependent launch everything is read after the wait, unless
    `gather_before_wait`: then the indices, the table, kv_lens and the rows of earlier steps,
    whose positions are below kv_lens - tokens / requests, are read before it, and only q, the
    scales and the step's own rows after it. That is right only if the kernel before does not write
    the selection, so for layers that share an earlier layer's. The result does not depend on it.

    Args:
        q: e4m3 [tokens, heads, latent + rope], contiguous: absorbed and rotated, at unit scale.
        kv_pool: q's dtype [pool rows, latent + rope], contiguous: the latent pool at unit scale.
        topk_indices: int32 [tokens, topk], contiguous; distinct where not negative.
        block_table: int32 [requests, pages], contiguous, or None.
        kv_lens: int32 [requests], cached tokens with the step's own; read only with
            `gather_before_wait`, or None.
        block_size, stride_factor, layer_id: as in `convert_req_index_to_global`; without a block
            table they are not read.
        bmm1_scale: fp32 [2], bmm2_scale: fp32 [1], both from `glm_mla_kv_half_append`.
        v_b: bf16 [heads, v_head_dim, latent], the value rows of kv_b_proj; heads may lie apart.
        gather_before_wait: see above; needs block_table and kv_lens.

    Returns:
        v_b's dtype [tokens, heads * v_head_dim], contiguous.

    The kernel serves 4 heads of 512 + 64 channels in e4m3 with bf16 v_b of 256 rows and up to 2048
    slots; it unpacks e4m3 to fp16, which is exact, for both products. The reference also takes q
    and pool in bf16 or fp32.

    Source: FlashAttention-2 (arXiv 2307.08691) for the merge of splits.
    """

    schema = (
        "glm_sparse_mla_flash_decode(Tensor q, Tensor kv_pool, Tensor topk_indices, "
        "Tensor? block_table, Tensor? kv_lens, int block_size, int stride_factor, int layer_id, "
        "Tensor bmm1_scale, Tensor bmm2_scale, Tensor v_b, bool gather_before_wait) -> Tensor"
    )
    CELLS = (
        Cell("verify rows of a full-indexer layer", {"rows": 8, "keys": 8192, "map": True}),
        Cell(
            "verify rows of a layer that shares a selection",
            {"rows": 8, "keys": 8192, "map": True, "gather_before_wait": True},
        ),
        Cell("the MTP layer's first draft step", {"rows": 8, "keys": 4096, "map": True}),
        Cell("later draft steps: pool rows, no table", {"rows": 1, "keys": 8192}),
        Cell("short context, most slots without a key", {"rows": 8, "keys": 100, "map": True}),
        Cell("two sequences", {"rows": 8, "keys": 4096, "map": True, "requests": 2}),
    )

    @staticmethod
    def raw_call(
        q: Tensor,
        kv_pool: Tensor,
        topk_indices: Tensor,
        block_table: Tensor | None,
        kv_lens: Tensor | None,
        block_size: int,
        stride_factor: int,
        layer_id: int,
        bmm1_scale: Tensor,
        bmm2_scale: Tensor,
        v_b: Tensor,
        gather_before_wait: bool,
    ) -> Tensor:
        return torch.ops.trtllm.glm_sparse_mla_flash_decode(
            q,
            kv_pool,
            topk_indices,
            block_table,
            kv_lens,
            block_size,
            stride_factor,
            layer_id,
            bmm1_scale,
            bmm2_scale,
            v_b,
            gather_before_wait,
        )

    @staticmethod
    def reference(
        q: Tensor,
        kv_pool: Tensor,
        topk_indices: Tensor,
        block_table: Tensor | None,
        kv_lens: Tensor | None,
        block_size: int,
        stride_factor: int,
        layer_id: int,
        bmm1_scale: Tensor,
        bmm2_scale: Tensor,
        v_b: Tensor,
        gather_before_wait: bool,
    ) -> Tensor:
        rows = selected_rows(topk_indices, block_table, block_size, stride_factor, layer_id)
        rows = F.pad(rows, (0, -rows.shape[1] % SPLIT), value=-1).unflatten(1, (-1, SPLIT))
        latent = v_b.shape[2]
        partial = [
            _attend_split(q, kv_pool, rows[:, i], bmm1_scale[1], latent)
            for i in range(rows.shape[1])
        ]
        attended = (_merge_splits(partial, bmm1_scale[1]) * bmm2_scale).to(v_b.dtype)
        values = [project(attended[:, h], v_b[h]) for h in range(v_b.shape[0])]
        return torch.cat(values, dim=-1)

    @staticmethod
    def fake(
        q: Tensor,
        kv_pool: Tensor,
        topk_indices: Tensor,
        block_table: Tensor | None,
        kv_lens: Tensor | None,
        block_size: int,
        stride_factor: int,
        layer_id: int,
        bmm1_scale: Tensor,
        bmm2_scale: Tensor,
        v_b: Tensor,
        gather_before_wait: bool,
    ) -> Tensor:
        return v_b.new_empty(q.shape[0], v_b.shape[0] * v_b.shape[1])

    @staticmethod
    def is_valid(
        q: Tensor,
        kv_pool: Tensor,
        topk_indices: Tensor,
        block_table: Tensor | None,
        kv_lens: Tensor | None,
        block_size: int,
        stride_factor: int,
        layer_id: int,
        bmm1_scale: Tensor,
        bmm2_scale: Tensor,
        v_b: Tensor,
        gather_before_wait: bool,
    ) -> None:
        tokens, heads, width = q.shape
        dtypes = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)
        check_tensor("q", q, (tokens, heads, width), *dtypes)
        check_tensor("kv_pool", kv_pool, (None, width), q.dtype)
        check_tensor("topk_indices", topk_indices, (tokens, None), torch.int32)
        check_tensor("bmm1_scale", bmm1_scale, (2,), torch.float32)
        check_tensor("bmm2_scale", bmm2_scale, (1,), torch.float32)
        check_tensor(
            "v_b", v_b, (heads, None, None), torch.bfloat16, torch.float32, rows_apart=True
        )
        require(
            v_b.shape[2] <= width and v_b.stride(1) == v_b.shape[2],
            f"v_b is {list(v_b.shape)} with strides {list(v_b.stride())}; its rows must be at most "
            f"q's {width} wide and follow each other",
        )
        if block_table is not None:
            check_tensor("block_table", block_table, (None, None), torch.int32)
            rows_per_request(tokens, block_table)
            check_paging(block_size, stride_factor, layer_id)
        _check_early_gather(topk_indices, block_table, kv_lens, gather_before_wait)
        rows = selected_rows(topk_indices, block_table, block_size, stride_factor, layer_id)
        last = int(rows.max()) if rows.numel() else -1
        require(
            last < kv_pool.shape[0], f"kv_pool has {kv_pool.shape[0]} rows; row {last} is selected"
        )

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        g, draw, layers = geometry_of(cell), Draw(device, generator), 2
        rows, keys, requests = cell.spec["rows"], cell.spec["keys"], cell.spec.get("requests", 1)
        pages = -(-keys // g.tokens_per_block)
        pool_rows_ = requests * pages * layers * g.tokens_per_block
        maps = cell.spec.get("map", False)
        kv_lens = torch.full((requests,), keys, dtype=torch.int32, device=device)
        # Scores of a softmax that neither one key nor rounding to e4m3 dominates.
        std = 0.75 / (g.latent_width**0.5 * g.softmax_scale)
        return {
            "q": draw.normal(rows, g.heads, g.latent_width, std=std).to(torch.float8_e4m3fn),
            "kv_pool": draw.normal(pool_rows_, g.latent_width).to(torch.float8_e4m3fn),
            "topk_indices": random_selection(rows, g.index_topk, keys, device, generator),
            "block_table": random_block_table(requests, pages, device, generator) if maps else None,
            "kv_lens": kv_lens if maps else None,
            "block_size": g.tokens_per_block,
            "stride_factor": layers * g.tokens_per_block,
            "layer_id": 1,
            "bmm1_scale": g.softmax_scale * torch.tensor([1.0, 1.4426950408889634], device=device),
            "bmm2_scale": torch.ones(1, device=device),
            "v_b": draw.weight(g.heads, g.v_head_dim, g.kv_lora_rank, dtype=dtype_of(cell)),
            "gather_before_wait": cell.spec.get("gather_before_wait", False),
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        q, pool, indices, v_b = (inputs[n] for n in ("q", "kv_pool", "topk_indices", "v_b"))
        gathered = int((indices >= 0).sum()) * pool[0].nbytes
        out = q.shape[0] * v_b.shape[0] * v_b.shape[1] * v_b.element_size()
        return q.nbytes + indices.nbytes + gathered + v_b.nbytes + out

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """See `assert_chained`: between fp32 sums stands one rounding of the latent to bf16.

        That of the weights to e4m3 adds nothing to its band. Scores differ by fp32's share, below
        2^-17, so one weight in 2^13 lies across a boundary and moves by 1/16 of itself. In a cell
        no weight exceeds 1 % of its token's sum, so such a move is below 2^-10 of a value and less
        than the rounding of the latent.
        """
        assert_chained(out[0], ref[0])


sparse_mla_flash_decode = SparseMlaFlashDecode()


def selected_rows(
    topk_indices: Tensor,
    block_table: Tensor | None,
    block_size: int,
    stride_factor: int,
    layer_id: int,
) -> Tensor:
    """int64 [tokens, topk] rows of the pool, -1 where there is no key."""
    if block_table is None:
        return topk_indices.long()
    tokens = topk_indices.shape[0]
    req_id = torch.arange(tokens, device=topk_indices.device) // (tokens // block_table.shape[0])
    return pool_rows(req_id, block_table, topk_indices, block_size, stride_factor, layer_id)


def _attend_split(
    q: Tensor, kv_pool: Tensor, rows: Tensor, scale_log2: Tensor, latent: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Largest score [tokens, heads, 1] (-inf: no key), sum of weights [tokens, heads, 1] and their
    unnormalised values [tokens, heads, latent], all fp32."""
    keys = gather_rows(kv_pool, rows.clamp(min=0).flatten(), torch.float32)
    keys = keys.view(*rows.shape, -1).masked_fill_((rows < 0).unsqueeze(2), 0.0)
    scores = torch.bmm(q.float(), keys.transpose(1, 2))
    scores = scores.masked_fill((rows < 0).unsqueeze(1), float("-inf"))
    largest = scores.amax(-1, keepdim=True)
    weights = torch.exp2(scale_log2 * (scores - _finite(largest)))
    rounded = saturating_cast(weights * P_SCALE, kv_pool.dtype).float() / P_SCALE
    return largest, weights.sum(-1, keepdim=True), torch.bmm(rounded, keys[..., :latent])


def _merge_splits(partial: list[tuple[Tensor, Tensor, Tensor]], scale_log2: Tensor) -> Tensor:
    """fp32 [tokens, heads, latent]; the splits are added in their order."""
    largest = _finite(torch.stack([split[0] for split in partial]).amax(0))
    total, values = torch.zeros_like(partial[0][1]), torch.zeros_like(partial[0][2])
    for split_largest, split_total, split_values in partial:
        factor = torch.exp2(scale_log2 * (split_largest - largest))
        total += factor * split_total
        values += factor * split_values
    return torch.where(total == 0, 0.0, values / total)


def _finite(largest: Tensor) -> Tensor:
    """The largest score to subtract: 0 where there is no key, NaN where a score is NaN."""
    return largest.masked_fill(largest == float("-inf"), 0.0)


def _check_early_gather(
    topk_indices: Tensor,
    block_table: Tensor | None,
    kv_lens: Tensor | None,
    gather_before_wait: bool,
) -> None:
    if block_table is None or kv_lens is None:
        require(
            not gather_before_wait,
            "gather_before_wait needs block_table and kv_lens, which say which rows are older than "
            "the step",
        )
        return
    check_tensor("kv_lens", kv_lens, (block_table.shape[0],), torch.int32)
    last = topk_indices.view(block_table.shape[0], -1).amax(1)
    require(
        bool((last < kv_lens).all()),
        f"positions up to {last.tolist()} are selected; kv_lens is {kv_lens.tolist()}",
    )
