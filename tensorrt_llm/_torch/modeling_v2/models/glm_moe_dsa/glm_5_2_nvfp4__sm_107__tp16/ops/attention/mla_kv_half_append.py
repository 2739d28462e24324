"""The key-value half of MLA: latent norm, key rotation, and the append to the paged cache."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.custom_ops.cache_ops import scatter_rows
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, assert_bitwise, define_op
from tensorrt_llm._torch.modules.rotary_embedding import apply_rotary

from .._cells import Draw, dtype_of, geometry_of
from .._checks import check_tensor, require
from .._inputs import cos_sin_table, poisoned, random_block_table
from .._paging import check_paging, check_positions, pool_rows, rows_per_request
from .._rounding import assert_e4m3_rounding, rms_scale, rotations_at


@define_op
class MlaKvHalfAppend(OpWrapper):
    """Norm the latent, rotate the rotary key, append both to the cache; write the softmax scales.

    For each token row t, all in fp32 and rounded once, straight to the cache's dtype (e4m3: unit
    scale, to nearest even, saturating at 448, NaN stays NaN):

        c = kv_a[t, :latent]     c' = c * (1 / sqrt(mean(c^2) + eps)) * norm_weight
        r = kv_a[t, latent:]     r'[2j]   = r[2j] cos_j - r[2j+1] sin_j
                                 r'[2j+1] = r[2j] sin_j + r[2j+1] cos_j

    with (cos_j, sin_j) = cos_sin[position_ids[t], j]. The row [c' | r'] goes to row
    `convert_req_index_to_global` of the position, in the request t // (tokens / requests). A row
    whose position is negative, or that has no block, is padding and written nowhere. All other
    rows of the pool stay as they are. Running a step again writes the same bytes.

    One block also writes bmm1_scale = [s, s * log2(e)] with s = softmax_scale and bmm2_scale = [1],
    the scales of `glm_sparse_mla_flash_decode` (the cache is at unit scale), also if every row is
    padding.

    Under programmatic dependent launch the kernel reads norm_weight, cos_sin and the block table
    before its wait and kv_a and position_ids after it. Dependents launch at its entry with
    `trigger_at_entry`, else once its rows are written; they read its outputs only after their own
    wait. The results do not depend on it.

    Args:
        kv_a: bf16 [tokens, latent + rope], columns of the fused-A product before norm and rotation;
            rows may lie apart (2624 or 2784 columns). Also fp32.
        norm_weight: kv_a's dtype [latent].
        eps: of the norm.
        cos_sin: fp32 [positions, rope / 2, 2].
        position_ids: int64 [tokens], absolute positions; negative is padding.
        block_table: int32 [requests, pages], contiguous; negative: no block. tokens is a multiple
            of requests.
        block_size, stride_factor, layer_id: as in `convert_req_index_to_global`.
        softmax_scale: (nope + rope)^-0.5.
        kv_pool: e4m3 [pool rows, latent + rope], contiguous, written. Also bf16 or fp32.
        bmm1_scale: fp32 [2], written. bmm2_scale: fp32 [1], written.
        trigger_at_entry: see above.

    Source: multi-head latent attention as in DeepSeek-V2 (arXiv 2405.04434, section 2.1).
    """

    schema = (
        "glm_mla_kv_half_append(Tensor kv_a, Tensor norm_weight, float eps, Tensor cos_sin, "
        "Tensor position_ids, Tensor block_table, int block_size, int stride_factor, "
        "int layer_id, float softmax_scale, Tensor(a!) kv_pool, Tensor(b!) bmm1_scale, "
        "Tensor(c!) bmm2_scale, bool trigger_at_entry) -> ()"
    )
    CELLS = (
        Cell(
            "verify rows beside an indexer: rows of 2784 columns",
            {"rows": 8, "requests": 1, "columns": 2784, "trigger_at_entry": False},
        ),
        Cell(
            "verify rows of a layer that shares a selection: 2624 columns, dependents at entry",
            {"rows": 8, "requests": 1, "columns": 2624, "trigger_at_entry": True},
        ),
        Cell(
            "one row",
            {"rows": 1, "requests": 1, "columns": 2784, "trigger_at_entry": False},
        ),
        Cell(
            "two sequences",
            {"rows": 8, "requests": 2, "columns": 2784, "trigger_at_entry": False},
        ),
        Cell(
            "padding rows",
            {"rows": 8, "requests": 1, "columns": 2784, "trigger_at_entry": False, "padding": 3},
        ),
    )

    @staticmethod
    def raw_call(
        kv_a: Tensor,
        norm_weight: Tensor,
        eps: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        block_table: Tensor,
        block_size: int,
        stride_factor: int,
        layer_id: int,
        softmax_scale: float,
        kv_pool: Tensor,
        bmm1_scale: Tensor,
        bmm2_scale: Tensor,
        trigger_at_entry: bool,
    ) -> None:
        torch.ops.trtllm.glm_mla_kv_half_append(
            kv_a,
            norm_weight,
            eps,
            cos_sin,
            position_ids,
            block_table,
            block_size,
            stride_factor,
            layer_id,
            softmax_scale,
            kv_pool,
            bmm1_scale,
            bmm2_scale,
            trigger_at_entry,
        )

    @staticmethod
    def reference(
        kv_a: Tensor,
        norm_weight: Tensor,
        eps: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        block_table: Tensor,
        block_size: int,
        stride_factor: int,
        layer_id: int,
        softmax_scale: float,
        kv_pool: Tensor,
        bmm1_scale: Tensor,
        bmm2_scale: Tensor,
        trigger_at_entry: bool,
    ) -> None:
        latent = norm_weight.shape[0]
        c, r = kv_a[:, :latent].float(), kv_a[:, latent:].float()
        normed = c * rms_scale(c, eps) * norm_weight.float()
        rotated = apply_rotary(r.contiguous().unsqueeze(1), rotations_at(cos_sin, position_ids))
        per_request = kv_a.shape[0] // block_table.shape[0]
        req_id = torch.arange(kv_a.shape[0], device=kv_a.device) // per_request
        rows = pool_rows(
            req_id, block_table, position_ids.unsqueeze(1), block_size, stride_factor, layer_id
        )
        scatter_rows(kv_pool, rows.squeeze(1), torch.cat([normed, rotated.squeeze(1)], dim=-1))
        bmm1_scale[0], bmm1_scale[1] = softmax_scale, softmax_scale * math.log2(math.e)
        bmm2_scale.fill_(1.0)

    @staticmethod
    def fake(
        kv_a: Tensor,
        norm_weight: Tensor,
        eps: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        block_table: Tensor,
        block_size: int,
        stride_factor: int,
        layer_id: int,
        softmax_scale: float,
        kv_pool: Tensor,
        bmm1_scale: Tensor,
        bmm2_scale: Tensor,
        trigger_at_entry: bool,
    ) -> None:
        pass

    @staticmethod
    def is_valid(
        kv_a: Tensor,
        norm_weight: Tensor,
        eps: float,
        cos_sin: Tensor,
        position_ids: Tensor,
        block_table: Tensor,
        block_size: int,
        stride_factor: int,
        layer_id: int,
        softmax_scale: float,
        kv_pool: Tensor,
        bmm1_scale: Tensor,
        bmm2_scale: Tensor,
        trigger_at_entry: bool,
    ) -> None:
        (tokens, width), latent = kv_a.shape, norm_weight.shape[0]
        rope = width - latent
        require(
            rope >= 2 and rope % 2 == 0,
            f"kv_a has {width} columns, {rope} more than norm_weight; it must be 2, 4, ... more",
        )
        activations = (torch.bfloat16, torch.float32)
        check_tensor("kv_a", kv_a, (tokens, width), *activations, rows_apart=True)
        check_tensor("norm_weight", norm_weight, (latent,), kv_a.dtype)
        check_tensor("cos_sin", cos_sin, (None, rope // 2, 2), torch.float32)
        check_tensor("position_ids", position_ids, (tokens,), torch.int64)
        check_tensor("block_table", block_table, (None, None), torch.int32)
        check_tensor("kv_pool", kv_pool, (None, width), torch.float8_e4m3fn, kv_a.dtype)
        check_tensor("bmm1_scale", bmm1_scale, (2,), torch.float32)
        check_tensor("bmm2_scale", bmm2_scale, (1,), torch.float32)
        check_positions(position_ids, cos_sin.shape[0], "cos_sin")
        check_positions(position_ids, block_table.shape[1] * block_size, "block_table")
        check_paging(block_size, stride_factor, layer_id)
        req_id = torch.arange(tokens, device=kv_a.device) // rows_per_request(tokens, block_table)
        rows = pool_rows(
            req_id, block_table, position_ids.unsqueeze(1), block_size, stride_factor, layer_id
        )
        written = rows[rows >= 0].tolist()
        require(
            len(set(written)) == len(written),
            f"pool rows {written} repeat; each token needs its own",
        )
        last = max(written, default=-1)
        require(
            last < kv_pool.shape[0],
            f"kv_pool has {kv_pool.shape[0]} rows; row {last} is to be written",
        )

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        rows, requests, columns = (cell.spec[name] for name in ("rows", "requests", "columns"))
        g, dtype, draw = geometry_of(cell), dtype_of(cell), Draw(device, generator)
        layers, pages = 2, 4
        fused = draw.normal(rows, columns, dtype=dtype)
        first = 100 + g.tokens_per_block * torch.arange(requests, device=device).unsqueeze(1)
        positions = (first + torch.arange(rows // requests, device=device)).flatten()
        if "padding" in cell.spec:
            positions[rows - cell.spec["padding"] :] = -1
        pool_shape = (requests * pages * layers * g.tokens_per_block, g.latent_width)
        return {
            "kv_a": fused[:, g.q_lora_rank : g.q_lora_rank + g.latent_width],
            "norm_weight": draw.norm_weight(g.kv_lora_rank, dtype),
            "eps": g.rms_norm_eps,
            "cos_sin": cos_sin_table(pages * g.tokens_per_block, g.qk_rope_head_dim, device),
            "position_ids": positions,
            "block_table": random_block_table(requests, pages, device, generator),
            "block_size": g.tokens_per_block,
            "stride_factor": layers * g.tokens_per_block,
            "layer_id": 1,
            "softmax_scale": g.softmax_scale,
            "kv_pool": poisoned(pool_shape, torch.float8_e4m3fn, device),
            "bmm1_scale": poisoned((2,), torch.float32, device),
            "bmm2_scale": poisoned((1,), torch.float32, device),
            "trigger_at_entry": cell.spec["trigger_at_entry"],
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        kv_a, cos_sin, pool = inputs["kv_a"], inputs["cos_sin"], inputs["kv_pool"]
        rows = int((inputs["position_ids"] >= 0).sum())
        per_row = kv_a[0].nbytes + cos_sin[0].nbytes + pool[0].nbytes
        return rows * per_row + inputs["norm_weight"].nbytes + inputs["position_ids"].nbytes + 12

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """Rows within one e4m3 step; what was NaN before and is not written, and the scales, to the
        bit.

        The fp32 values differ by the order of the sum of 512 squares, the reciprocal root and a
        fused multiply-add: together below 2^-20 of the value, as the errors of a sum of positive
        terms do not exceed 512 * 2^-24 = 2^-15 and halve in the root, at most 2^-16. e4m3 steps are
        at least 1/16 of a value, so at most 16 * 2^-16 of the elements cross a boundary.
        """
        assert_e4m3_rounding(out[0], ref[0], 16 * 2.0**-16)
        assert_bitwise(out[1:], ref[1:])


mla_kv_half_append = MlaKvHalfAppend()
