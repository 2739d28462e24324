"""Norms against float64, and the places where they round."""

import numpy as np
import pytest
import torch
from helpers.numerics import UNIT_ROUNDOFF, gamma, nearest_bf16, to_numpy
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.modules.rms_norm import LayerNorm, RMSNorm, rms_norm

CPU = torch.device("cpu")
EPS = 1e-5


def make_norm(weight: torch.Tensor, eps: float = EPS) -> RMSNorm:
    norm = RMSNorm(len(weight), eps, weight.dtype, CPU)
    norm.weight.copy_(weight)
    return norm


@given(seed=st.integers(0, 1000), width=st.integers(1, 300), scale=st.floats(-15, 15))
def test_fp32_equals_float64(seed, width, scale) -> None:
    """A sum of `width` squares, whose error the root halves; then the root itself, a hypotenuse,
    sqrt(width), two divisions and a product."""
    generator = torch.Generator().manual_seed(seed)
    x = 2.0**scale * torch.randn(3, width, generator=generator)
    weight = torch.randn(width, generator=generator)
    wide, w = to_numpy(x), to_numpy(weight)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * w
    off = np.abs(to_numpy(make_norm(weight)(x)) - exact)
    assert (off <= gamma(width / 2 + 6) * np.abs(exact)).all()


def test_bf16_is_rounded_before_the_weight_and_after() -> None:
    """The mean square is 25, so that x / 5 is all there is to round: 0.2 and 1.4 are no bf16."""
    x = torch.tensor([[1.0, 7.0, 5.0, 5.0]]).bfloat16()
    weight = torch.tensor([1.046875, 1.125, 0.75, 3.0]).bfloat16()
    normed, w = to_numpy(x) / 5, to_numpy(weight)
    out = to_numpy(make_norm(weight, eps=0.0)(x))
    np.testing.assert_array_equal(out, nearest_bf16(nearest_bf16(normed) * w))
    assert (out != nearest_bf16(normed * w))[0, :2].all()  # rounding once would show here


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_statistics_are_fp32(dtype) -> None:
    """Squares of 2^9 overflow fp16, and a bf16 sum of 4096 equal squares would stop growing."""
    x = torch.full((2, 4096), 512.0, dtype=dtype)
    x[1, ::2] = 1.0
    out, wide = to_numpy(rms_norm(x, torch.ones(4096, dtype=dtype), EPS)), to_numpy(x)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True))
    assert (np.abs(out / exact - 1) <= UNIT_ROUNDOFF[dtype] + 1e-5).all()


def test_add_norm_rounds_the_sum_once() -> None:
    x, residual = (t.bfloat16() for t in torch.randn(2, 5, 64, generator=torch.manual_seed(0)))
    norm = make_norm(torch.linspace(0.5, 2, 64).bfloat16())
    normed, total = norm.add_norm(x, residual)
    np.testing.assert_array_equal(to_numpy(total), nearest_bf16(to_numpy(x) + to_numpy(residual)))
    assert torch.equal(normed, norm(total))


@given(seed=st.integers(0, 1000), shift=st.floats(-4, 4))
def test_layer_norm_equals_float64(seed, shift) -> None:
    """The index keys' norm. Centring loses the bits of the shift: relative to max|x|, a mean and a
    subtraction; then the variance of `width` terms and four single operations."""
    width, eps, generator = 32, 1e-6, torch.Generator().manual_seed(seed)
    norm = LayerNorm(width, eps, torch.float32, CPU)
    for parameter in (norm.weight, norm.bias):
        parameter.copy_(torch.randn(width, generator=generator))
    x = torch.randn(4, width, generator=generator) + shift
    wide, weight, bias = to_numpy(x), to_numpy(norm.weight), to_numpy(norm.bias)
    centred = wide - wide.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    exact = centred / deviation * weight + bias
    lost = gamma(width + 2) * np.abs(wide).max(-1, keepdims=True) / deviation
    relative = gamma(width + 6) * np.abs(centred / deviation)
    bound = (2 * lost + relative) * np.abs(weight) + gamma(2) * (np.abs(bias) + np.abs(exact))
    assert (np.abs(to_numpy(norm(x)) - exact) <= bound).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF, ids=str)
def test_cuda_norms_are_within_two_roundings(dtype) -> None:
    """Whichever kernel runs: flashinfer rounds once where the plain form rounds twice, and norms
    the sum x + residual before it is rounded."""
    norm = RMSNorm(6144, EPS, dtype, torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    x, residual = torch.randn(2, 7, 6144, generator=generator, device="cuda").to(dtype)
    norm.weight.copy_(1 + 0.2 * torch.randn(6144, generator=generator, device="cuda"))
    wide, added, w = to_numpy(x), to_numpy(x) + to_numpy(residual), to_numpy(norm.weight)
    plain = norm(x)
    normed, total = norm.add_norm(x.clone(), residual.clone())
    u = UNIT_ROUNDOFF[dtype]
    assert (np.abs(to_numpy(total) - added) <= u * np.abs(added)).all()
    for own, exact_input, roundings in ((plain, wide, 2), (normed, added, 3)):
        exact = exact_input / np.sqrt((exact_input**2).mean(-1, keepdims=True) + EPS) * w
        # The rounded sum also moves the mean square, by at most its own relative error.
        bound = (1 + u) ** (roundings + 1) * (1 + gamma(6144 / 2 + 8)) - 1
        # Below the smallest normal number a rounding loses up to u times that, whatever the value.
        underflow = u * torch.finfo(dtype).smallest_normal * (np.abs(w) + 1)
        assert (np.abs(to_numpy(own) - exact) <= bound * np.abs(exact) + underflow).all()
