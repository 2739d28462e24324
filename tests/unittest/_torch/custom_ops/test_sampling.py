"""Distributions and draws as integers."""

import math

import pytest
import torch
from helpers.reference_sampling import hf_probabilities
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorrt_llm._torch.custom_ops.sampling import WHOLE, draw, draw_tokens, probabilities

VOCAB = 24


def random_logits(seed: int) -> torch.Tensor:
    return 3 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))


def filters(temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    values = [temperature, top_k or VOCAB, top_p, min_p]
    return torch.tensor([values], dtype=torch.float64)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 999),
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_probabilities_are_those_of_transformers(seed, temperature, top_k, top_p, min_p) -> None:
    given_filters = (temperature, top_k, top_p, min_p)
    whole = probabilities(random_logits(seed), filters(*given_filters))
    assert int(whole.sum()) == WHOLE and int(whole.min()) >= 0
    expected = hf_probabilities(random_logits(seed), *given_filters)
    kept = (whole[0] > 0) & (expected > 0)
    # transformers rounds the running sum of top-p and the quotient of min-p, so a token on the very
    # edge may be kept by one of both; and all below 1 / WHOLE are cut off here.
    assert (kept == (whole[0] > 0)).sum() >= VOCAB - 1
    ours, theirs = whole[0, kept].double(), expected[kept]
    # Logits are subtracted in fp32: a distance of at most 52 ln 2, as one part of WHOLE is left, is
    # off by 2**-24 of itself, which is a relative error of the weight, and again of the sum.
    rounding = 2 * 52 * math.log(2) * 2.0**-24
    torch.testing.assert_close(
        ours / ours.sum(), theirs / theirs.sum(), rtol=rounding, atol=VOCAB / WHOLE
    )


def test_equal_totals_whatever_the_logits() -> None:
    """One token, all tokens alike, and rows that are not finite."""
    logits = torch.zeros(5, VOCAB)
    logits[0, 7] = 1e6
    logits[2, 3] = math.nan
    logits[3, 3] = math.inf
    logits[4] = -math.inf
    whole = probabilities(logits, filters(1.0, 0, 1.0, 0.0).expand(5, -1))
    assert whole.sum(-1).tolist() == [WHOLE] * 5
    assert int(whole[0, 7]) == WHOLE
    assert int(whole[1].max() - whole[1].min()) < VOCAB
    assert whole[2:].amax(-1).tolist() == [WHOLE] * 3


def test_draws_split_the_unit_interval_by_weight() -> None:
    weights = torch.tensor([[0, 3, 0, 1, 4, 0]]).expand(17, -1)
    uniforms = torch.tensor([*(i / 16 for i in range(16)), 1 - 2.0**-53], dtype=torch.float64)
    assert draw(weights, uniforms).tolist() == [1] * 6 + [3] * 2 + [4] * 9


@pytest.mark.parametrize("seed", range(3))
def test_draws_agree_with_the_probabilities(seed) -> None:
    """Whether tokens lie in order of weight or of id, each covers its part of the unit interval."""
    count = 1 << 12
    logits = random_logits(seed).expand(count, -1)
    settings = filters(1.5, 9, 0.9, 0.0).expand(count, -1)
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    whole = probabilities(logits, settings)
    for tokens in (draw_tokens(logits, settings, uniforms), draw(whole, uniforms)):
        share = tokens.bincount(minlength=VOCAB) / count
        # A grid of `count` points counts an interval to one point at each of its ends.
        assert float((share - whole[0].double() / WHOLE).abs().max()) <= 2 / count
