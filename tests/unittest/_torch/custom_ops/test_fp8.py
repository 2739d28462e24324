"""E4M3 quantisation with power-of-two scales, against counting and rounding in float64."""

import numpy as np
import pytest
import torch
from helpers.numerics import DEVICES, decode_e4m3, nearest_e4m3, smallest_scale, to_numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from tensorrt_llm._torch.custom_ops.cache_ops import scatter_rows
from tensorrt_llm._torch.custom_ops.fp8 import num_scales, quantize_e4m3_ue8m0

BLOCK = 128

# Magnitudes from below the amax floor to far above 448, including exact borders of a scale.
floats = st.one_of(
    st.floats(-1e6, 1e6, width=32),
    st.floats(-(2.0**-17), 2.0**-17, width=32),
    st.sampled_from([0.0, 448.0, -448.0, 1.75, 3.5, 448.000030517578125, 224.0, 2.0**-20]),
)


def quantise(values: np.ndarray, device: str = "cpu") -> tuple[np.ndarray, np.ndarray]:
    quantised, scale = quantize_e4m3_ue8m0(torch.from_numpy(values).to(device))
    assert quantised.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float32
    return to_numpy(quantised), to_numpy(scale)


@pytest.mark.parametrize("device", DEVICES)
@given(
    values=arrays(np.float32, array_shapes(min_dims=2, max_dims=3, max_side=20), elements=floats)
)
def test_scale_is_smallest_and_values_are_nearest(device, values) -> None:
    """At most 128 channels share one scale."""
    quantised, scale = quantise(values, device)
    wide = values.astype(np.float64)
    expected = np.vectorize(smallest_scale)(np.abs(wide).max(-1, keepdims=True))
    np.testing.assert_array_equal(scale, expected)
    np.testing.assert_array_equal(quantised, nearest_e4m3(wide / expected))
    # Half an e4m3 ulp: 2^-3 of the leading bit in the normal range, 2^-9 scales below 2^-6 scales.
    half_ulp = np.maximum(2.0**-4 * np.abs(wide), 2.0**-10 * scale)
    assert (np.abs(quantised * scale - wide) <= half_ulp).all()


@given(amax=st.floats(2.0**-13, 2.0**100, width=32))
def test_no_scale_is_twice_too_large(amax) -> None:
    """The block uses the upper half of e4m3's range, and nothing in it exceeds 448."""
    _, scale = quantise(np.array([amax, 0.0], np.float32))
    assert 224.0 < amax / scale[0] <= 448.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exponent", [-10, 0, 7, 40])
def test_scale_changes_exactly_at_the_border(exponent, device) -> None:
    border = np.float32(448.0 * 2.0**exponent)
    above = np.nextafter(border, np.float32(np.inf))
    below = np.nextafter(border, np.float32(0))
    _, scale = quantise(np.array([[below], [border], [above]], np.float32), device)
    np.testing.assert_array_equal(scale[:, 0], 2.0 ** np.array([exponent, exponent, exponent + 1]))


def test_zero_rows_stay_zero_with_a_finite_scale() -> None:
    quantised, scale = quantise(np.zeros((3, BLOCK), np.float32))
    assert not quantised.any()
    assert (scale == smallest_scale(0.0)).all()
    assert (scale > 0).all()


@pytest.mark.parametrize("channels", [256, 384])
def test_every_128_channels_have_their_own_scale(channels) -> None:
    rng = np.random.default_rng(channels)
    values = rng.standard_normal((5, channels)).astype(np.float32)
    values *= np.repeat(10.0 ** rng.integers(-3, 4, (5, channels // BLOCK)), BLOCK, axis=1)
    quantised, scale = quantise(values)
    assert scale.shape == (5, num_scales(channels))
    for block in range(channels // BLOCK):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        alone, own_scale = quantise(values[:, part].copy())
        np.testing.assert_array_equal(quantised[:, part], alone)
        np.testing.assert_array_equal(scale[:, block], own_scale[:, 0])


def test_channels_that_leave_a_part_of_a_block_are_refused() -> None:
    with pytest.raises(ValueError, match=r"200 channels.*multiples"):
        quantize_e4m3_ue8m0(torch.zeros(2, 200))


def test_bf16_input_is_quantised_from_its_exact_values() -> None:
    values = torch.randn(4, BLOCK, generator=torch.Generator().manual_seed(0)).bfloat16()
    for own, from_fp32 in zip(
        quantize_e4m3_ue8m0(values), quantize_e4m3_ue8m0(values.float()), strict=True
    ):
        assert torch.equal(own.view(torch.uint8), from_fp32.view(torch.uint8))


def test_torch_reads_e4m3_bytes_as_the_format_says() -> None:
    """The tests of the caches decode raw bytes with `decode_e4m3`; here the two meet."""
    codes = torch.arange(256, dtype=torch.uint8)
    expected = np.array([decode_e4m3(c) for c in range(256)])
    np.testing.assert_array_equal(to_numpy(codes.view(torch.float8_e4m3fn)), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_cached_e4m3_rows_saturate(device) -> None:
    """Latents are cached at unit scale: no large value may become NaN."""
    values = torch.linspace(440, 70000, 133, device=device).unsqueeze(1)
    slots = torch.arange(133, device=device)
    for sign in (-1, 1):
        for dtype in (torch.float32, torch.bfloat16):
            rows = torch.zeros(133, 1, device=device).to(torch.float8_e4m3fn)
            scatter_rows(rows, slots, (sign * values).to(dtype))
            assert (rows.float() * sign == 448).all()
