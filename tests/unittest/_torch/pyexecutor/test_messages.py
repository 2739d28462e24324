"""Counts of verified drafts."""

from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.pyexecutor.messages import SpeculationStats

DRAFTS = 3
RUNS = st.lists(st.integers(0, DRAFTS), max_size=30)


def counted(runs: list[int]) -> SpeculationStats:
    """After runs of which so many drafts were accepted."""
    stats = SpeculationStats(0, (0,) * DRAFTS)
    for num_accepted in runs:
        stats = stats.verified(num_accepted)
    return stats


@given(RUNS.filter(bool))
def test_acceptance_is_averaged_over_the_runs(runs: list[int]) -> None:
    stats = counted(runs)
    assert stats.acceptance_length == 1 + sum(runs) / len(runs)
    assert stats.acceptance_per_position == tuple(
        sum(num_accepted > place for num_accepted in runs) / len(runs) for place in range(DRAFTS)
    )


def test_nothing_verified_has_no_acceptance() -> None:
    stats = counted([])
    assert stats.acceptance_length is stats.acceptance_per_position is None
    assert stats.acceptance_text() == "nothing verified"


@given(RUNS, RUNS)
def test_counts_add_up(first: list[int], second: list[int]) -> None:
    before, whole = counted(first), counted(first + second)
    assert whole.since(before) == counted(second)
    assert SpeculationStats.total([before, None, counted(second)]) == whole


def test_the_total_of_nothing_is_nothing() -> None:
    assert SpeculationStats.total([]) is SpeculationStats.total([None, None]) is None
