"""Chunking, packing and admission, seen through the steps that a scripted model is asked for."""

import pytest
from helpers.scripted_engine import Engine, greedy_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import Role
from tensorrt_llm._torch.pyexecutor.messages import FinishReason


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 5 * i) % 30 for i in range(length)]


def test_a_long_prompt_comes_in_chunks() -> None:
    engine = Engine(max_num_tokens=10)
    outcome = engine.generate(prompt(27), max_tokens=3)
    assert engine.model.steps == [([8], 0), ([8], 0), ([8], 0), ([3], 0), ([], 1), ([], 1)]
    assert outcome.tokens == greedy_tokens(prompt(27), 3)


def test_chunks_end_on_block_boundaries_beside_generations() -> None:
    engine = Engine(max_num_tokens=9)
    engine.add(prompt(1), max_tokens=6)
    engine.step()
    engine.add(prompt(20), max_tokens=1)
    engine.finish()
    assert engine.model.steps[:5] == [([1], 0), ([8], 1), ([8], 1), ([4], 1), ([], 1)]


def test_budget_below_one_block_still_makes_progress() -> None:
    engine = Engine(max_num_tokens=3)
    outcome = engine.generate(prompt(8), max_tokens=1)
    assert engine.model.steps == [([3], 0), ([1], 0), ([3], 0), ([1], 0)]
    assert outcome.tokens == greedy_tokens(prompt(8), 1)


def test_short_prompts_share_a_step_and_keep_their_order() -> None:
    engine = Engine(max_num_tokens=12)
    requests = [engine.add(prompt(n, n), max_tokens=2) for n in (3, 4, 5, 2)]
    engine.finish()
    assert engine.model.steps == [([3, 4, 5], 0), ([2], 3), ([], 1)]
    for request, n in zip(requests, (3, 4, 5, 2), strict=True):
        assert engine.outcomes[request].tokens == greedy_tokens(prompt(n, n), 2)


def test_without_chunking_a_prompt_waits_for_room() -> None:
    engine = Engine(max_num_tokens=8, enable_chunked_prefill=False)
    engine.add(prompt(6), max_tokens=3)
    engine.add(prompt(8), max_tokens=1)
    engine.add(prompt(1), max_tokens=1)  # would fit, but nobody passes
    engine.finish()
    assert engine.model.steps == [([6], 0), ([], 1), ([], 1), ([8], 0), ([1], 0)]


def test_no_more_requests_than_places_or_tokens() -> None:
    for limits in ({"max_batch_size": 2}, {"max_num_tokens": 2}):
        engine = Engine(**limits)
        for i in range(5):
            engine.add(prompt(2, i), max_tokens=4)
        most = 0
        while engine.executor.scheduler.has_requests:
            engine.step()
            most = max(most, engine.executor.scheduler.num_running)
        assert most == 2


@pytest.mark.parametrize("short", list(Role))
def test_admission_asks_every_pool(short: Role) -> None:
    """8 blocks of 4 tokens in one pool hold only two of three requests of 11 or 12 tokens."""
    engine = Engine(num_blocks={**dict.fromkeys(Role, 100), short: 8})
    first, second, third = [engine.add(prompt(8, i), max_tokens=n) for i, n in enumerate((4, 3, 4))]
    engine.step()
    assert engine.executor.scheduler.num_running == 2
    assert [engine.kv.num_used_blocks(role) for role in Role] == [6, 6]
    engine.finish()
    assert engine.model.steps[:4] == [([8, 8], 0), ([], 2), ([], 2), ([8], 1)]
    for request, n in ((first, 4), (second, 3), (third, 4)):
        assert len(engine.outcomes[request].tokens) == n


@pytest.mark.parametrize("short", list(Role))
def test_a_request_that_can_never_fit_is_refused_with_both_numbers(short: Role) -> None:
    engine = Engine(num_blocks={**dict.fromkeys(Role, 100), short: 5})
    outcome = engine.generate(prompt(10), max_tokens=11)
    assert outcome.reason is FinishReason.ERROR
    assert outcome.last.error == (
        f"prompt and output of up to 21 tokens need 6 blocks of the {short} cache, which has 5"
    )
    assert engine.generate(prompt(10), max_tokens=10).reason is FinishReason.LENGTH


@settings(max_examples=40)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 50), st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=7
    ),
    max_num_tokens=st.integers(1, 24),
    max_batch_size=st.integers(1, 4),
    tokens_per_block=st.integers(1, 9),
    spare=st.integers(0, 20),
    data=st.data(),
)
def test_any_traffic_gives_the_tokens_of_each_request_alone(
    lengths: list[tuple[int, int, int]],
    max_num_tokens: int,
    max_batch_size: int,
    tokens_per_block: int,
    spare: int,
    data: st.DataObject,
) -> None:
    """Requests arrive and are cancelled at random; the survivors get their own greedy tokens."""
    blocks = -(-64 // tokens_per_block) + spare
    engine = Engine(
        max_num_tokens=max_num_tokens,
        max_batch_size=max_batch_size,
        tokens_per_block=tokens_per_block,
        num_blocks={Role.KEY: blocks, Role.INDEX_KEY: blocks + 1},
    )
    wanted = {}
    for length, max_tokens, steps in lengths:
        request = engine.add(prompt(length, length), max_tokens=max_tokens)
        wanted[request] = greedy_tokens(prompt(length, length), max_tokens)
        for _ in range(steps):
            engine.step()
        if data.draw(st.booleans(), label="cancel someone"):
            engine.executor.cancel([data.draw(st.sampled_from(sorted(wanted)))])
    engine.finish()
    for request, tokens in wanted.items():
        outcome = engine.outcomes[request]
        if outcome.reason is FinishReason.CANCELLED:
            assert outcome.tokens == tokens[: len(outcome.tokens)]
        else:
            assert (outcome.reason, outcome.tokens) == (FinishReason.LENGTH, tokens)
