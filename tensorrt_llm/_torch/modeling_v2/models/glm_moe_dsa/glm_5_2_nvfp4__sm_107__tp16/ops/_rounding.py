"""Norms and rotations of attention inputs in fp32, and the comparison of e4m3 results."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import assert_bitwise


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) of each row, fp32 [..., 1]."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def rotations_at(cos_sin: Tensor, positions: Tensor) -> Tensor:
    """complex64 [tokens, 1, rope / 2], as `apply_rotary` takes them.

    Args:
        cos_sin: fp32 [positions, rope / 2, 2], (cos, sin) of each pair: `RotaryEmbedding.table` as
            it lies in memory.
        positions: int64 [tokens]; negative ones (padding) get any rotation.
    """
    return torch.view_as_complex(cos_sin)[positions.clamp(min=0)].unsqueeze(1)


def e4m3_codes(x: Tensor) -> Tensor:
    """int32 codes of e4m3 values in their order: neighbouring values have neighbouring codes."""
    code = x.contiguous().view(torch.uint8).int()
    return torch.where(code < 128, code, 128 - code)


def assert_e4m3_rounding(out: Tensor, ref: Tensor, share: float) -> None:
    """Equal codes, but for neighbours where an fp32 value lies at a rounding boundary.

    NaN must meet NaN bit for bit, so what a call leaves alone is compared exactly if it was NaN
    before (`poisoned`).

    Args:
        share: of the elements that may be a neighbour, which the caller derives; one more element
            is let through, as a share of few elements is none.

    Raises:
        AssertionError: an element further off, or too many neighbours.
    """
    nan = ref.float().isnan()
    assert_bitwise([out.view(torch.uint8)[nan]], [ref.view(torch.uint8)[nan]])
    distance = (e4m3_codes(out) - e4m3_codes(ref)).abs()[~nan]
    furthest = int(distance.max()) if distance.numel() else 0
    assert furthest <= 1, f"an element is {furthest} e4m3 steps off; rounding explains one"
    flips, allowed = int(distance.sum()), int(share * distance.numel()) + 1
    assert flips <= allowed, f"{flips} of {distance.numel()} elements differ, allowed {allowed}"


def assert_e4m3_sum(out: Sequence[Tensor], ref: Sequence[Tensor], terms: int) -> None:
    """The first tensor is e4m3, rounded from fp32 sums of `terms` products in any order; the rest
    is equal to the bit.

    Two such sums differ by up to terms * 2^-23 of their value (each by terms * 2^-24; that terms
    cancel is made up for by errors that do). Steps of e4m3 are at least 1/16 of a value, so a
    difference of d crosses a boundary for at most 16 * d of the elements.
    """
    assert_e4m3_rounding(out[0], ref[0], 16 * terms * 2.0**-23)
    assert_bitwise(out[1:], ref[1:])
