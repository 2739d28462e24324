"""The decode step on real rank processes gives one rank's tokens, in fp32."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.engine import executor_config, generate, make_engine, run_ranks, verified_drafts
from helpers.glm_tiny import CHECKPOINT, heldout

from tensorrt_llm._torch.pyexecutor.messages import PathCounts
from tensorrt_llm.mapping import Mapping

INDEX_TOPK = 16
NEW_TOKENS = 5
# What 16 ranks divide; their shards of the longest prompt's 13 pages leave some without keys.
SIXTEEN_RANKS = {
    "num_hidden_layers": 8,
    "hidden_size": 128,
    "q_lora_rank": 64,
    "num_attention_heads": 16,
    "index_topk": INDEX_TOPK,
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": True,
}


@dataclass(frozen=True)
class Job:
    """Prompts for one engine, one request at a time.

    Args:
        overlap: with the overlap scheduler.
    """

    directory: Path
    draft_len: int
    lengths: tuple[int, ...]
    overlap: bool = False


@dataclass(frozen=True)
class Answer:
    tokens: list[list[list[int]]]
    drafts: tuple[int, tuple[int, ...]]
    steps: dict[str, PathCounts]


def answer(mapping: Mapping, jobs: list[Job], modeling_v2: str = "require") -> list[Answer]:
    """Of one rank."""
    answers = []
    for job in jobs:
        engine = make_engine(
            executor_config(
                job.directory,
                mapping=mapping,
                modeling_v2=modeling_v2,
                max_draft_len=job.draft_len,
                disable_overlap_scheduler=not job.overlap,
            )
        )
        tokens = [generate(engine, [prompt_of(n)], NEW_TOKENS) for n in job.lengths]
        steps = engine.stats().generation_steps
        answers.append(Answer(tokens, verified_drafts(engine), steps))
    return answers


def prompt_of(length: int) -> list[int]:
    """The end of several questions, with tokens that the random checkpoint has as well. Chosen like
    test_decode's: float64 gives the same tokens and right drafts with ties broken either way."""
    questions = [question for question, _ in heldout(every=31)]
    return [token % 256 for question in questions for token in question][-length:]


def assert_as_on_one_rank(jobs: list[Job], ranks: int) -> None:
    """Tokens and acceptance on every rank, all of it by the fast path; one rank gives the built-in
    path's."""
    expected = answer(Mapping(), jobs, "off")
    for answers in [answer(Mapping(), jobs), *run_ranks(ranks, answer, jobs)]:
        for job, found, built_in in zip(jobs, answers, expected, strict=True):
            assert found.tokens == built_in.tokens
            assert found.drafts == built_in.drafts
            steps = found.steps["target"].fast
            parts = ("target", "draft") if job.draft_len else ("target",)
            assert steps and found.steps == dict.fromkeys(parts, PathCounts(fast=steps))


def last_short(draft_len: int) -> int:
    """Tokens of the longest prompt whose first step is a short one: its rows, and the drafts after
    it, see no more keys than are chosen."""
    return INDEX_TOPK - 1 - 2 * draft_len


@pytest.mark.parametrize(("ranks", "overlap"), [(2, True), (2, False), (4, False)])
def test_tokens_on_ranks(ranks, overlap) -> None:
    """Answers across the seam and behind it. With the overlap scheduler a step starts from guessed
    lengths."""
    jobs = [
        Job(CHECKPOINT, draft_len, (last_short(draft_len), INDEX_TOPK + 1, 3 * INDEX_TOPK), overlap)
        for draft_len in (0, 3)
    ]
    assert_as_on_one_rank(jobs, ranks)


@pytest.mark.slow
def test_tokens_on_sixteen_ranks(tmp_path) -> None:
    # transformers, which the ranks can do without
    from helpers.glm_oracle import make_checkpoint, make_drafts_agree

    directory = make_checkpoint(tmp_path / "sixteen", "glm52", seed=1, **SIXTEEN_RANKS)
    make_drafts_agree(directory, kept=0.05)
    assert_as_on_one_rank([Job(directory, 3, (last_short(3), 6 * INDEX_TOPK))], ranks=16)
