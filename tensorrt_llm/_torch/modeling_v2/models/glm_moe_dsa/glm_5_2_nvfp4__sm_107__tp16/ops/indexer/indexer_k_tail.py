"""The indexer's key from its projection to the cache."""

from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from ._tail import check_key_tail, key_bytes_moved, make_key_inputs, write_key_tail


@define_op
class IndexerKTail(OpWrapper):
    """LayerNorm, rotation and quantisation of the index keys, and their append to the cache.

    For each token row t, in fp32 with the roundings that are named (a: to the activation dtype):

        n = a((k - mean(k)) / sqrt(var(k) + eps) * norm_weight + norm_bias)      var: of 1/dim
        n[2j], n[2j+1] = a(n[2j] cos_j - n[2j+1] sin_j), a(n[2j] sin_j + n[2j+1] cos_j)

    for the first channels, (cos_j, sin_j) = cos_sin[position_ids[t], j]; the other channels stay.
    In e4m3 the key is stored as e4m3(n / s), to nearest even, with the smallest power of two s
    that is at least max(max|n|, 1e-4) / 448, stored as fp32. With another key_dtype n is stored as
    it is, without a scale.

    A page of the pool holds the data of all its tokens and then, in e4m3, all their scales. Token t
    goes to place index_offset[t] of block index_block[t] in layer `layer_slot`. A negative block is
    padding and written nowhere. All other bytes of the pool stay. Running a step again writes the
    same bytes.

    Runs on a side stream beside the query projection. Under programmatic dependent launch k is read
    after the wait. With `early_launch` positions and slots, which no kernel of the layer writes,
    are read before it, and the dependents start right after it; else at the end. The result does
    not depend on it.

    Args:
        k: bf16 [tokens, dim], wk's columns of the fused-A product; rows may lie apart. Also fp32.
        norm_weight, norm_bias: k's dtype [dim].
        eps: of the norm, 1e-6.
        cos_sin: fp32 [positions, rope / 2, 2].
        position_ids: int64 [tokens]; negative is padding.
        index_block, index_offset: int64 [tokens], the metadata's slots of the step.
        index_pool: uint8 [blocks, layers, page bytes], contiguous, written.
        layer_slot: which of the pool's layers.
        key_dtype: e4m3; k's dtype where the cache is not FP8. e4m3 serves up to 128 channels.
        early_launch: see above.

    The kernel's bytes are the reference's: the largest magnitude, the scale and the quantisation
    see values rounded to bf16.

    Source: DeepSeek-V3.2's lightning indexer (arXiv 2512.02556).
    """

    schema = (
        "glm_indexer_k_tail(Tensor k, Tensor norm_weight, Tensor norm_bias, float eps, "
        "Tensor cos_sin, Tensor position_ids, Tensor index_block, Tensor index_offset, "
        "Tensor(a!) index_pool, int layer_slot, ScalarType key_dtype, bool early_launch) -> ()"
    )
    CELLS = (
        Cell("verify rows", {"rows": 8, "early_launch": True}),
        Cell("one row", {"rows": 1, "early_launch": True}),
        Cell("dependents at the end", {"rows": 8, "early_launch": False}),
        Cell("padding rows", {"rows": 8, "early_launch": True, "padding": 3}),
    )

    @staticmethod
    def raw_call(
        k: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        eps: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        index_block: Tensor,
        index_offset: Tensor,
        index_pool: Tensor,
        layer_slot: int,
        key_dtype: torch.dtype,
        early_launch: bool,
    ) -> None:
        torch.ops.trtllm.glm_indexer_k_tail(
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
            early_launch,
        )

    @staticmethod
    def reference(
        k: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        eps: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        index_block: Tensor,
        index_offset: Tensor,
        index_pool: Tensor,
        layer_slot: int,
        key_dtype: torch.dtype,
        early_launch: bool,
    ) -> None:
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

    @staticmethod
    def fake(
        k: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        eps: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        index_block: Tensor,
        index_offset: Tensor,
        index_pool: Tensor,
        layer_slot: int,
        key_dtype: torch.dtype,
        early_launch: bool,
    ) -> None:
        pass

    @staticmethod
    def is_valid(
        k: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        eps: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        index_block: Tensor,
        index_offset: Tensor,
        index_pool: Tensor,
        layer_slot: int,
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

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        inputs = make_key_inputs(cell, device, generator)
        return {**inputs, "early_launch": cell.spec["early_launch"]}

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        return key_bytes_moved(inputs)


indexer_k_tail = IndexerKTail()
