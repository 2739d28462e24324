"""Which layers own an indexer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.attention.backends.sparse.dsa.params import full_indexer_layers

# Layers of GLM-5.2 that own an indexer, read from its checkpoint; the other 57 share.
GLM_5_2_FULL = [0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74]


def full_ones(num_layers: int, **given_fields: object) -> list[int]:
    full = full_indexer_layers(num_layers, **given_fields)
    assert len(full) == num_layers
    return [i for i, owns in enumerate(full) if owns]


def test_glm_5_2_by_frequency() -> None:
    assert full_ones(78, freq=4, offset=3) == GLM_5_2_FULL


def test_glm_5_2_by_list_and_by_pattern() -> None:
    marks = ["full" if i in GLM_5_2_FULL else "shared" for i in range(78)]
    assert full_ones(78, indexer_types=marks) == GLM_5_2_FULL
    pattern = "".join("F" if m == "full" else "S" for m in marks)
    assert full_ones(78, pattern=pattern) == GLM_5_2_FULL


def test_glm_5_1_says_nothing_and_every_layer_is_full() -> None:
    assert full_ones(78) == list(range(78))


def test_list_goes_before_pattern_before_frequency() -> None:
    by_frequency = {"freq": 2, "offset": 1}
    assert full_ones(4, **by_frequency) == [0, 2]
    assert full_ones(4, pattern="FSSF", **by_frequency) == [0, 3]
    marks = ["full", "full", "shared", "shared"]
    assert full_ones(4, indexer_types=marks, pattern="FSSF", **by_frequency) == [0, 1]


@given(layers=st.integers(1, 40), freq=st.integers(1, 6), offset=st.integers(1, 6))
def test_frequency_counts_from_the_offset(layers, freq, offset) -> None:
    """The first `offset` layers are full, then every freq-th one after the last of them."""
    expected = [i for i in range(layers) if i < offset] + list(
        range(offset - 1 + freq, layers, freq)
    )
    assert full_ones(layers, freq=freq, offset=offset) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"indexer_types": ["full"] * 3}, r"indexer_types has 3 entries; num_hidden_layers is 4"),
        ({"indexer_types": ["full", "none", "full", "half"]}, r"\['half', 'none'\].*full.*shared"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, r"layer 0 .* no earlier layer"),
        ({"pattern": "FFFFF"}, r"index_topk_pattern has 5 entries; num_hidden_layers is 4"),
        ({"pattern": "FfSS"}, r"index_topk_pattern contains \['f'\]"),
        ({"pattern": "SFFF"}, r"layer 0 .* no earlier layer"),
        ({"freq": 4, "offset": 0}, r"layer 0 .* no earlier layer"),
        ({"freq": 0}, r"index_topk_freq is 0; it must be at least 1"),
    ],
)
def test_what_cannot_be_is_an_error(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        full_indexer_layers(4, **fields)
