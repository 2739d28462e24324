"""Drafting changes how many steps an answer takes, and nothing else."""

import itertools
from pathlib import Path

import pytest
import torch
from helpers.cells import Cell, Outcome, Questions, run_cells, wrong_cells
from helpers.engine import executor_config, generate, make_engine, run_requests
from helpers.glm_oracle import with_config
from helpers.glm_tiny import CHECKPOINT, prompts

from tensorrt_llm._torch.pyexecutor.messages import (
    FinishReason,
    LlmResponse,
    NewRequest,
    SpeculationStats,
)
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.speculative.forced_acceptance import ENV, ForcedAcceptance
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.sampling_params import SamplingParams

NEW_TOKENS = 40
GRAPHS = [(), (1, 4)]


def engine(**overrides: object) -> PyExecutor:
    return make_engine(executor_config(CHECKPOINT, max_seq_len=256, **overrides))


def answer(executor: PyExecutor, asked: list[list[int]], **params: object) -> list[list[int]]:
    """Tokens of all prompts together, up to the model's own stop."""
    return run_requests(executor, asked, SamplingParams(max_tokens=60, **params))


def verified(executor: PyExecutor) -> SpeculationStats:
    """By the engine since its start."""
    stats = executor.stats().speculation
    assert stats is not None
    return stats


def stats_of_answers(draft_len: int) -> SpeculationStats:
    executor = engine(max_draft_len=draft_len)
    answer(executor, prompts(24)[1:])
    return verified(executor)


CELLS = list(itertools.product((0, 1, 3, 7), (True, False)))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generate(engine(), prompts(8), NEW_TOKENS)


@pytest.mark.parametrize(("draft_len", "plain"), [*CELLS, (11, False)])
def test_tokens_do_not_depend_on_drafting(draft_len, plain, expected) -> None:
    """Alone and in a batch with chunked prompts; the plain and the overlapped loop."""
    executor = engine(
        max_draft_len=draft_len,
        disable_overlap_scheduler=plain,
        max_num_tokens=40,
        max_batch_size=4,
    )
    assert [generate(executor, [p], NEW_TOKENS)[0] for p in prompts(8)] == expected
    assert generate(executor, prompts(8), NEW_TOKENS) == expected


@pytest.fixture(scope="module")
def by_topk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The shipped checkpoint, whose choice of keys bites, and with every key chosen."""
    every_key = tmp_path_factory.mktemp("topk") / "every_key"
    return {
        "as shipped": CHECKPOINT,
        "every key": with_config(CHECKPOINT, every_key, index_topk=256),
    }


@pytest.fixture(scope="module")
def expected_by_topk(by_topk, expected) -> dict[str, list[list[int]]]:
    every_key = make_engine(executor_config(by_topk["every key"], max_seq_len=256))
    return {"as shipped": expected, "every key": generate(every_key, prompts(8), NEW_TOKENS)}


def cuda_cells(
    checkpoints: dict[str, Path], draft_len: int, trim: str, alone: int, **settings: object
) -> dict[Cell, Outcome]:
    torch.backends.cuda.matmul.allow_tf32 = False
    questions = Questions(prompts(8), NEW_TOKENS, alone=alone, batched=8)
    settings = {"device": "cuda", "max_seq_len": 256, **settings}
    return run_cells(Mapping(), checkpoints, [draft_len], trim, questions, settings)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", GRAPHS, ids=["eager", "graphs"])
@pytest.mark.parametrize("trim", ["1", "0"])
@pytest.mark.parametrize("draft_len", [0, 1, 2, 3, 5, 7])
def test_cuda_tokens_do_not_depend_on_drafting(
    draft_len, trim, graphs, by_topk, expected_by_topk
) -> None:
    """Both loops, prompts whole and in chunks, alone and in batches, below and above index_topk."""
    outcomes = cuda_cells(by_topk, draft_len, trim, 2, cuda_graph_batch_sizes=graphs)
    wrong = wrong_cells(outcomes, expected_by_topk)
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
def test_cuda_bf16_tokens_do_not_depend_on_graphs_loop_or_trim(by_topk) -> None:
    """One request at a time: the same shapes in every step, hence the same bits."""
    answers: dict[tuple[str, bool], list[dict[int, list[int]]]] = {}
    for graphs, trim in itertools.product(GRAPHS, ["1", "0"]):
        outcomes = cuda_cells(by_topk, 3, trim, 8, dtype="bfloat16", cuda_graph_batch_sizes=graphs)
        for cell, outcome in outcomes.items():
            answers.setdefault((cell.checkpoint, cell.chunked), []).append(outcome.alone)
    for group, alone in answers.items():
        assert all(tokens == alone[0] for tokens in alone), group


@pytest.mark.parametrize(("draft_len", "least"), [(3, 2.5), (7, 3.2)])
def test_acceptance_length_on_heldout_prompts(draft_len, least) -> None:
    stats = stats_of_answers(draft_len)
    assert stats.acceptance_length is not None
    assert stats.acceptance_length >= least
    assert list(stats.accepted_drafts) == sorted(stats.accepted_drafts, reverse=True)


SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "logprobs": 2, "frequency_penalty": 0.2}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("draft_len", [1, 4])
def test_sampling_means_the_same_with_drafts(draft_len, plain) -> None:
    """Temperature, filters, penalties and the seed's stream do not notice the drafts."""
    asked = prompts(5)
    expected = answer(engine(), asked, **SAMPLED)
    executor = engine(max_draft_len=draft_len, disable_overlap_scheduler=plain)
    assert answer(executor, asked, **SAMPLED) == expected


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6])
def test_max_tokens_and_stop_ids_cut_inside_an_accepted_run(max_tokens, plain, expected) -> None:
    executor = engine(max_draft_len=4, disable_overlap_scheduler=plain)
    for prompt, tokens in list(zip(prompts(8), expected, strict=True))[3:5]:
        assert generate(executor, [prompt], max_tokens) == [tokens[:max_tokens]]
        stop = tokens[max_tokens]
        until = tokens[: tokens.index(stop) + 1]
        params = {"ignore_eos": True, "stop_token_ids": [stop]}
        assert answer(executor, [prompt], **params) == [until]


def test_drafts_never_pass_the_end_of_a_sequence() -> None:
    """Prompt and output fill max_seq_len exactly: rows past it write nowhere and bring nothing."""
    prompt = prompts(8)[-1]
    room = len(prompt) + 13
    settings = {"max_seq_len": room, "kv_cache_max_tokens": room, "max_batch_size": 1}
    tokens = [
        generate(
            make_engine(executor_config(CHECKPOINT, max_draft_len=k, **settings)), [prompt], 13
        )
        for k in (0, 7)
    ]
    assert tokens[0] == tokens[1]


def last_responses(executor: PyExecutor, messages: list[NewRequest]) -> list[LlmResponse]:
    """Of each request, in their order; no other response says how drafts fared."""
    executor.add_requests(messages)
    last: dict[int, LlmResponse] = {}
    while executor.has_work:
        for news in executor.step():
            if isinstance(news, LlmResponse):
                if news.finish_reason:
                    last[news.request_id] = news
                else:
                    assert news.speculation is None
    return [last[message.request_id] for message in messages]


@pytest.mark.parametrize("plain", [True, False])
def test_each_request_counts_its_own_drafts(plain) -> None:
    """Siblings too: together they are what the engine has counted."""
    executor = engine(max_draft_len=3, disable_overlap_scheduler=plain)
    greedy = SamplingParams(max_tokens=60)
    sampled = SamplingParams(max_tokens=60, temperature=1.0, seed=5)
    asked = prompts(5)[1:]
    last = last_responses(
        executor,
        [NewRequest(i, prompt, greedy) for i, prompt in enumerate(asked)]
        + [NewRequest(100 + k, asked[0], sampled, choice=k) for k in range(2)],
    )
    counted = [response.speculation for response in last]
    assert all(stats is not None and stats.verify_steps for stats in counted)
    assert SpeculationStats.total(counted) == verified(executor)
    alone = [last_responses(executor, [NewRequest(0, prompt, greedy)])[0] for prompt in asked]
    assert [response.speculation for response in alone] == counted[: len(asked)]


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        (1, SpeculationStats(0, (0, 0, 0, 0))),
        (2, SpeculationStats(1, (1, 0, 0, 0))),
        (3, SpeculationStats(1, (1, 1, 0, 0))),
        (4, SpeculationStats(1, (1, 1, 0, 0))),
        (5, SpeculationStats(2, (2, 1, 0, 0))),
    ],
)
def test_a_stop_inside_an_accepted_run_ends_the_count(
    max_tokens, expected, plain, monkeypatch
) -> None:
    """Two of four drafts are accepted: one token from the prompt, then three of each step."""
    monkeypatch.setenv(ENV, "2")
    executor = engine(max_draft_len=4, disable_overlap_scheduler=plain)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    (last,) = last_responses(executor, [NewRequest(0, prompts(4)[1], params)])
    assert last.speculation == verified(executor) == expected


@pytest.mark.parametrize("plain", [True, False])
def test_a_cancelled_request_says_what_was_verified(plain) -> None:
    executor = engine(max_draft_len=3, disable_overlap_scheduler=plain)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    executor.add_requests([NewRequest(0, prompts(4)[1], params)])
    for _ in range(6):
        executor.step()
    executor.cancel([0])
    (last,) = [news for news in executor.step() if isinstance(news, LlmResponse)]
    assert last.finish_reason is FinishReason.CANCELLED
    assert last.speculation is not None and last.speculation.verify_steps in (4, 5)
    while executor.has_work:
        executor.step()
    assert verified(executor) == last.speculation


def test_without_drafts_nothing_is_counted() -> None:
    executor = engine()
    (last,) = last_responses(executor, [NewRequest(0, [5], SamplingParams(max_tokens=2))])
    assert last.speculation is None and executor.stats().speculation is None


def test_a_refused_request_says_nothing_about_drafts() -> None:
    executor = engine(max_draft_len=1)
    executor.add_requests([NewRequest(0, [], SamplingParams())])
    last = executor.step()[0]
    assert isinstance(last, LlmResponse)
    assert (last.finish_reason, last.speculation) == (FinishReason.ERROR, None)


def test_forced_acceptance_sets_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "2")
    executor = engine(max_draft_len=3)
    generate(executor, prompts(4), 31)
    stats = verified(executor)
    assert stats.accepted_drafts == (stats.verify_steps, stats.verify_steps, 0)


def test_forced_acceptance_draws_its_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.6: two drafts always, the third in 60 % of the steps; the same draws every time."""
    monkeypatch.setenv(ENV, "2.6")
    seen = []
    for _ in range(2):
        executor = engine(max_draft_len=3)
        generate(executor, [prompts(4)[1]], 150)
        seen.append(verified(executor))
    assert seen[0].accepted_drafts == seen[1].accepted_drafts
    steps, third = seen[0].verify_steps, seen[0].accepted_drafts[2]
    # Four standard deviations of a binomial count.
    assert abs(third - 0.6 * steps) <= 4 * (0.24 * steps) ** 0.5


@pytest.mark.parametrize("value", ["two", "-1", "nan", "inf", "1,5"])
def test_forced_acceptance_refuses_what_is_no_count(value, monkeypatch) -> None:
    monkeypatch.setenv(ENV, value)
    with pytest.raises(ValueError, match=f"{ENV} is '{value}'"):
        ForcedAcceptance.from_env()
