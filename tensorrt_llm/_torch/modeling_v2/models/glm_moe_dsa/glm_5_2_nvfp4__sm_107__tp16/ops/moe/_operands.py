"""Inputs of glm_routed_experts' cells, in both forms of its operands."""

import torch
from torch import Tensor

from tensorrt_llm._torch.custom_ops.fp4 import NVFP4_GROUP, quantize_nvfp4

from ...geometry import Geometry
from .._cells import Draw

# What the plain form leaves out, in the order of the schema.
NVFP4_OPERANDS = (
    "hidden_states_scale",
    "gemm1_weights_scale",
    "gemm2_weights_scale",
    "output1_scale_scalar",
    "output1_scale_gate_scalar",
    "output2_scale_scalar",
)
# Of code * block scale as `nvfp4_operands` draws them: sqrt(8.56 * 3.5).
CODE_RMS = 5.5


def plain_operands(draw: Draw, geometry: Geometry, x: Tensor) -> dict[str, Tensor | None]:
    """Weights as numbers, for input rows x [rows, hidden]."""
    experts, part, hidden = _sizes(geometry)
    return {
        "hidden_states": x,
        "gemm1_weights": draw.weight(experts, 2 * part, hidden, dtype=x.dtype),
        "gemm2_weights": draw.weight(experts, hidden, part, dtype=x.dtype),
        **dict.fromkeys(NVFP4_OPERANDS),
    }


def nvfp4_operands(draw: Draw, geometry: Geometry, x: Tensor) -> dict[str, Tensor | None]:
    """Random codes with block scales in [0.5, 4), and global scales that differ from expert to
    expert and keep the size of what is projected."""
    experts, part, hidden = _sizes(geometry)

    def codes(*shape: int) -> Tensor:
        return draw.integers(0, 256, *shape, dtype=torch.uint8)

    def block_scales(*shape: int) -> Tensor:
        return draw.integers(0x30, 0x48, *shape, dtype=torch.uint8).view(torch.float8_e4m3fn)

    def global_scales(inputs: int) -> Tensor:
        spread = draw.normal(experts, std=0.1, mean=1.0)
        return spread * CODE_RMS**-1 * inputs**-0.5

    input_scale, inner_scale = 2.0**-9, 2.0**-9  # 2688 of them are 5: a normal row's range
    gate = input_scale * global_scales(hidden)
    global_scale = torch.full((1,), 1 / input_scale, device=draw.device)
    packed, scale = quantize_nvfp4(x, global_scale)
    return {
        "hidden_states": packed,
        "hidden_states_scale": scale,
        "gemm1_weights": codes(experts, 2 * part, hidden // 2),
        "gemm1_weights_scale": block_scales(experts, 2 * part, hidden // NVFP4_GROUP),
        "gemm2_weights": codes(experts, hidden, part // 2),
        "gemm2_weights_scale": block_scales(experts, hidden, part // NVFP4_GROUP),
        "output1_scale_scalar": gate / inner_scale,
        "output1_scale_gate_scalar": gate,
        "output2_scale_scalar": inner_scale * global_scales(part),
    }


def _sizes(geometry: Geometry) -> tuple[int, int, int]:
    """(experts, this rank's columns of each, hidden)."""
    return geometry.n_routed_experts, geometry.moe_intermediate_size, geometry.hidden_size
