"""What stands between the indexer's projections and its scores, shared by three records.

Each step rounds to the activation dtype where the built-in indexer's chain of modules does: the
key's norm, the query's projection and both rotations. Quantisation follows from the rounded values.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorrt_llm._torch.attention.backends.sparse.dsa.cache_manager import DSACacheLayout
from tensorrt_llm._torch.attention.backends.sparse.dsa.indexer import KEY_NORM_EPS
from tensorrt_llm._torch.custom_ops.fp8 import QUANT_BLOCK, quantize_e4m3_ue8m0
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, assert_bitwise
from tensorrt_llm._torch.modules.rotary_embedding import apply_rotary

from .._cells import Draw, dtype_of, geometry_of
from .._checks import check_tensor, require
from .._inputs import cos_sin_table, poisoned
from .._paging import check_positions
from .._rounding import assert_e4m3_rounding, rotations_at

E4M3 = torch.float8_e4m3fn


def rotate_first(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """x [tokens, heads, dim] with its first channels, as many as `cos_sin` is for, rotated in fp32
    and rounded to x's dtype."""
    rope = 2 * cos_sin.shape[1]
    rotated = apply_rotary(x[..., :rope], rotations_at(cos_sin, positions))
    return torch.cat([rotated, x[..., rope:]], dim=-1)


def write_key_tail(
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
) -> None:
    """Norm, rotate, quantise and store; arguments as in `IndexerKTail`."""
    dim = k.shape[1]
    normed = F.layer_norm(k, (dim,), norm_weight, norm_bias, eps)
    keys = rotate_first(normed.unsqueeze(1), cos_sin, position_ids).squeeze(1)
    layout = DSACacheLayout(0, dim, key_dtype, fp8=key_dtype == E4M3)
    layout.write_index_pool(index_pool, layer_slot, keys, index_block, index_offset)


def query_tail(
    q: Tensor,
    weights: Tensor,
    weight_scale: float,
    cos_sin: Tensor,
    position_ids: Tensor,
    key_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(queries in `key_dtype`, fp32 head weights) of q [tokens, heads, dim], as in
    `IndexerPrologue`."""
    q = rotate_first(q, cos_sin, position_ids)
    w = weights.float() * weight_scale
    if key_dtype != E4M3:
        return q.to(key_dtype), w
    quantised, scale = quantize_e4m3_ue8m0(q)
    return quantised, w * scale.squeeze(-1)


def check_key_tail(
    k: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    cos_sin: Tensor,
    position_ids: Tensor,
    index_block: Tensor,
    index_offset: Tensor,
    index_pool: Tensor,
    layer_slot: int,
    key_dtype: torch.dtype,
) -> None:
    """Raises ValueError for arguments of a key tail that do not fit."""
    tokens, dim = k.shape
    check_tensor("k", k, (tokens, dim), torch.bfloat16, torch.float32, rows_apart=True)
    check_tensor("norm_weight", norm_weight, (dim,), k.dtype)
    check_tensor("norm_bias", norm_bias, (dim,), k.dtype)
    check_rotation(dim, cos_sin, position_ids, tokens)
    check_tensor("index_block", index_block, (tokens,), torch.int64)
    check_tensor("index_offset", index_offset, (tokens,), torch.int64)
    check_tensor("index_pool", index_pool, (None, None, None), torch.uint8)
    blocks, layers, page_bytes = index_pool.shape
    require(0 <= layer_slot < layers, f"layer_slot is {layer_slot}; index_pool has {layers} layers")
    check_key_dtype(key_dtype, k.dtype, dim)
    key_bytes = DSACacheLayout(0, dim, key_dtype, fp8=key_dtype == E4M3).index_key_bytes
    require(
        page_bytes % key_bytes == 0,
        f"pages of {page_bytes} bytes hold no whole number of keys of {key_bytes} bytes",
    )
    kept = index_block >= 0
    slots = list(zip(index_block[kept].tolist(), index_offset[kept].tolist(), strict=True))
    require(len(set(slots)) == len(slots), f"slots {slots} repeat; each token needs its own")
    outside = [s for s in slots if not (s[0] < blocks and 0 <= s[1] < page_bytes // key_bytes)]
    require(
        not outside,
        f"slots {outside} (block, offset) are outside of {blocks} blocks of "
        f"{page_bytes // key_bytes} tokens",
    )


def check_rotation(dim: int, cos_sin: Tensor, position_ids: Tensor, tokens: int) -> None:
    """Raises ValueError unless `cos_sin` rotates at most `dim` channels and has all positions."""
    check_tensor("cos_sin", cos_sin, (None, None, 2), torch.float32)
    rope = 2 * cos_sin.shape[1]
    require(rope <= dim, f"cos_sin rotates {rope} channels; there are {dim}")
    check_tensor("position_ids", position_ids, (tokens,), torch.int64)
    check_positions(position_ids, cos_sin.shape[0], "cos_sin")


def check_key_dtype(key_dtype: torch.dtype, activation: torch.dtype, dim: int) -> None:
    """Raises ValueError unless keys and queries of `dim` channels can be kept in `key_dtype`."""
    require(
        key_dtype in (E4M3, activation),
        f"key_dtype is {key_dtype}; it must be {E4M3} or the activations' {activation}",
    )
    require(
        key_dtype != E4M3 or dim <= QUANT_BLOCK,
        f"{dim} channels have more than one scale, which a head weight cannot take; at most "
        f"{QUANT_BLOCK} are served",
    )


def make_key_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """The arguments of `IndexerKTail` but its launch flag; k is a column range of the fused-A
    product."""
    g, dtype, draw = geometry_of(cell), dtype_of(cell), Draw(device, generator)
    rows, positions, layers, blocks = cell.spec["rows"], 256, 2, 4
    fused = draw.normal(rows, 64 + g.index_head_dim + g.index_n_heads, dtype=dtype)
    key_bytes = g.index_head_dim + 4
    block = torch.full((rows,), 2, device=device)
    position_ids = 100 + torch.arange(rows, device=device)
    block[rows - cell.spec.get("padding", 0) :] = -1
    position_ids[block < 0] = -1
    return {
        "k": fused[:, 64 : 64 + g.index_head_dim],
        "norm_weight": draw.norm_weight(g.index_head_dim, dtype),
        "norm_bias": draw.normal(g.index_head_dim, dtype=dtype, std=0.1),
        "eps": KEY_NORM_EPS,
        "cos_sin": cos_sin_table(positions, g.qk_rope_head_dim, device),
        "position_ids": position_ids,
        "index_block": block,
        "index_offset": 36 + torch.arange(rows, device=device),
        "index_pool": poisoned(
            (blocks, layers, g.tokens_per_block * key_bytes), torch.uint8, device
        ),
        "layer_slot": 1,
        "key_dtype": E4M3,
    }


def key_bytes_moved(inputs: dict[str, Any]) -> int:
    k, tokens = inputs["k"], inputs["k"].shape[0]
    per_token = k[0].nbytes + inputs["cos_sin"][0].nbytes + 3 * 8 + k.shape[1] + 4
    return inputs["norm_weight"].nbytes + inputs["norm_bias"].nbytes + tokens * per_token


def assert_same_queries(out: Sequence[Tensor], ref: Sequence[Tensor], share: float) -> None:
    """Queries [tokens, heads, dim] in e4m3 and head weights: equal but for `share` of the elements,
    which are neighbours.

    A value that rounds to the other side may be the largest of its head and lie at a power of two;
    then the head's scale doubles or halves, and with it its weight. Such heads, `share` of all at
    most and one more, are compared after that, to a step of the coarser of both.
    """
    (q, w), (ref_q, ref_w) = out, ref
    rescaled = w != ref_w
    assert_e4m3_rounding(q[~rescaled], ref_q[~rescaled], share)
    assert int(rescaled.sum()) <= share * rescaled.numel() + 1, "the head weights differ"
    ratio = (w / ref_w)[rescaled].unsqueeze(-1)
    assert bool(((ratio == 0.5) | (ratio == 2)).all()), "head weights differ by more than a scale"
    error = (q[rescaled].float() * ratio - ref_q[rescaled].float()).abs()
    step = torch.clamp(ref_q[rescaled].float().abs() * 2.0**-3, min=2.0**-9)
    assert bool((error <= 2 * step).all()), "queries of a rescaled head differ"
    assert_bitwise([w[~rescaled]], [ref_w[~rescaled]])
