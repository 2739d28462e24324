"""What floating point allows: independent roundings, and bounds to derive tolerances from."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# Largest relative error of rounding to nearest: half of one place in 24, 11, 8 bits.
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

E4M3_MAX = 448.0
E4M3_MIN_EXPONENT, E4M3_MANTISSA_BITS = -6, 3


def gamma(roundings: float, dtype: torch.dtype = torch.float32) -> float:
    """Relative bound of a result that went through this many roundings (Higham's gamma_n).

    A sum of n products in any order is within gamma(n) of the exact one, relative to the sum of
    magnitudes.
    """
    total = roundings * UNIT_ROUNDOFF[dtype]
    return total / (1 - total)


def to_numpy(x: torch.Tensor) -> Float64:
    """Exact values as float64; every dtype of the project fits."""
    return x.detach().to("cpu", torch.float64).numpy()


def round_to_bits(x: Float64, mantissa_bits: int, min_exponent: int = -126) -> Float64:
    """Nearest values with that many explicit mantissa bits, ties to even; subnormal below
    2^min_exponent."""
    _, exponent = np.frexp(x)  # |x| in [2^(exponent - 1), 2^exponent)
    step = np.exp2(np.maximum(exponent - 1, min_exponent) - mantissa_bits)
    return np.rint(x / step) * step


def nearest_bf16(x: Float64) -> Float64:
    return round_to_bits(x, 7)


def nearest_e4m3(x: Float64) -> Float64:
    """Nearest e4m3 value, ties to even, saturating at 448."""
    return np.clip(round_to_bits(x, E4M3_MANTISSA_BITS, E4M3_MIN_EXPONENT), -E4M3_MAX, E4M3_MAX)


def decode_e4m3(code: int) -> float:
    """Value of one e4m3 byte: sign, 4 exponent bits with bias 7, 3 mantissa bits; S.1111.111 is
    NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**E4M3_MIN_EXPONENT
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def smallest_scale(amax: float, floor: float = 1e-4) -> float:
    """The smallest power of two s with max(amax, floor) / s <= 448, found by counting."""
    exponent = -149
    while max(amax, floor) > E4M3_MAX * 2.0**exponent:
        exponent += 1
    return 2.0**exponent


def projection_bounds(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype
) -> tuple[Float64, Float64]:
    """Lowest and highest value that each element of x [rows, inputs] @ weight [outputs, inputs].T
    may have: a fp32 sum in any order, then rounded once to the dtype."""
    rows, matrix = to_numpy(x), to_numpy(weight)
    exact = rows @ matrix.T
    off = gamma(x.shape[1]) * (np.abs(rows) @ np.abs(matrix).T)
    if dtype == torch.bfloat16:
        return nearest_bf16(exact - off), nearest_bf16(exact + off)
    return exact - off, exact + off


def assert_between(out: torch.Tensor, bounds: tuple[Float64, Float64]) -> None:
    lowest, highest = bounds
    got = to_numpy(out)
    assert got.shape == lowest.shape
    assert ((lowest <= got) & (got <= highest)).all()


def swiglu(
    x: Float64, gate: Float64, up: Float64, down: Float64, dtype: torch.dtype
) -> tuple[Float64, Float64]:
    """down(silu(gate x) * up x) for rows x, and how far off an engine with activations in `dtype`
    may be: fp32 sums, each result rounded to the dtype, |silu'| <= 1.1, second-order terms in the
    1 %."""
    u, single = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[torch.float32]
    g, v = x @ gate.T, x @ up.T
    s = g / (1 + np.exp(-g))
    hidden = s * v
    out = hidden @ down.T
    off_g = gamma(x.shape[-1]) * (np.abs(x) @ np.abs(gate).T) + u * np.abs(g)
    off_v = gamma(x.shape[-1]) * (np.abs(x) @ np.abs(up).T) + u * np.abs(v)
    off_s = 1.1 * off_g + (u + 4 * single) * np.abs(s)
    off_hidden = off_s * np.abs(v) + np.abs(s) * off_v + u * np.abs(hidden)
    summed = gamma(hidden.shape[-1]) * np.abs(hidden) + off_hidden
    return out, 1.01 * (summed @ np.abs(down).T + u * np.abs(out))
