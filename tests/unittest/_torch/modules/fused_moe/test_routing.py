"""The router against the formula, one token after the other in float64."""

import numpy as np
import pytest
import torch
from helpers.numerics import gamma, to_numpy
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.modules.fused_moe import DeepseekV3Gate

HIDDEN, EXPERTS, SCALE = 32, 16, 2.5


def make_gate(
    bias: torch.Tensor, *, top_k: int = 4, normalise: bool = True, seed: int = 0
) -> DeepseekV3Gate:
    gate = DeepseekV3Gate(HIDDEN, EXPERTS, top_k, SCALE, normalise, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    gate.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=generator) / HIDDEN**0.5)
    gate.e_score_correction_bias.copy_(bias)
    return gate


def exact_scores(gate: DeepseekV3Gate, x: torch.Tensor) -> np.ndarray:
    return 1 / (1 + np.exp(-to_numpy(x) @ to_numpy(gate.weight).T))


def some_tokens(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 500), top_k=st.integers(1, EXPERTS), normalise=st.booleans())
def test_weights_and_experts_equal_the_formula(seed, top_k, normalise) -> None:
    """The bias, near 7 as in real checkpoints, chooses; the weights come from the bare scores."""
    bias = 6.94 + 0.06 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(seed))
    gate, x = make_gate(bias, top_k=top_k, normalise=normalise, seed=seed), some_tokens(3, seed)
    weights, ids = gate(x)
    assert weights.dtype == torch.float32
    scores = exact_scores(gate, x)
    chosen_by = scores + to_numpy(bias)
    for t in range(3):
        experts = ids[t].tolist()
        assert len(set(experts)) == top_k
        left = np.setdiff1d(np.arange(EXPERTS), experts)
        # score + bias near 8 is rounded to half of 2^-20; the scores' own error is smaller.
        if len(left):
            assert chosen_by[t, experts].min() >= chosen_by[t, left].max() - 2.0**-19
        share = scores[t, experts]
        exact = SCALE * (share / share.sum() if normalise else share)
        assert (np.abs(to_numpy(weights[t]) - exact) <= gamma(3 * HIDDEN + top_k) * exact).all()


def test_the_bias_only_chooses() -> None:
    """Raising one expert's bias brings it in with the weight that its score alone gives."""
    gate, x = make_gate(torch.zeros(EXPERTS), top_k=2, normalise=False), some_tokens(20)
    before, _ = gate(x)
    worst = int(exact_scores(gate, x).mean(0).argmin())
    gate.e_score_correction_bias[worst] = 5.0
    weights, ids = gate(x)
    assert bool((ids == worst).any(1).all())
    exact = SCALE * exact_scores(gate, x)[:, worst]
    np.testing.assert_allclose(to_numpy(weights[ids == worst]), exact, rtol=1e-5)
    assert weights.max() <= before.max()


def test_a_bf16_bias_would_choose_other_experts() -> None:
    """Why the bias is fp32: near 7 a bf16 has steps of 2^-5, more than most of its differences."""
    bias = 6.94 + 0.06 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(9))
    x = some_tokens(200)
    _, ids = make_gate(bias)(x)
    _, rounded = make_gate(bias.bfloat16().float())(x)
    expected = np.argsort(-(exact_scores(make_gate(bias), x) + to_numpy(bias)))[:, :4]
    assert [sorted(i) for i in ids.tolist()] == [sorted(i) for i in expected.tolist()]
    differ = sum(set(a) != set(b) for a, b in zip(ids.tolist(), rounded.tolist(), strict=True))
    assert differ > 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_activations_are_routed_in_fp32(dtype) -> None:
    gate, x = make_gate(torch.linspace(6.8, 7.1, EXPERTS)), some_tokens(50).to(dtype)
    for own, in_fp32 in zip(gate(x), gate(x.float()), strict=True):
        assert torch.equal(own, in_fp32)
