"""Index queries and head weights straight from the raw query latent."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from ...geometry import GLM_5_2_TP16
from .._cells import Draw, dtype_of, geometry_of
from .._checks import check_tensor
from .._inputs import cos_sin_table
from .._numerics import project
from .._rounding import rms_scale
from ._tail import E4M3, assert_same_queries, check_key_dtype, check_rotation, query_tail


@define_op
class IndexerQTail(OpWrapper):
    """The indexer's wq_b with the norm of its input folded in, and the prologue's query half in its
    epilogue.

    For each row t and head h, with f = 1 / sqrt(mean(q_a[t]^2) + eps) in fp32:

        q = a((q_a[t] . weight[h]) * f)       a: rounded to the activation dtype, as wq_b's result

    where weight = wq_b diag(g), g being q_a_layernorm's weight; sums are fp32. What becomes of q
    and weights[t, h] is said in `glm_indexer_prologue`: rotation, a(...), UE8M0 scale, e4m3, and
    head weights with weight_scale and the scale folded in.

    The contraction is cut into 8 slices whose fp32 sums are added in rising order; reruns are equal
    to the bit. Under programmatic dependent launch the weight is loaded before the wait and
    everything else after it.

    Args:
        q_a: bf16 [tokens, q_lora_rank], columns of the fused-A product; rows may lie apart. Also
            fp32.
        weight: q_a's dtype [heads, dim, q_lora_rank], contiguous.
        eps: of the norm.
        weights: q_a's dtype [tokens, heads], weights_proj's columns of the fused-A product; rows
            may lie apart.
        weight_scale: dim^-0.5 * heads^-0.5.
        cos_sin: fp32 [positions, rope / 2, 2], for the first channels.
        position_ids: int64 [tokens]; a negative one is padding, whose row is any rotation's.
        key_dtype: e4m3; q_a's dtype where the cache is not FP8. e4m3 serves up to 128 channels.

    Returns:
        (out_q `key_dtype` [tokens, heads, dim], out_w fp32 [tokens, heads]), contiguous.

    Source: DeepSeek-V3.2's lightning indexer (arXiv 2512.02556).
    """

    schema = (
        "glm_indexer_q_tail(Tensor q_a, Tensor weight, float eps, Tensor weights, "
        "float weight_scale, Tensor cos_sin, Tensor position_ids, ScalarType key_dtype) "
        "-> (Tensor, Tensor)"
    )
    CELLS = (
        Cell("verify rows", {"rows": 8}),
        Cell("one row", {"rows": 1}),
        Cell("fewer verify rows than a tile", {"rows": 4}),
    )

    @staticmethod
    def raw_call(
        q_a: Tensor,
        weight: Tensor,
        eps: float,
        weights: Tensor,
        weight_scale: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        key_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.trtllm.glm_indexer_q_tail(
            q_a, weight, eps, weights, weight_scale, cos_sin, position_ids, key_dtype
        )

    @staticmethod
    def reference(
        q_a: Tensor,
        weight: Tensor,
        eps: float,
        weights: Tensor,
        weight_scale: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        key_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        sums = project(q_a, weight.flatten(0, 1), torch.float32)
        q = (sums * rms_scale(q_a, eps)).to(q_a.dtype).view(-1, *weight.shape[:2])
        return query_tail(q, weights, weight_scale, cos_sin, position_ids, key_dtype)

    @staticmethod
    def fake(
        q_a: Tensor,
        weight: Tensor,
        eps: float,
        weights: Tensor,
        weight_scale: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        key_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        tokens, (heads, dim, _) = q_a.shape[0], weight.shape
        out_w = q_a.new_empty(tokens, heads, dtype=torch.float32)
        return q_a.new_empty(tokens, heads, dim, dtype=key_dtype), out_w

    @staticmethod
    def is_valid(
        q_a: Tensor,
        weight: Tensor,
        eps: float,
        weights: Tensor,
        weight_scale: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        key_dtype: torch.dtype,
    ) -> None:
        tokens, rank = q_a.shape
        check_tensor("q_a", q_a, (tokens, rank), torch.bfloat16, torch.float32, rows_apart=True)
        check_tensor("weight", weight, (None, None, rank), q_a.dtype)
        heads, dim, _ = weight.shape
        check_tensor("weights", weights, (tokens, heads), q_a.dtype, rows_apart=True)
        check_rotation(dim, cos_sin, position_ids, tokens)
        check_key_dtype(key_dtype, q_a.dtype, dim)

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        g, dtype, draw = geometry_of(cell), dtype_of(cell), Draw(device, generator)
        rows, heads, dim = cell.spec["rows"], g.index_n_heads, g.index_head_dim
        fused = draw.normal(rows, g.q_lora_rank + heads, dtype=dtype)
        return {
            "q_a": fused[:, : g.q_lora_rank],
            "weight": draw.weight(heads, dim, g.q_lora_rank, dtype=dtype),
            "eps": g.rms_norm_eps,
            "weights": fused[:, g.q_lora_rank :],
            "weight_scale": (dim * heads) ** -0.5,
            "cos_sin": cos_sin_table(256, g.qk_rope_head_dim, device),
            "position_ids": 100 + torch.arange(rows, device=device),
            "key_dtype": E4M3,
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        q_a, weight, weights = inputs["q_a"], inputs["weight"], inputs["weights"]
        heads, dim, _ = weight.shape
        per_token = q_a[0].nbytes + weights[0].nbytes + inputs["cos_sin"][0].nbytes + 8
        out = heads * (dim * inputs["key_dtype"].itemsize + 4)
        return weight.nbytes + q_a.shape[0] * (per_token + out)

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """Queries as in `assert_e4m3_sum`, sums of `q_lora_rank` products in another order.

        Rounding to bf16 on the way makes fewer elements differ, by more: as many differ in e4m3.
        """
        assert_same_queries(out, ref, 16 * GLM_5_2_TP16.q_lora_rank * 2.0**-23)


indexer_q_tail = IndexerQTail()
