"""E4M3 quantisation with power-of-two (UE8M0) scales, as the FP8 index-key cache stores it."""

import torch

E4M3_MAX = 448.0
QUANT_BLOCK = 128  # channels that share one scale
MIN_AMAX = 1e-4  # keeps the scale of an all-zero block away from zero


def saturating_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`, rounded to nearest even; e4m3 at unit scale saturates at 448, NaN stays NaN."""
    if dtype == torch.float8_e4m3fn:  # not every torch saturates in the cast
        x = x.clamp(-E4M3_MAX, E4M3_MAX)
    return x.to(dtype)


def num_scales(channels: int) -> int:
    """Scales of one row of `channels`."""
    return -(-channels // QUANT_BLOCK)


def quantize_e4m3_ue8m0(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., channels] -> (e4m3 [..., channels], fp32 [..., num_scales]) with x ~ e4m3 * scale.

    The scale is the smallest power of two that brings the block's largest magnitude to at most 448.

    Raises:
        ValueError: more than one block with channels that are no multiple of 128.
    """
    channels = x.shape[-1]
    if channels > QUANT_BLOCK and channels % QUANT_BLOCK:
        raise ValueError(
            f"{channels} channels: above {QUANT_BLOCK} only multiples of it can be quantised"
        )
    blocks = x.float().unflatten(-1, (num_scales(channels), -1))
    scale = _round_up_to_power_of_two(blocks.abs().amax(-1).clamp(min=MIN_AMAX) / E4M3_MAX)
    quantised = (blocks / scale.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)
    return quantised, scale


def _round_up_to_power_of_two(x: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return torch.ldexp(torch.ones_like(x), exponent)
