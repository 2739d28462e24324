"""What the step loop makes of accepted drafts, with a model that drafts and accepts by a script.

Whatever is accepted, the tokens of a request are the greedy ones of its prompt. What counts:

- `generated_tokens`: tokens handed out.
- `verify_steps`: one for each step of a generation request that is still there when it is finished;
  not the step that an ended or cancelled request still has in flight.
- `accepted_drafts[i]`: drafts at place i of such a step that were accepted and handed out.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers.byte_tokenizer import byte_tokenizer
from helpers.scripted_engine import (
    CONFIG,
    VOCAB,
    Engine,
    Outcome,
    Rule,
    Script,
    greedy_tokens,
    random_rule,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import Role
from tensorrt_llm._torch.pyexecutor.messages import (
    EngineStats,
    FinishReason,
    SpeculationStats,
)

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
CANCELLED, ERROR = FinishReason.CANCELLED, FinishReason.ERROR
PROMPT = [3, 1, 4, 1, 5]
BLOCK = CONFIG.tokens_per_block

draft_lens = pytest.mark.parametrize("draft_len", range(1, 8))
loops = pytest.mark.parametrize("plain", [True, False], ids=["plain", "overlap"])


def drafting(draft_len: int, plain: bool, **settings: object) -> Engine:
    settings = {"max_num_tokens": 64, "max_draft_len": draft_len, **settings}
    return Engine(disable_overlap_scheduler=plain, **settings)


def in_turns(*counts: Sequence[int]) -> Script:
    """The requests take the counts in turns, and each its own count step by step and over again."""

    def script(request_id: int, step: int) -> int:
        own = counts[request_id % len(counts)]
        return own[step % len(own)]

    return script


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 5 * i) % VOCAB for i in range(length)]


def distinct_rule(history: Sequence[int]) -> torch.Tensor:
    """Random logits that depend on every token, and no token comes twice while there are others."""
    logits = random_rule(history)
    logits[list(set(history))] -= 100
    return logits


def accepted_counts(script: Script, request: int, draft_len: int, num_tokens: int) -> list[int]:
    """Accepted drafts of each verify step until there are `num_tokens`, the first of which is the
    prompt's."""
    counts: list[int] = []
    while 0 < len(counts) + sum(counts) + 1 < num_tokens:
        counts.append(min(draft_len, script(request, len(counts))))
    return counts


def by_place(counts: Sequence[int], draft_len: int) -> tuple[int, ...]:
    return tuple(sum(count > place for count in counts) for place in range(draft_len))


def final_stats(engine: Engine) -> EngineStats:
    """The report of an engine that has become idle; what it has verified is its requests'."""
    stats = engine.stats[-1]
    ends = [outcome.last for outcome in engine.outcomes.values()]
    assert stats.speculation == SpeculationStats.total(end.speculation for end in ends)
    assert stats.num_running == stats.num_waiting == 0
    return stats


def step_until_end(engine: Engine, request: int) -> Outcome:
    """Its blocks are free at once, also while another step of it is in flight."""
    while not engine.outcomes[request].reason:
        engine.step()
    assert engine.used_blocks == 0
    engine.finish()
    return engine.outcomes[request]


# --- where runs end -------------------------------------------------------------------------------


@draft_lens
@loops
def test_runs_end_before_at_and_after_a_block_boundary(draft_len, plain) -> None:
    """The first run has each accepted count in turn, the later ones all others."""
    rows = range(1 + draft_len)
    cases = list(itertools.product(rows, (-1, 0, 1)))
    scripts = [[(accepted + i) % len(rows) for i in rows] for accepted, _ in cases]
    engine = drafting(draft_len, plain, script=in_turns(*scripts))
    for accepted, offset in cases:
        length = 1 + (offset - accepted - 2) % BLOCK  # so that the run ends `offset` off a block
        outcome = engine.generate(prompt(length), max_tokens=14)
        assert (outcome.tokens, outcome.reason) == (greedy_tokens(prompt(length), 14), LENGTH)


@draft_lens
@loops
def test_max_tokens_cuts_a_run_at_every_place(draft_len, plain) -> None:
    engine = drafting(draft_len, plain)
    expected = greedy_tokens(PROMPT, 2 * draft_len + 3)
    for count in range(1, len(expected) + 1):
        outcome = step_until_end(engine, engine.add(PROMPT, max_tokens=count))
        assert (outcome.tokens, outcome.reason) == (expected[:count], LENGTH)
        assert outcome.num_responses == 1 + -(-(count - 1) // (1 + draft_len))


@pytest.mark.parametrize("max_seq_len", [20, 21, 23])
@draft_lens
@loops
def test_max_seq_len_is_filled_and_never_passed(max_seq_len, draft_len, plain) -> None:
    """In blocks that hold exactly so much; the model checks that it writes to none beyond."""
    blocks = -(-max_seq_len // BLOCK)
    scripts = [[VOCAB], [0], [1, draft_len, 0]]
    engine = drafting(
        draft_len,
        plain,
        script=in_turns(*scripts),
        max_seq_len=max_seq_len,
        max_batch_size=1,
        num_blocks=dict.fromkeys(Role, blocks),
    )
    for room, _ in itertools.product(range(1, draft_len + 3), scripts):
        asked = prompt(max_seq_len - room, room)
        request = engine.add(asked, max_tokens=None if room % 2 else room)
        engine.step()
        assert engine.used_blocks in (0, 2 * blocks)
        outcome = step_until_end(engine, request)
        assert (outcome.tokens, outcome.reason) == (greedy_tokens(asked, room), LENGTH)


# --- stops ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("kind", ["eos", "stop id", "stop string"])
@draft_lens
@loops
def test_a_stop_cuts_a_run_at_every_place(kind, draft_len, plain, tokenizer_directory) -> None:
    """Nothing behind it is handed out or counted, and no block is kept."""
    answer = greedy_tokens(PROMPT, 2 * draft_len + 3, distinct_rule)
    text = "".join(chr(ord("!") + token) for token in answer)  # as the byte alphabet begins
    for place, token in enumerate(answer):
        string = text[max(0, place - 1) : place + 1]
        engine = drafting(
            draft_len,
            plain,
            rule=distinct_rule,
            eos=[token] if kind == "eos" else [],
            stop_tokenizer=tokenizer_directory if kind == "stop string" else None,
        )
        params, reason = {
            "eos": ({}, None),
            "stop id": ({"stop_token_ids": [token]}, token),
            "stop string": ({"stop": [string, "no"]}, string),
        }[kind]
        outcome = step_until_end(engine, engine.add(PROMPT, max_tokens=30, **params))
        assert (outcome.tokens, outcome.reason) == (answer[: place + 1], STOP)
        assert outcome.last.stop_reason == reason
        stats = final_stats(engine)
        assert stats.generated_tokens == place + 1
        assert stats.speculation.verify_steps == -(-place // (1 + draft_len))


@loops
def test_within_one_run_the_first_end_counts(plain) -> None:
    answer = greedy_tokens(PROMPT, 8, distinct_rule)
    engine = drafting(7, plain, rule=distinct_rule, eos=[answer[5]])
    for max_tokens, stop, end, reason in (
        (5, 6, 5, LENGTH),
        (6, 6, 6, STOP),  # eos
        (7, 6, 6, STOP),
        (7, 4, 5, STOP),
        (3, 4, 3, LENGTH),
    ):
        params = {"max_tokens": max_tokens, "stop_token_ids": [answer[stop]]}
        outcome = engine.generate(PROMPT, **params)
        assert (outcome.tokens, outcome.reason) == (answer[:end], reason)


# --- counters -------------------------------------------------------------------------------------


@draft_lens
@loops
def test_counters_are_the_sums_of_the_script(draft_len, plain) -> None:
    """Each request ends with the last token of a run, so that all of its accepted drafts count."""
    scripts = [
        [*range(draft_len + 1)],
        [draft_len, 0, draft_len],
        [0, 0, 1],
        [draft_len],
        [draft_len // 2, draft_len],
    ]
    engine = drafting(draft_len, plain, script=in_turns(*scripts))
    num_tokens = [1 + sum(1 + accepted for accepted in counts) for counts in scripts]
    for i, count in enumerate(num_tokens):
        engine.add(prompt(3 * i + 1), max_tokens=count)
    engine.finish()
    for i, count in enumerate(num_tokens):
        assert engine.outcomes[i].tokens == greedy_tokens(prompt(3 * i + 1), count)
        assert engine.outcomes[i].num_responses == 1 + len(scripts[i])
    stats, counts = final_stats(engine), list(itertools.chain(*scripts))
    assert stats.generated_tokens == sum(num_tokens)
    assert stats.prompt_tokens == sum(3 * i + 1 for i in range(len(scripts)))
    assert stats.speculation.verify_steps == len(counts)
    assert stats.speculation.accepted_drafts == by_place(counts, draft_len)


# --- mixed batches --------------------------------------------------------------------------------


@loops
@pytest.mark.parametrize(
    "params", [{"max_tokens": 3}, {"stop_token_ids": greedy_tokens(PROMPT, 3)[2:]}]
)
def test_drafts_behind_the_end_are_not_counted(params, plain) -> None:
    """One token of the prompt's step, then a run of eight of which two are handed out."""
    engine = drafting(7, plain, script=in_turns([7]))
    engine.generate(PROMPT, **params)
    stats = final_stats(engine)
    counts = (
        stats.generated_tokens,
        stats.speculation.verify_steps,
        stats.speculation.accepted_drafts,
    )
    assert counts == (3, 1, (1, 1, 0, 0, 0, 0, 0))


@loops
def test_chunks_take_the_room_beside_verify_rows(plain) -> None:
    """Of 13 tokens a generation takes 4, so that two blocks of a prompt fit beside it."""
    engine = drafting(3, plain, max_num_tokens=13)
    first = engine.add(prompt(1), max_tokens=17)
    engine.step()
    second = engine.add(prompt(20), max_tokens=9)
    engine.finish()
    assert engine.model.steps[:5] == [([1], 0), ([8], 1), ([8], 1), ([4], 1), ([], 2)]
    assert engine.outcomes[first].tokens == greedy_tokens(prompt(1), 17)
    assert engine.outcomes[second].tokens == greedy_tokens(prompt(20), 9)


def test_no_more_requests_than_verify_rows_fit() -> None:
    engine = drafting(3, plain=True, max_num_tokens=11)
    for i in range(4):
        engine.add(prompt(2, i), max_tokens=9)
    engine.finish()
    assert max(generations for _, generations in engine.model.steps) == 2


requests = st.fixed_dictionaries(
    {
        "length": st.integers(1, 40),
        "max_tokens": st.integers(1, 24),
        "stop": st.none() | st.integers(0, VOCAB - 1),
        "script": st.lists(st.integers(0, 7), min_size=1, max_size=6),
        "steps": st.integers(0, 5),  # before the next request comes
        "cancelled": st.none() | st.integers(0, 5),  # who is cancelled then
    }
)


@settings(max_examples=80)
@given(
    draft_len=st.integers(1, 7),
    plain=st.booleans(),
    traffic=st.lists(requests, min_size=1, max_size=6),
    max_num_tokens=st.integers(8, 32),
    max_batch_size=st.integers(1, 4),
    tokens_per_block=st.integers(1, 9),
    spare=st.integers(0, 20),
)
def test_any_traffic_with_any_script_gives_greedy_tokens(
    draft_len: int,
    plain: bool,
    traffic: list[dict],
    max_num_tokens: int,
    max_batch_size: int,
    tokens_per_block: int,
    spare: int,
) -> None:
    script = in_turns(*[asked["script"] for asked in traffic])
    engine = drafting(
        draft_len,
        plain,
        script=script,
        max_num_tokens=max_num_tokens,
        max_batch_size=max_batch_size,
        tokens_per_block=tokens_per_block,
        num_blocks=dict.fromkeys(Role, -(-64 // tokens_per_block) + spare),
    )
    for i, asked in enumerate(traffic):
        stops = None if asked["stop"] is None else [asked["stop"]]
        engine.add(prompt(asked["length"], i), max_tokens=asked["max_tokens"], stop_token_ids=stops)
        for _ in range(asked["steps"]):
            engine.step()
        if asked["cancelled"] is not None:
            engine.executor.cancel([asked["cancelled"]])
    engine.finish()
    counts: list[int] = []
    for i, asked in enumerate(traffic):
        outcome = engine.outcomes[i]
        expected = greedy_tokens(prompt(asked["length"], i), asked["max_tokens"])
        if outcome.reason is CANCELLED:
            expected = expected[: len(outcome.tokens)]
            assert asked["stop"] not in expected
        elif asked["stop"] in expected:
            expected = expected[: expected.index(asked["stop"]) + 1]
            assert outcome.reason is STOP
        assert outcome.tokens == expected
        counts += accepted_counts(script, i, draft_len, len(expected))
    stats = final_stats(engine)
    assert stats.generated_tokens == sum(len(o.tokens) for o in engine.outcomes.values())
    assert stats.speculation.verify_steps == len(counts)


# --- ends while a step is in flight ---------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 7], ids=["rejecting", "accepting"])
@draft_lens
def test_an_ended_request_in_flight_leaves_its_row_to_the_next(draft_len, late) -> None:
    """One row and the blocks of one request: the last step of the first one, which ended before
    that was known, leaves its tokens, keys and correction where the second one begins."""
    answer = greedy_tokens(PROMPT, 3, distinct_rule)
    script = in_turns([draft_len, late], [0, draft_len, 1])
    engine = drafting(
        draft_len,
        plain=False,
        rule=distinct_rule,
        script=script,
        eos=[answer[1]],
        max_seq_len=20,
        max_batch_size=1,
        num_blocks=dict.fromkeys(Role, 5),
    )
    first = engine.add(PROMPT)
    second = engine.add(PROMPT[:2], max_tokens=18, ignore_eos=True)
    engine.finish()
    assert engine.model.steps[:5] == [([5], 0), ([], 1), ([], 1), ([2], 0), ([], 1)]
    assert (engine.outcomes[first].tokens, engine.outcomes[first].reason) == (answer[:2], STOP)
    assert engine.outcomes[second].tokens == greedy_tokens(PROMPT[:2], 18, distinct_rule)
    stats = final_stats(engine)
    assert stats.generated_tokens == 2 + 18
    assert stats.speculation.verify_steps == 1 + len(accepted_counts(script, second, draft_len, 18))


@draft_lens
def test_no_step_is_launched_once_the_last_token_is_certain(draft_len) -> None:
    """The prompt's step brings one token, the verify steps 1 + draft_len and one."""
    engine = drafting(draft_len, plain=False, script=in_turns([draft_len, 0]))
    for _ in range(2):
        engine.generate(PROMPT, max_tokens=draft_len + 3)
    assert engine.model.steps == [([5], 0), ([], 1), ([], 1)] * 2


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("draft_len", [1, 3, 7])
@loops
def test_cancel_between_any_two_steps(steps, draft_len, plain) -> None:
    """While a chunk or verify rows are in flight; another request takes row and blocks at once."""
    script = in_turns([draft_len, 0, 1], [0, draft_len])
    engine = drafting(
        draft_len,
        plain,
        script=script,
        max_seq_len=40,
        max_num_tokens=8,
        max_batch_size=1,
        num_blocks=dict.fromkeys(Role, 10),
    )
    first = engine.add(prompt(12))
    for _ in range(steps):
        engine.step()
    in_flight = len(engine.model.steps) - engine.executor.stats().iter
    assert in_flight == (steps > 0 and not plain)
    engine.executor.cancel([first])
    assert engine.used_blocks == 0
    second = engine.add(prompt(9, 2), max_tokens=20)
    engine.finish()
    cancelled, other = engine.outcomes[first], engine.outcomes[second]
    assert cancelled.reason is CANCELLED
    assert cancelled.tokens == greedy_tokens(prompt(12), len(cancelled.tokens))
    assert (other.tokens, other.reason) == (greedy_tokens(prompt(9, 2), 20), LENGTH)
    stats = final_stats(engine)
    assert stats.generated_tokens == len(cancelled.tokens) + 20
    assert stats.speculation.verify_steps == sum(
        len(accepted_counts(script, request, draft_len, len(engine.outcomes[request].tokens)))
        for request in (first, second)
    )


# --- sampling on the host -------------------------------------------------------------------------

SAMPLED = [
    {},
    {"temperature": 0.7, "seed": 3, "logprobs": 2},
    {"logprobs": 0},
    {"temperature": 0.9, "seed": 4, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
    {},
    {"min_tokens": 6},
]


def sampled_outcomes(draft_len: int, plain: bool) -> list[Outcome]:
    """Greedy requests run before, beside and after those that the host samples for."""
    engine = drafting(draft_len, plain, eos=[7, 20], max_num_tokens=40)
    for i, params in enumerate(SAMPLED):
        engine.add(prompt(4 * i + 1, i), max_tokens=14, **params)
        for _ in range(2 + i % 2):
            engine.step()
    engine.finish()
    stats = final_stats(engine).speculation
    accepted = stats.accepted_drafts if stats else ()
    assert len(accepted) == draft_len and all(accepted[:1])
    return list(engine.outcomes.values())


@pytest.mark.parametrize("draft_len", [1, 3, 7])
@loops
def test_sampling_beside_greedy_requests_does_not_notice_drafts(draft_len, plain) -> None:
    expected = sampled_outcomes(0, plain=True)
    for outcome, other in zip(sampled_outcomes(draft_len, plain), expected, strict=True):
        assert outcome.tokens == other.tokens
        assert outcome.logprobs == other.logprobs
        assert outcome.reason == other.reason


@pytest.mark.parametrize("params", SAMPLED[1:4])
@loops
def test_a_run_of_sampled_tokens_is_cut_at_every_place(params, plain) -> None:
    expected = drafting(0, plain=True).generate(PROMPT, max_tokens=12, **params)
    engine = drafting(5, plain)
    for count in range(1, 13):
        outcome = step_until_end(engine, engine.add(PROMPT, max_tokens=count, **params))
        assert outcome.tokens == expected.tokens[:count]
        assert outcome.logprobs == expected.logprobs[:count]
    assert final_stats(engine).generated_tokens == sum(range(1, 13))
    assert sum(final_stats(engine).speculation.accepted_drafts)


# --- broken rows ----------------------------------------------------------------------------------


def rule_along(answer: Sequence[int]) -> Rule:
    """Broken logits for what begins with PROMPT, except on the way to `answer`."""

    def rule(history: Sequence[int]) -> torch.Tensor:
        generated = list(history[len(PROMPT) :])
        on_the_way = len(generated) < len(answer) and generated == answer[: len(generated)]
        sound = on_the_way or history[: len(PROMPT)] != PROMPT
        return random_rule(history) + (0.0 if sound else torch.nan)

    return rule


@pytest.mark.parametrize("params", [{}, {"logprobs": 0}], ids=["greedy", "host"])
@draft_lens
@loops
def test_rows_that_do_not_count_may_be_broken(params, draft_len, plain) -> None:
    """Those after a wrong draft, and those after the end of the request."""
    answer = greedy_tokens(PROMPT, 12)
    script = in_turns([*range(draft_len + 1)], [draft_len])
    engine = drafting(draft_len, plain, rule=rule_along(answer), script=script)
    for _ in range(2):
        outcome = engine.generate(PROMPT, max_tokens=12, **params)
        assert (outcome.tokens, outcome.reason) == (answer, LENGTH)


@pytest.mark.parametrize("params", [{}, {"logprobs": 0}], ids=["greedy", "host"])
@pytest.mark.parametrize("broken", range(1, 8))
@loops
def test_a_broken_row_fails_its_request_after_the_tokens_before_it(params, broken, plain) -> None:
    """At every place of two runs; the other request goes on."""
    answer = greedy_tokens(PROMPT, broken)
    engine = drafting(3, plain, rule=rule_along(answer))
    bad, good = (engine.add(asked, max_tokens=12, **params) for asked in (PROMPT, [9]))
    engine.finish()
    outcome = engine.outcomes[bad]
    assert (outcome.tokens, outcome.reason) == (answer, ERROR)
    assert outcome.last.error == f"logits of request {bad} contain NaN"
    assert engine.outcomes[good].tokens == greedy_tokens([9], 12)
    stats = final_stats(engine)
    assert (stats.generated_tokens, stats.nan_failures) == (broken + 12, 1)
