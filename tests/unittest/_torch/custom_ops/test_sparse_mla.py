"""Sparse MLA against a float64 loop over each token's own keys."""

import math

import numpy as np
import pytest
import torch
from helpers.numerics import DEVICES, UNIT_ROUNDOFF, Float64, gamma, to_numpy
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.custom_ops import sparse_mla
from tensorrt_llm._torch.custom_ops.sparse_mla import (
    absence_bias,
    gather_rows,
    sparse_mla_attention,
)

LATENT, ROPE = 32, 16
WIDTH = LATENT + ROPE
POOL_ROWS = 60
POISON_ROW = 0  # absent keys point here; its values would dominate every softmax
SCALE = 40**-0.5


class Case:
    """Random queries over a pool, each token with its own selection and holes of -1."""

    def __init__(
        self,
        seed: int,
        *,
        heads: int = 4,
        tokens: int = 7,
        topk: int = 12,
        dtype: torch.dtype = torch.float32,
        fp8_rows: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(tokens, heads, WIDTH, generator=generator).to(dtype)
        rows = torch.randn(POOL_ROWS, WIDTH, generator=generator)
        rows[POISON_ROW] = 400.0
        self.rows = rows.to(torch.float8_e4m3fn if fp8_rows else dtype)
        keys = [torch.randperm(POOL_ROWS - 1, generator=generator) + 1 for _ in range(tokens)]
        self.slots = torch.stack(keys)[:, :topk]
        absent = torch.rand(tokens, topk, generator=generator) < 0.4
        absent[:, topk // 2] = False  # at least one key each
        self.indices = torch.where(absent, -1, self.slots)
        self.slots[absent] = POISON_ROW

    def run(self, device: str = "cpu", *, with_bias: bool = True) -> Float64:
        bias = absence_bias(self.indices.to(device), self.q.dtype) if with_bias else None
        q, rows, slots = (t.to(device) for t in (self.q, self.rows, self.slots))
        out = sparse_mla_attention(q, rows, slots, bias, SCALE, LATENT)
        assert out.dtype == self.q.dtype
        return to_numpy(out)

    def expected(self) -> tuple[Float64, Float64]:
        """(exact values, how far off rounding may take them), [tokens, heads, latent] each.

        With u the unit roundoff of the dtype, and fp32 sums of n terms within gamma(n):
        - A score is a dot of WIDTH products (fp32 sum, then rounded to the dtype), times the scale
          (rounded again): off by d <= scale * gamma(WIDTH) * sum|q k| + (2u + u^2)|score|.
        - Softmax of scores that are off by d is off by at most a factor e^(2d); its fp32
          exponential (2 ulp), sum of topk and division add gamma(topk + 6), rounding it adds u.
        - The sum over values adds gamma(topk) and the output's rounding u.
        """
        q, rows = to_numpy(self.q), to_numpy(self.rows)
        u, topk = UNIT_ROUNDOFF[self.q.dtype], self.slots.shape[1]
        exact, band = np.zeros((2, *q.shape[:2], LATENT))
        for t in range(q.shape[0]):
            keys = rows[[s for s, i in zip(self.slots[t], self.indices[t], strict=True) if i >= 0]]
            for h in range(q.shape[1]):
                scores = keys @ q[t, h] * SCALE
                magnitude = np.abs(keys) @ np.abs(q[t, h]) * SCALE
                off = (gamma(WIDTH) * magnitude + (2 * u + u * u) * np.abs(scores)).max()
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                exact[t, h] = weights @ keys[:, :LATENT]
                factor = math.exp(2 * off) * (1 + u) * (1 + gamma(2 * topk + 6)) * (1 + u) - 1
                band[t, h] = factor * (weights @ np.abs(keys[:, :LATENT]))
        return exact, band


def assert_within(actual: Float64, expected: tuple[Float64, Float64]) -> None:
    exact, band = expected
    assert (np.abs(actual - exact) <= band).all(), np.abs((actual - exact) / band).max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8_rows", [False, True], ids=["rows", "fp8 rows"])
@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF, ids=str)
def test_equals_the_loop_over_keys(dtype, fp8_rows, device) -> None:
    """e4m3 rows are exact in each of the dtypes, so the same band holds for them."""
    case = Case(0, dtype=dtype, fp8_rows=fp8_rows)
    assert_within(case.run(device), case.expected())


def test_the_fp32_band_is_tight_enough_to_mean_something() -> None:
    exact, band = Case(0).expected()
    assert band.max() < 1e-4 < 0.1 < np.abs(exact).mean()


@given(
    seed=st.integers(0, 10_000),
    heads=st.integers(1, 8),
    tokens=st.integers(1, 9),
    topk=st.integers(1, 40),
)
def test_any_number_of_heads_tokens_and_keys(seed, heads, tokens, topk) -> None:
    case = Case(seed, heads=heads, tokens=tokens, topk=topk)
    assert_within(case.run(), case.expected())


@pytest.mark.parametrize("tokens_per_tile", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("with_bias", [True, False])
def test_tiles_of_queries_change_nothing(tokens_per_tile, with_bias, monkeypatch) -> None:
    """Less than one token's bytes (0) still works on one token at a time."""
    case = Case(1)
    if not with_bias:
        case.slots, case.indices = case.slots.clamp(min=1), case.slots.clamp(min=1)
    per_token = case.slots.shape[1] * WIDTH * 8
    monkeypatch.setitem(sparse_mla.TILE_BYTES, "cpu", tokens_per_tile * per_token + per_token // 2)
    assert_within(case.run(with_bias=with_bias), case.expected())


def test_without_bias_every_row_is_a_key() -> None:
    case = Case(2)
    case.indices = case.slots
    np.testing.assert_array_equal(case.run(with_bias=False), case.run())


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF, ids=str)
def test_absent_keys_do_not_exist(dtype) -> None:
    """Whatever an absent key's row holds, the bits of the result are the same."""
    case = Case(3, dtype=dtype)
    poisoned = case.run()
    case.rows[POISON_ROW] = -1.0
    np.testing.assert_array_equal(case.run(), poisoned)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF, ids=str)
def test_a_token_without_keys_stays_finite(dtype, device) -> None:
    """A padding row of a decode graph."""
    case = Case(4, dtype=dtype)
    case.indices[2] = -1
    assert np.isfinite(case.run(device)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gathered_fp8_rows_are_exact(dtype) -> None:
    rows = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(32, 8)
    slots = torch.tensor([3, 3, 31, 0])
    gathered = gather_rows(rows, slots, dtype)
    assert gathered.dtype == dtype
    np.testing.assert_array_equal(to_numpy(gathered), to_numpy(rows)[slots])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_gathered_rows_have_the_dtype_that_was_asked_for(stored) -> None:
    rows = torch.arange(32.0).view(8, 4).to(stored)
    gathered = gather_rows(rows, torch.tensor([7, 0, 7]), torch.float32)
    assert gathered.dtype == torch.float32
    np.testing.assert_array_equal(to_numpy(gathered), to_numpy(rows)[[7, 0, 7]])
