"""NVFP4: e2m1 codes, an e4m3 scale for 16 of them along a row, one fp32 global scale.

A value is code * scale * global; two codes lie in a byte, element 2j in the low nibble.
"""

import torch

from tensorrt_llm._torch.custom_ops.fp8 import E4M3_MAX

NVFP4_GROUP = 16
E2M1_MAX = 6.0
# One e2m1 code: sign bit, two exponent bits, one mantissa bit.
E2M1_VALUES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
SIGN_BIT = 8


def quantize_nvfp4(
    x: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x ~ e2m1 * scale / global_scale. Each operation is one fp32 operation, rounded to nearest.

        scale = e4m3(global_scale * (max|x of 16| / 6))     saturating at 448
        code = e2m1(x * (global_scale / scale))             saturating at 6; a scale of 0 gives 0

    Both conversions go to nearest, ties to even. Codes keep the sign of zeros. A group that holds a
    NaN has the scale NaN, so all its values are NaN, whatever their codes.

    Args:
        x: floating [..., columns], columns a multiple of 16.
        global_scale: fp32, one element; 448 * 6 / max|x| uses the whole range. It is the reciprocal
            of a checkpoint's `input_scale`.

    Returns:
        (uint8 [..., columns / 2], e4m3 [..., columns / 16]).

    Raises:
        ValueError: columns that are no multiple of 16.
    """
    if x.shape[-1] % NVFP4_GROUP:
        raise ValueError(f"{x.shape[-1]} columns; NVFP4 needs a multiple of {NVFP4_GROUP}")
    groups = x.float().unflatten(-1, (-1, NVFP4_GROUP))
    largest = groups.abs().amax(-1)
    scale = (global_scale * (largest / E2M1_MAX)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    inverse = (global_scale / scale.float()).masked_fill(scale.float() == 0, 0.0)
    codes = _e2m1(groups * inverse.unsqueeze(-1)).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale


def dequantize_nvfp4(
    packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor
) -> torch.Tensor:
    """fp32 [..., columns] from uint8 [..., columns / 2], e4m3 [..., columns / 16], fp32 scalar.

    code * scale is exact in fp32 (6 significant bits), so the only rounding is by the global scale.
    """
    values = torch.tensor(E2M1_VALUES, device=packed.device)
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    grouped = values[codes.int()].unflatten(-1, (-1, NVFP4_GROUP))
    return (grouped * scale.float().unsqueeze(-1)).flatten(-2) * global_scale


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    """uint8 codes of the nearest values. Magnitudes halfway go to the even code, so they pass the
    borders below odd codes only from above."""
    size = x.abs()
    code = torch.signbit(x).to(torch.uint8) * SIGN_BIT
    for i in range(SIGN_BIT - 1):
        border = (E2M1_VALUES[i] + E2M1_VALUES[i + 1]) / 2
        code += size > border if i % 2 == 0 else size >= border
    return code
