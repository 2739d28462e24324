"""Rotations against complex numbers in float64."""

import numpy as np
import pytest
import torch
from helpers.numerics import UNIT_ROUNDOFF, Float64, to_numpy
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.modules.rotary_embedding import RotaryEmbedding, apply_rotary

DIM, THETA, MAX_POSITIONS = 64, 8e6, 1_048_576
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rotary() -> RotaryEmbedding:
    """GLM-5.2's table, whole."""
    return RotaryEmbedding(DIM, THETA, MAX_POSITIONS, CPU)


def exact_angles(position: int) -> Float64:
    return position * THETA ** (-np.arange(0, DIM, 2) / DIM)


@given(position=st.one_of(st.integers(0, 4096), st.integers(0, MAX_POSITIONS - 1)))
def test_table_holds_the_exact_rotations_up_to_fp32_angles(rotary, position) -> None:
    """The frequency is a power (1 ulp) and a reciprocal, the angle a product: relative error
    2^-23 + 2^-24 + 2^-24 = 2^-22. Sine and cosine add an ulp of their own."""
    own = rotary.rotations(torch.tensor([position]))[0, 0].numpy().astype(np.complex128)
    angles = exact_angles(position)
    bound = angles * 2.0**-22 + 2.0**-22
    assert (np.abs(own - np.exp(1j * angles)) <= bound).all()
    assert (np.abs(np.abs(own) - 1) <= 2.0**-22).all()


def test_rotations_have_one_row_per_token_and_padding_is_harmless(rotary) -> None:
    rotations = rotary.rotations(torch.tensor([5, -1, 0]))
    assert rotations.shape == (3, 1, DIM // 2)
    assert rotations.dtype == torch.complex64
    assert torch.equal(rotations[1], rotations[2])  # position 0 turns nothing
    assert torch.equal(rotations[2], torch.ones(1, DIM // 2, dtype=torch.complex64))


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF, ids=str)
@given(seed=st.integers(0, 1000), heads=st.integers(1, 8), position=st.integers(0, 4096))
def test_pairs_are_neighbours(rotary, dtype, seed, heads, position) -> None:
    """Channels (2j, 2j + 1) are one complex number and stay there; one rounding at the end."""
    x = torch.randn(1, heads, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)
    rotations = rotary.rotations(torch.tensor([position]))
    own, wide = to_numpy(apply_rotary(x, rotations)), to_numpy(x)
    turns = rotations[0, 0].numpy().astype(np.complex128)
    for j in range(DIM // 2):
        turned = (wide[0, :, 2 * j] + 1j * wide[0, :, 2 * j + 1]) * turns[j]
        size = np.abs(turned)
        for channel, exact in ((2 * j, turned.real), (2 * j + 1, turned.imag)):
            # Two fp32 products and their sum, each relative to the pair's length; then the dtype.
            bound = 3 * 2.0**-24 * size * 2**0.5 + UNIT_ROUNDOFF[dtype] * (size + np.abs(exact)) / 2
            assert (np.abs(own[0, :, channel] - exact) <= bound).all()


def test_every_token_turns_by_its_own_position(rotary) -> None:
    x = torch.randn(3, 2, DIM, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([9, 0, 1000])
    together = apply_rotary(x, rotary.rotations(positions))
    alone = [apply_rotary(x[i : i + 1], rotary.rotations(positions[i : i + 1])) for i in range(3)]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together[1], x[1])


def test_scores_depend_on_the_distance_alone(rotary) -> None:
    """What rotary embeddings are for: (q at m) . (k at n) = (q at m + d) . (k at n + d)."""
    q, k = torch.randn(2, 1, 1, DIM, generator=torch.Generator().manual_seed(1))
    scores = []
    for shift in (0, 1, 500):
        at = [rotary.rotations(torch.tensor([p + shift])) for p in (40, 7)]
        scores.append(float((apply_rotary(q, at[0]) * apply_rotary(k, at[1])).sum()))
    np.testing.assert_allclose(scores, scores[0], atol=1e-3)
