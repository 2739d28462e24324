"""The engine's drafts, and how many of them are right, against the MTP layer's definition in
float64."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import glm_tiny
from helpers.engine import executor_config, generate, make_engine, run_requests, verified_drafts
from helpers.glm_oracle import (
    SMALL_WITH_MTP,
    TRANSFORMERS_LATENT_EPS,
    load_oracle,
    make_checkpoint,
    make_drafts_agree,
    oracle_final_hidden,
    random_prompt,
    with_config,
)
from helpers.numerics import Float64, to_numpy
from helpers.reference_glm import DraftChain, ReferenceGlm

from tensorrt_llm._torch.models.model_config import eos_token_ids
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.pyexecutor.step import SequenceResult
from tensorrt_llm.sampling_params import SamplingParams

MOST_DRAFTS = 7
NEW_TOKENS = 20
# Of a random model's drafts hardly any is right, but each depends on everything; of the others many
# are.
CHECKPOINTS = ("random", "agreeing", "glm_tiny")


@dataclass(frozen=True)
class Sequence:
    """A prompt and the engine's greedy tokens, which other tests compare with transformers."""

    tokens: list[int]
    prompt_len: int
    hidden: list[Float64]

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.prompt_len]


@dataclass(frozen=True)
class Case:
    """A checkpoint, and for each sequence what the reference drafts after so many tokens."""

    directory: Path
    sequences: list[Sequence]
    drafts: list[dict[int, list[int]]]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Case]:
    """By name and `index_share_for_mtp_iteration`, made at the first use."""
    root = tmp_path_factory.mktemp("chains")
    random, agreeing = (
        # With this seed no key choice of the reference is within fp32 noise of the next best.
        make_checkpoint(root / name, "glm52", seed=6, **SMALL_WITH_MTP)
        for name in ("random", "agreeing")
    )
    make_drafts_agree(agreeing)
    sources = {"random": random, "agreeing": agreeing, "glm_tiny": glm_tiny.CHECKPOINT}

    @functools.cache
    def sequences_of(name: str) -> list[Sequence]:
        prompts = [random_prompt(n, seed=n) for n in (1, 7, 20, 45)]
        if name == "glm_tiny":
            prompts = [prompt for prompt, _ in glm_tiny.heldout(every=90)]
        return reference_sequences(sources[name], prompts)

    @functools.cache
    def make(name: str, index_share: bool) -> Case:
        directory = with_config(
            sources[name],
            root / f"{name}_{index_share}",
            index_share_for_mtp_iteration=index_share,
        )
        model = reference(directory)
        drafts = [
            dict(drafts_along(model, index_share, s.tokens, s.hidden, s.prompt_len + 1))
            for s in sequences_of(name)
        ]
        return Case(directory, sequences_of(name), drafts)

    return make


def reference(directory: Path) -> ReferenceGlm:
    return ReferenceGlm(directory, latent_eps=TRANSFORMERS_LATENT_EPS)


def reference_sequences(directory: Path, prompts: list[list[int]]) -> list[Sequence]:
    engine, model = make_engine(executor_config(directory)), reference(directory)
    sequences = []
    for prompt, answer in zip(prompts, generate(engine, prompts, NEW_TOKENS), strict=True):
        tokens = prompt + answer
        sequences.append(Sequence(tokens, len(prompt), model.hidden_states(tokens)))
    return sequences


def drafts_along(
    model: ReferenceGlm,
    index_share: bool,
    sequence: list[int],
    hidden: list[Float64],
    first: int,
) -> Iterator[tuple[int, list[int]]]:
    """(known tokens, `MOST_DRAFTS` tokens after them) for `first` known tokens and more."""
    chain = DraftChain(model, index_share)
    for known in range(2, len(sequence) + 1):
        chain.extend(hidden[known - 2], sequence[known - 1])
        if known >= first:
            yield known, chain.drafts(MOST_DRAFTS)


def record_results(engine: PyExecutor) -> dict[int, list[SequenceResult]]:
    """From now on the results of each request's steps, but for chunks that do not end a prompt."""
    results: dict[int, list[SequenceResult]] = {}
    launch = engine.model_engine.launch

    def launch_and_look(batch, choose=None):
        requests = batch.context_requests + batch.generation_requests
        counts = [r.is_last_chunk for r in batch.context_requests]
        counts += [True] * len(batch.generation_requests)
        handle = launch(batch, choose)
        for request, result, count in zip(requests, handle.wait(), counts, strict=True):
            if count:
                results.setdefault(request.request_id, []).append(result)
        return handle

    engine.model_engine.launch = launch_and_look
    return results


@pytest.mark.parametrize("draft_len", range(1, MOST_DRAFTS + 1))
@pytest.mark.parametrize("index_share", [True, False], ids=["share", "own_index"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_drafts_equal_the_reference(name, index_share, draft_len, case) -> None:
    """After prompts in chunks, and after steps that accepted some of their drafts or none."""
    asked = case(name, index_share)
    engine = make_engine(
        executor_config(
            asked.directory,
            max_draft_len=draft_len,
            max_num_tokens=40,
            disable_overlap_scheduler=False,
        )
    )
    results = record_results(engine)
    generate(engine, [s.prompt for s in asked.sequences], NEW_TOKENS)
    accepted = set()
    for i, sequence in enumerate(asked.sequences):
        known, end = sequence.prompt_len, len(sequence.tokens)
        for result in results[i]:
            known += len(result.token_ids)
            if known + draft_len > end:  # draft rows past the end of a sequence bring nothing
                break
            accepted.add(len(result.token_ids) - 1)
            assert result.draft_token_ids == asked.drafts[i][known][:draft_len], (i, known)
    if name != "random":
        assert min(accepted) < draft_len and max(accepted) > 0
        assert draft_len == 1 or any(0 < n < draft_len for n in accepted)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_index_share_changes_the_drafts(name, case) -> None:
    """All but the first; else the test above would not tell the two ways apart."""
    differ = False
    for shared, own in zip(case(name, True).drafts, case(name, False).drafts, strict=True):
        assert all(shared[known][0] == own[known][0] for known in shared)
        differ = differ or shared != own
    assert differ


# --- acceptance -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A greedy answer of transformers and what the reference drafts from its hidden states.

    Attributes:
        tokens: prompt and answer, and what would follow after the stop.
        known: tokens after which the first drafts are verified: the prompt and one more.
        drafts: known tokens -> `MOST_DRAFTS` tokens after them.
    """

    tokens: list[int]
    known: int
    drafts: dict[int, list[int]]


LONGEST_ANSWER = 33
STOPS = set(eos_token_ids(glm_tiny.CHECKPOINT))


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    """Of held-out questions; that the engine's tokens are transformers' is checked here."""
    oracle, model = load_oracle(glm_tiny.CHECKPOINT), reference(glm_tiny.CHECKPOINT)
    share = model.config["index_share_for_mtp_iteration"]
    prompts = [prompt for prompt, _ in glm_tiny.heldout(every=45)]
    engine = make_engine(executor_config(glm_tiny.CHECKPOINT, max_seq_len=256))
    made = []
    for prompt, answer in zip(
        prompts, generate(engine, prompts, LONGEST_ANSWER + MOST_DRAFTS), strict=True
    ):
        tokens, known = prompt + answer, len(prompt) + 1
        hidden = oracle_final_hidden(oracle, tokens)
        assert answer == oracle.lm_head(hidden[known - 2 : -1]).argmax(-1).tolist()
        drafts = dict(drafts_along(model, share, tokens, list(to_numpy(hidden)), known))
        made.append(Answer(tokens, known, drafts))
    return made


def count_accepted(answer: Answer, draft_len: int) -> tuple[int, list[int]]:
    """(verify steps up to the answer's stop, how often each draft of a run was right); drafts
    behind the stop do not count."""
    known, steps, accepted = answer.known, 0, [0] * draft_len
    while not STOPS & set(answer.tokens[answer.known - 1 : known]):
        assert known + draft_len < len(answer.tokens), "the answer is longer than expected"
        right = 0
        while right < draft_len and answer.drafts[known][right] == answer.tokens[known + right]:
            accepted[right] += 1
            right += 1
            if answer.tokens[known + right - 1] in STOPS:
                break
        steps += 1
        known += right + 1
    return steps, accepted


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("draft_len", [3, 7])
def test_acceptance_equals_an_independent_chain(draft_len, plain, answers) -> None:
    """To the count: fp32 and float64 draft the same tokens."""
    engine = make_engine(
        executor_config(
            glm_tiny.CHECKPOINT,
            max_seq_len=256,
            max_draft_len=draft_len,
            disable_overlap_scheduler=plain,
        )
    )
    prompts = [answer.tokens[: answer.known - 1] for answer in answers]
    run_requests(engine, prompts, SamplingParams(max_tokens=2 * LONGEST_ANSWER))
    steps, accepted = zip(*(count_accepted(answer, draft_len) for answer in answers), strict=True)
    by_place = tuple(sum(counts) for counts in zip(*accepted, strict=True))
    assert verified_drafts(engine) == (sum(steps), by_place)
