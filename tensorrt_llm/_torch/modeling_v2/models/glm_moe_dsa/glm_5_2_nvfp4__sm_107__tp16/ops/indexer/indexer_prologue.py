"""The whole indexer prologue: index keys to the cache, index queries and head weights to scores."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, assert_bitwise, define_op

from .._cells import Draw, dtype_of, geometry_of
from .._checks import check_tensor
from ._tail import (
    assert_same_queries,
    check_key_tail,
    key_bytes_moved,
    make_key_inputs,
    query_tail,
    write_key_tail,
)


@define_op
class IndexerPrologue(OpWrapper):
    """`glm_indexer_k_tail`, and the same for queries whose projection is done.

    For each token t and head h, in fp32 with a: rounded to the activation dtype:

        r = q[t, h], its first channels rotated as the key's are, a(...)
        e4m3: s = smallest power of two >= max(max|r|, 1e-4) / 448,  out_q = e4m3(r / s)
              out_w = (weights[t, h] * weight_scale) * s
        else: out_q = r,  out_w = weights[t, h] * weight_scale

    so that the score of key c is c's scale times sum_h out_w relu(out_q . c). Rounding to e4m3 is
    to nearest even. out_w is fp32, its first product rounded once and the second exact.

    Args:
        q: bf16 [tokens, heads, dim], wq_b's product, contiguous. Also fp32.
        k, norm_weight, norm_bias, eps, cos_sin, position_ids, index_block, index_offset,
            index_pool, layer_slot, key_dtype, early_launch: as in `glm_indexer_k_tail`.
        weights: q's dtype [tokens, heads], weights_proj's columns of the fused-A product; rows may
            lie apart.
        weight_scale: dim^-0.5 * heads^-0.5, narrowed to fp32 before it multiplies.

    Returns:
        (out_q `key_dtype` [tokens, heads, dim], out_w fp32 [tokens, heads]), contiguous, also for
        padding rows.

    Source: DeepSeek-V3.2's lightning indexer (arXiv 2512.02556).
    """

    schema = (
        "glm_indexer_prologue(Tensor q, Tensor k, Tensor weights, Tensor norm_weight, "
        "Tensor norm_bias, float eps, Tensor cos_sin, Tensor position_ids, Tensor index_block, "
        "Tensor index_offset, Tensor(a!) index_pool, int layer_slot, float weight_scale, "
        "ScalarType key_dtype, bool early_launch) -> (Tensor, Tensor)"
    )
    CELLS = (
        Cell("verify rows", {"rows": 8, "early_launch": True}),
        Cell("one row", {"rows": 1, "early_launch": True}),
        Cell(
            "dependents at the end, padding rows", {"rows": 8, "early_launch": False, "padding": 3}
        ),
    )

    @staticmethod
    def raw_call(
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        eps: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        index_block: Tensor,
        index_offset: Tensor,
        index_pool: Tensor,
        layer_slot: int,
        weight_scale: float,
        key_dtype: torch.dtype,
        early_launch: bool,
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.trtllm.glm_indexer_prologue(
            q,
            k,
            weights,
            norm_weight,
            norm_bias,
            eps,
            cos_sin,
            position_ids,
            index_block,
            index_offset,
            index_pool,
            layer_slot,
            weight_scale,
            key_dtype,
            early_launch,
        )

    @staticmethod
    def reference(
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        eps: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        index_block: Tensor,
        index_offset: Tensor,
        index_pool: Tensor,
        layer_slot: int,
        weight_scale: float,
        key_dtype: torch.dtype,
        early_launch: bool,
    ) -> tuple[Tensor, Tensor]:
        write_key_tail(
            k,
            norm_weight,
            norm_bias,
            eps,
            cos_sin,
            position_ids,
            index_block,
            index_offset,
            index_pool,
            layer_slot,
            key_dtype,
        )
        return query_tail(q, weights, weight_scale, cos_sin, position_ids, key_dtype)

    @staticmethod
    def fake(
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        eps: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        index_block: Tensor,
        index_offset: Tensor,
        index_pool: Tensor,
        layer_slot: int,
        weight_scale: float,
        key_dtype: torch.dtype,
        early_launch: bool,
    ) -> tuple[Tensor, Tensor]:
        out_w = weights.new_empty(weights.shape, dtype=torch.float32)
        return q.new_empty(q.shape, dtype=key_dtype), out_w

    @staticmethod
    def is_valid(
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        eps: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        index_block: Tensor,
        index_offset: Tensor,
        index_pool: Tensor,
        layer_slot: int,
        weight_scale: float,
        key_dtype: torch.dtype,
        early_launch: bool,
    ) -> None:
        check_key_tail(
            k,
            norm_weight,
            norm_bias,
            cos_sin,
            position_ids,
            index_block,
            index_offset,
            index_pool,
            layer_slot,
            key_dtype,
        )
        tokens, dim = k.shape
        check_tensor("q", q, (tokens, None, dim), k.dtype)
        check_tensor("weights", weights, (tokens, q.shape[1]), k.dtype, rows_apart=True)

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        g, dtype, draw = geometry_of(cell), dtype_of(cell), Draw(device, generator)
        rows = cell.spec["rows"]
        return {
            "q": draw.normal(rows, g.index_n_heads, g.index_head_dim, dtype=dtype),
            "weights": draw.normal(rows, 8 + g.index_n_heads, dtype=dtype)[:, 8:],
            **make_key_inputs(cell, device, generator),
            "weight_scale": (g.index_head_dim * g.index_n_heads) ** -0.5,
            "early_launch": cell.spec["early_launch"],
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        q, weights = inputs["q"], inputs["weights"]
        per_weight = weights.element_size() + 4
        queries = q.nbytes + q.numel() * inputs["key_dtype"].itemsize
        return key_bytes_moved(inputs) + queries + weights.numel() * per_weight

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """The cache to the bit; queries but for rotations at a rounding boundary.

        A rotation with or without fused multiply-add differs by 2^-23 of the pair; such a
        difference crosses a bf16 boundary for 2^-15 of the elements and then an e4m3 one for 1/16
        of those. The share allowed is the former.
        """
        assert_same_queries(out[:2], ref[:2], 2.0**-15)
        assert_bitwise(out[2:], ref[2:])


indexer_prologue = IndexerPrologue()
