"""The indexer's tails, one number at a time in float64 with the roundings that are in their
contracts."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from helpers.numerics import nearest_e4m3, smallest_scale
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)

SMALL = Geometry(q_lora_rank=64, index_n_heads=3, index_head_dim=12, qk_rope_head_dim=4)
E4M3 = torch.float8_e4m3fn
PAGE = 64


def small(cell: Cell, **spec: Any) -> Cell:
    return Cell(cell.why, {**cell.spec, "geometry": SMALL, **spec})


def rounded(values: Sequence[float], dtype: torch.dtype) -> list[float]:
    return torch.tensor(values, dtype=torch.float64).to(dtype).tolist()


def rotated(x: list[float], cos_sin: Tensor, position: int, dtype: torch.dtype) -> list[float]:
    out = list(x)
    for j, (cos, sin) in enumerate(cos_sin[max(position, 0)].tolist()):
        a, b = x[2 * j], x[2 * j + 1]
        out[2 * j], out[2 * j + 1] = a * cos - b * sin, a * sin + b * cos
    return rounded(out, dtype)


def quantised(x: list[float]) -> tuple[list[float], float]:
    scale = float(smallest_scale(max(abs(v) for v in x)))
    return [float(nearest_e4m3(v / scale)) for v in x], scale


def expected_key(inputs: dict[str, Any], t: int) -> list[float]:
    x, dtype = inputs["k"][t].double().tolist(), inputs["k"].dtype
    mean = sum(x) / len(x)
    norm = math.sqrt(sum((v - mean) ** 2 for v in x) / len(x) + inputs["eps"])
    weight, bias = inputs["norm_weight"].tolist(), inputs["norm_bias"].tolist()
    normed = [(v - mean) / norm * w + b for v, w, b in zip(x, weight, bias, strict=True)]
    position = int(inputs["position_ids"][t])
    return rotated(rounded(normed, dtype), inputs["cos_sin"], position, dtype)


def expected_query(inputs: dict[str, Any], q: Tensor, t: int, h: int) -> tuple[list[float], float]:
    """Query values in e4m3 and the head's fp32 weight."""
    position, dtype = int(inputs["position_ids"][t]), inputs["weights"].dtype
    values, scale = quantised(rotated(q[t, h].tolist(), inputs["cos_sin"], position, dtype))
    factor = rounded([inputs["weight_scale"]], torch.float32)[0]
    weight = rounded([float(inputs["weights"][t, h]) * factor], torch.float32)[0]
    return values, weight * scale


def stored_key(pool: Tensor, inputs: dict[str, Any], t: int) -> tuple[list[float], float]:
    """Data and scale of a page: all tokens' data first, then all tokens' scales."""
    dim, offset = inputs["k"].shape[1], int(inputs["index_offset"][t])
    page = pool[int(inputs["index_block"][t]), inputs["layer_slot"]]
    data = page[offset * dim : (offset + 1) * dim].view(E4M3)
    scale = page[PAGE * dim + 4 * offset : PAGE * dim + 4 * offset + 4].clone().view(torch.float32)
    return data.float().tolist(), float(scale)
