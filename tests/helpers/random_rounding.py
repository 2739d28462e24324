"""What a chain of roundings makes of a result: float64 formulas with random errors in their places.

A rounding to nearest is off by at most half the spacing of its format there, and over many values
it is off by anything in between, independently of the others. So each one is replaced by a uniform
error of that size, and the formula is run many times at once (Monte Carlo arithmetic; D. S. Parker,
1997). The spread of the results is what these roundings do to them, with all amplification and
cancellation on the way, where worst cases that add up would allow anything after three products.
"""

import numpy as np

from helpers.numerics import E4M3_MANTISSA_BITS, E4M3_MIN_EXPONENT, Float64

BF16_MANTISSA_BITS, BF16_MIN_EXPONENT = 7, -126
E2M1_MAX, NVFP4_GROUP = 6.0, 16
# Of a normal distribution 2e-9 lies beyond six deviations: among the 1e5 results that a test
# compares none. A deviation estimated from n runs is itself off by 1 / sqrt(2 n); three of that.
DEVIATIONS, RUNS = 6.0, 128
BAND = DEVIATIONS * (1 + 3 / (2 * RUNS) ** 0.5)


class RandomRounding:
    """Values are arrays [1 or 1 + RUNS, ...] over the runs: the first is exact, the others have met
    the errors so far."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)

    def bf16(self, x: Float64) -> Float64:
        """Rounded to bf16."""
        return self._moved(x, half_spacing(x, BF16_MANTISSA_BITS, BF16_MIN_EXPONENT))

    def e4m3(self, x: Float64, scale: Float64 | float = 1.0) -> Float64:
        """Rounded to e4m3 times a power of two."""
        half = half_spacing(x / scale, E4M3_MANTISSA_BITS, E4M3_MIN_EXPONENT)
        return self._moved(x, half * scale)

    def nvfp4(self, x: Float64) -> Float64:
        """Rounded to e2m1 with an e4m3 scale per 16 channels, which brings their largest to 6, give
        or take the scale's own rounding; its global scale is one that fits."""
        groups = x.reshape(*x.shape[:-1], -1, NVFP4_GROUP)
        largest = np.abs(groups).max(-1, keepdims=True)
        unit = largest / E2M1_MAX * (1 + 2.0 ** -(E4M3_MANTISSA_BITS + 1)) + 1e-300
        size = np.abs(groups) / unit  # e2m1: steps of 0.5 to 2, of 1 to 4, of 2 to 6
        half = np.select([size < 2, size < 4], [0.25, 0.5], 1.0)
        return self._moved(groups, half * unit).reshape(-1, *x.shape[1:])

    def rounded_weights(self, x: Float64, weight: Float64) -> Float64:
        """x [..., inputs] @ weight [..., outputs, inputs].T with each weight rounded to bf16. Of a
        sum over many weights their errors make a normal one, of the summed variances."""
        half = half_spacing(weight, BF16_MANTISSA_BITS, BF16_MIN_EXPONENT)
        deviation = np.sqrt(linear(x * x, half * half / 3))
        drawn = self._generator.standard_normal((1 + RUNS, *deviation.shape[1:]))
        drawn[0] = 0
        return linear(x, weight) + deviation * drawn

    def _moved(self, x: Float64, half: Float64) -> Float64:
        drawn = self._generator.uniform(-1, 1, (1 + RUNS, *x.shape[1:]))
        drawn[0] = 0
        return x + half * drawn


def half_spacing(x: Float64, mantissa_bits: int, min_exponent: int) -> Float64:
    """Half the distance of the format's values around x, the largest error of a rounding."""
    _, exponent = np.frexp(x)  # |x| in [2^(exponent - 1), 2^exponent)
    return np.exp2(np.maximum(exponent - 1, min_exponent) - mantissa_bits - 1.0)


def linear(x: Float64, weight: Float64) -> Float64:
    return x @ np.swapaxes(weight, -1, -2)


def deviations(runs: Float64) -> Float64:
    """Of the runs from the exact values, in the shape of one run."""
    return np.sqrt(np.square(runs[1:] - runs[0]).mean(0))


def band(runs: Float64) -> Float64:
    """How far off the exact values an engine with these roundings may be, element by element."""
    return BAND * deviations(runs)


def is_within(got: Float64, runs: Float64) -> bool:
    """Whether an engine's values may come from the runs' roundings: each of them, and all of them
    together, since a mistake may hide below a band of six deviations but not everywhere.

    The mean of the squared errors, in units of their deviations, is 1 on average; how much it
    spreads, which depends on how many of the errors are independent, is read off the runs.
    """
    scale = deviations(runs)
    squares = np.square((runs[1:] - runs[0]) / scale).reshape(RUNS, -1).mean(1)
    off = (got - runs[0]) / scale
    return bool(np.abs(off).max() <= BAND and np.square(off).mean() <= 1 + BAND * squares.std())
