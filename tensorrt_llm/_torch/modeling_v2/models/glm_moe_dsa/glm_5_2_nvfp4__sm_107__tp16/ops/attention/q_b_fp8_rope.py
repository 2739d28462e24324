"""Attention queries from the raw query latent: absorbed projection, rotation, cache's dtype."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.custom_ops.fp8 import saturating_cast
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op
from tensorrt_llm._torch.modules.rotary_embedding import apply_rotary

from ...geometry import GLM_5_2_TP16
from .._cells import Draw, dtype_of, geometry_of
from .._checks import check_tensor, require
from .._inputs import cos_sin_table
from .._numerics import project
from .._paging import check_positions
from .._rounding import assert_e4m3_sum, rms_scale, rotations_at


class Plan(IntEnum):
    """How the kernel is launched; the order of its sum is part of that.

    REGULAR: clusters of 8 slices of the contraction. BESIDE_TOPK: the same slices, 18 CTAs, since
    it runs beside the histogram top-k. EARLY_GATHER: 4 slices, since the flash decode that follows
    already gathers rows on the other processors.
    """

    REGULAR = 0
    BESIDE_TOPK = 1
    EARLY_GATHER = 2


@define_op
class QBFp8Rope(OpWrapper):
    """q_b_proj with the key half of kv_b_proj absorbed and the norm of its input folded in, then
    the rotation and one rounding to the cache's dtype.

    For each row t and head h, with f = 1 / sqrt(mean(q_a[t]^2) + eps):

        y = (q_a[t] . weight[h]) * f                       [latent + rope], fp32
        q[t, h, :latent] = y[:latent]
        q[t, h, latent:] = the rotation of y[latent:] by cos_sin[position_ids[t]], pairs (2j, 2j+1)

    where weight[h] holds W_UK,h^T W_qb_nope,h diag(g) (latent rows), then W_qb_rope,h diag(g) (rope
    rows), g being q_a_layernorm's weight. The sum of squares is of q_a as it comes, in fp32; f
    multiplies the fp32 sums. Nothing is rounded in between: sums, rotation and f are fp32, and the
    result is rounded once to `dtype` (e4m3: unit scale, to nearest even, saturating at 448, NaN
    stays NaN). The softmax scale is not in it.

    The contraction is cut into the plan's slices; the fp32 sums of the slices are added in rising
    order, so reruns of a plan are equal to the bit, and plans may differ by an fp32 rounding.

    Under programmatic dependent launch the kernel loads its weight and the rotations' table before
    its wait, q_a and position_ids after it, and lets its dependents start right after the wait.

    Args:
        q_a: bf16 [tokens, q_lora_rank], columns of the fused-A product; rows may lie apart. Also
            fp32.
        weight: q_a's dtype [heads, latent + rope, q_lora_rank], contiguous.
        eps: of the norm.
        cos_sin: fp32 [positions, rope / 2, 2].
        position_ids: int64 [tokens]; a negative one is padding, whose row is any rotation's.
        dtype: of the result: e4m3; q_a's where the cache is not FP8.
        plan: a `Plan`.

    Returns:
        [tokens, heads, latent + rope] in `dtype`, contiguous.

    Source: weight absorption of multi-head latent attention (arXiv 2405.04434, section 2.1.2).
    """

    schema = (
        "glm_q_b_fp8_rope(Tensor q_a, Tensor weight, float eps, Tensor cos_sin, "
        "Tensor position_ids, ScalarType dtype, int plan) -> Tensor"
    )
    CELLS = (
        Cell("verify rows", {"rows": 8, "plan": Plan.REGULAR}),
        Cell("verify rows beside the top-k", {"rows": 8, "plan": Plan.BESIDE_TOPK}),
        Cell("verify rows with early gather", {"rows": 8, "plan": Plan.EARLY_GATHER}),
        Cell("draft row", {"rows": 1, "plan": Plan.EARLY_GATHER}),
        Cell("fewer verify rows than a tile", {"rows": 4, "plan": Plan.REGULAR}),
    )

    @staticmethod
    def raw_call(
        q_a: Tensor,
        weight: Tensor,
        eps: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        dtype: torch.dtype,
        plan: int,
    ) -> Tensor:
        return torch.ops.trtllm.glm_q_b_fp8_rope(
            q_a, weight, eps, cos_sin, position_ids, dtype, plan
        )

    @staticmethod
    def reference(
        q_a: Tensor,
        weight: Tensor,
        eps: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        dtype: torch.dtype,
        plan: int,
    ) -> Tensor:
        heads, width, _ = weight.shape
        y = project(q_a, weight.flatten(0, 1), torch.float32) * rms_scale(q_a, eps)
        rope_dim = 2 * cos_sin.shape[1]
        latent, rope = y.view(-1, heads, width).split([width - rope_dim, rope_dim], dim=-1)
        rotated = apply_rotary(rope.contiguous(), rotations_at(cos_sin, position_ids))
        return saturating_cast(torch.cat([latent, rotated], dim=-1), dtype)

    @staticmethod
    def fake(
        q_a: Tensor,
        weight: Tensor,
        eps: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        dtype: torch.dtype,
        plan: int,
    ) -> Tensor:
        return q_a.new_empty(q_a.shape[0], *weight.shape[:2], dtype=dtype)

    @staticmethod
    def is_valid(
        q_a: Tensor,
        weight: Tensor,
        eps: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        dtype: torch.dtype,
        plan: int,
    ) -> None:
        tokens, rank = q_a.shape
        check_tensor("q_a", q_a, (tokens, rank), torch.bfloat16, torch.float32, rows_apart=True)
        check_tensor("weight", weight, (None, None, rank), q_a.dtype)
        check_tensor("cos_sin", cos_sin, (None, None, 2), torch.float32)
        rope, width = 2 * cos_sin.shape[1], weight.shape[1]
        require(
            0 < rope < width, f"cos_sin rotates {rope} channels; weight has {width} rows per head"
        )
        check_tensor("position_ids", position_ids, (tokens,), torch.int64)
        check_positions(position_ids, cos_sin.shape[0], "cos_sin")
        require(
            dtype in (torch.float8_e4m3fn, q_a.dtype),
            f"dtype is {dtype}; it must be torch.float8_e4m3fn or q_a's {q_a.dtype}",
        )
        require(plan in list(Plan), f"plan is {plan}; it must be one of {[*map(int, Plan)]}")

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        g, dtype, draw = geometry_of(cell), dtype_of(cell), Draw(device, generator)
        rows, positions = cell.spec["rows"], 256
        fused = draw.normal(rows, g.q_lora_rank + g.latent_width, dtype=dtype)
        return {
            "q_a": fused[:, : g.q_lora_rank],
            "weight": draw.weight(g.heads, g.latent_width, g.q_lora_rank, dtype=dtype),
            "eps": g.rms_norm_eps,
            "cos_sin": cos_sin_table(positions, g.qk_rope_head_dim, device),
            "position_ids": 100 + torch.arange(rows, device=device),
            "dtype": torch.float8_e4m3fn,
            "plan": int(cell.spec["plan"]),
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        q_a, weight, dtype = inputs["q_a"], inputs["weight"], inputs["dtype"]
        tokens, rank = q_a.shape
        out = tokens * weight.shape[0] * weight.shape[1] * dtype.itemsize
        return (
            weight.nbytes + tokens * (rank * q_a.element_size() + inputs["cos_sin"][0].nbytes) + out
        )

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """See `assert_e4m3_sum`: sums of `q_lora_rank` products in another order."""
        assert_e4m3_sum(out, ref, GLM_5_2_TP16.q_lora_rank)


q_b_fp8_rope = QBFp8Rope()
