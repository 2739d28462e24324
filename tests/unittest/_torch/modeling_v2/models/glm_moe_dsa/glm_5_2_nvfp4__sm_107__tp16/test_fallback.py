"""Steps that the fast path does not serve: the same tokens as without the target, and the counters
say which way each step went."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import pytest
from helpers.engine import executor_config, generate, make_engine, rescheduled
from helpers.glm_tiny import CHECKPOINT, prompts

from tensorrt_llm._torch.pyexecutor.messages import LlmResponse, NewRequest, PathCounts
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.speculative.interface import SpecOutputs
from tensorrt_llm.sampling_params import SamplingParams

ASKED = prompts(8)
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "frequency_penalty": 0.2}
PLAIN = pytest.mark.parametrize("plain", [True, False], ids=["plain", "overlap"])


def ask(request_id: int, new_tokens: int, choice: int = 0, **params: Any) -> NewRequest:
    """Every request id has its prompt, siblings that of id 0."""
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True, **params)
    prompt = ASKED[-1 - (0 if choice else request_id)]
    return NewRequest(request_id, prompt, sampling, choice=choice)


@dataclass(frozen=True)
class Play:
    """Who comes and who is cancelled, by the number of the step before which it happens."""

    comes: dict[int, Sequence[NewRequest]]
    cancelled: dict[int, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


class Step(NamedTuple):
    contexts: int
    generations: int

    @property
    def fast(self) -> bool:
        return self == (0, 1)


PLAYS = {
    "batch": Play({0: [ask(0, 9), ask(1, 13), ask(2, 17), ask(3, 24)]}),
    "chunks beside generations": Play(
        {0: [ask(0, 40)], 5: [ask(1, 16)], 7: [ask(2, 3)]}, settings={"max_num_tokens": 16}
    ),
    "whole prompts": Play(
        {0: [ask(0, 18)], 3: [ask(1, 9)], 4: [ask(2, 5)]},
        settings={"enable_chunked_prefill": False},
    ),
    "joins and leaves": Play({0: [ask(0, 36)], 4: [ask(1, 6)]}),
    "sampled beside greedy": Play(
        {0: [ask(0, 14), ask(1, 16, **SAMPLED)], 4: [ask(2, 24, **SAMPLED)]}
    ),
    "siblings": Play({0: [ask(0, 16, **SAMPLED), ask(1, 10, choice=1, **SAMPLED)]}),
    "cancelled": Play({0: [ask(0, 60)], 5: [ask(1, 24), ask(2, 60)]}, cancelled={5: 0, 8: 2}),
}
UNMIXED = ("siblings", "cancelled")  # no prompt meets a generation


@cache
def model(mode: str, draft_len: int) -> PyExecutor:
    """One for all tests, which run loops of their own around it."""
    return make_engine(
        executor_config(
            CHECKPOINT,
            modeling_v2=mode,
            max_draft_len=draft_len,
            max_seq_len=128,
            max_num_tokens=64,
            max_batch_size=4,
        )
    )


def play(executor: PyExecutor, what: Play) -> tuple[dict[int, list[int]], list[Step]]:
    """(tokens by request id, the steps)."""
    worker = executor.model_engine.worker
    forward, steps, tokens, number = worker.forward, list[Step](), dict[int, list[int]](), 0

    def watched(*args: Any) -> SpecOutputs:
        steps.append(Step(args[4].num_contexts, args[4].num_generations))
        return forward(*args)

    worker.forward = watched
    while executor.has_work or number <= max(what.comes):
        executor.add_requests(what.comes.get(number, ()))
        executor.cancel([what.cancelled[number]] if number in what.cancelled else ())
        for news in executor.step():
            if isinstance(news, LlmResponse):
                assert news.error is None, news.error
                tokens.setdefault(news.request_id, []).extend(news.token_ids)
        number += 1
    worker.forward = forward
    return tokens, steps


def compare(draft_len: int, what: Play, plain: bool) -> list[Step]:
    """Play with and without the target; the same tokens by the same steps, and right counters.

    Returns:
        the steps.
    """
    settings = {"disable_overlap_scheduler": plain, **what.settings}
    builtin = play(rescheduled(model("off", draft_len), **settings), what)
    target = rescheduled(model("require", draft_len), **settings)
    tokens, steps = play(target, what)
    assert (tokens, steps) == builtin
    asked = {m.request_id: m.sampling_params.max_tokens for ms in what.comes.values() for m in ms}
    for request_id, count in asked.items():
        cancelled = request_id in what.cancelled.values()
        assert (
            0 < len(tokens[request_id]) < count if cancelled else len(tokens[request_id]) == count
        )
    decodes = [step.fast for step in steps if not step.contexts]
    counts = PathCounts(fast=sum(decodes), builtin=len(decodes) - sum(decodes))
    parts = ("target", "draft") if draft_len else ("target",)
    assert target.stats().generation_steps == dict.fromkeys(parts, counts)
    return steps


@PLAIN
@pytest.mark.parametrize("name", PLAYS)
def test_tokens_and_counters(name, plain) -> None:
    """Each play has steps of both kinds."""
    steps = compare(3, PLAYS[name], plain)
    assert {step.fast for step in steps if not step.contexts} == {True, False}
    beside = any(step.contexts and step.generations for step in steps)
    assert beside == (name not in UNMIXED)


@pytest.mark.parametrize("name", ["batch", "joins and leaves", "sampled beside greedy"])
def test_tokens_and_counters_without_drafts(name) -> None:
    compare(0, PLAYS[name], plain=False)


@PLAIN
def test_a_request_that_joins_and_leaves_changes_the_path_twice(plain) -> None:
    steps = compare(3, PLAYS["joins and leaves"], plain)
    paths = [step.fast for step in steps if not step.contexts]
    changes = [i for i, (a, b) in enumerate(zip(paths, paths[1:], strict=False)) if a != b]
    assert paths[0] and paths[-1] and len(changes) == 2


@PLAIN
def test_more_rows_than_the_fast_step_has(plain, logged) -> None:
    """Nine with K 8: every step is the built-in modules' and loop's."""
    settings = {"disable_overlap_scheduler": plain, "max_draft_len": 8, "max_seq_len": 128}
    target, builtin = (
        make_engine(executor_config(CHECKPOINT, modeling_v2=mode, **settings))
        for mode in ("require", "off")
    )
    for asked in (ASKED[-1:], ASKED[1:3]):
        assert generate(target, asked, 20) == generate(builtin, asked, 20)
    counts = target.stats().generation_steps
    assert counts["target"] == counts["draft"] and counts["target"].builtin >= 4
    assert counts["target"].fast == 0
    told = [message for message in logged.messages if message.startswith("modeling_v2: ")]
    for what in (
        "a decode step with 9 rows runs the built-in modules",
        "drafting with a verify step of the built-in modules runs the built-in loop",
    ):
        assert told.count(f"modeling_v2: {what}") == 1
