"""Everything that must not change a greedy token, in all combinations."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.engine import executor_config, generate, make_engine, rescheduled, verified_drafts
from helpers.tail_trim import tail_trim_gate
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm.mapping import Mapping

BATCH_SIZE = 4
CHUNK_BLOCKS = 3  # of prompt that fit into a step beside a whole batch
LOOPS = list(itertools.product((False, True), (False, True)))  # overlap, chunked

Tokens = dict[int, list[int]]  # by the prompt's place in the list of prompts


@dataclass(frozen=True)
class Cell:
    """One engine and one way to run it.

    Attributes:
        checkpoint: its name among those that were asked for.
        trim: the value of `TRTLLM_MTP_TAIL_TRIM`.
        chunked: a step has little room beside the rows of a whole batch that generates, so that
            prompts are spread over several; else each is computed whole.
    """

    checkpoint: str
    draft_len: int
    trim: str
    overlap: bool
    chunked: bool


@dataclass(frozen=True)
class Outcome:
    """What a cell gave.

    Attributes:
        alone: tokens of the prompts that ran alone, one after the other.
        batched: tokens of those that ran together, `BATCH_SIZE` at a time.
        accepted, rejected: drafts.
    """

    alone: Tokens
    batched: Tokens
    accepted: int
    rejected: int


@dataclass(frozen=True)
class Questions:
    """What every cell is asked.

    Attributes:
        alone, batched: how many of the prompts a cell runs one by one, and together; where that is
            not all of them, the loops of an engine get different ones.
    """

    prompts: list[list[int]]
    new_tokens: int
    alone: int
    batched: int

    def share(self, count: int, number: int) -> range:
        """Places of `count` prompts, evenly spread; other ones for the next number."""
        stride = len(self.prompts) // count
        return range(len(self.prompts))[number % stride :: stride]


def run_cells(
    mapping: Mapping,
    checkpoints: dict[str, Path],
    draft_lens: Sequence[int],
    trim: str,
    questions: Questions,
    settings: dict[str, Any],
) -> dict[Cell, Outcome]:
    """All cells of these, one engine for the four loops of a checkpoint and draft length.

    Args:
        settings: of `executor_config`, the same for all cells.
    """
    outcomes = {}
    with tail_trim_gate() as set_gate:
        set_gate(trim)
        for (name, directory), draft_len in itertools.product(checkpoints.items(), draft_lens):
            config = {"mapping": mapping, "max_batch_size": BATCH_SIZE, "max_draft_len": draft_len}
            engine = make_engine(executor_config(directory, **config, **settings))
            for i, (overlap, chunked) in enumerate(LOOPS):
                cell = Cell(name, draft_len, trim, overlap, chunked)
                outcomes[cell] = _run(engine, cell, questions, number=i + draft_len)
    return outcomes


def wrong_cells(outcomes: dict[Cell, Outcome], expected: dict[str, list[list[int]]]) -> list[str]:
    """What differs from the beginning of the expected tokens, per checkpoint and prompt; a line
    each."""
    wrong = []
    for cell, outcome in outcomes.items():
        for how in ("alone", "batched"):
            for prompt, tokens in getattr(outcome, how).items():
                right = expected[cell.checkpoint][prompt][: len(tokens)]
                if tokens != right:
                    wrong.append(f"{cell}, prompt {prompt} {how}: {tokens} instead of {right}")
    return wrong


def _run(engine: PyExecutor, cell: Cell, questions: Questions, number: int) -> Outcome:
    loop: dict[str, Any] = {"disable_overlap_scheduler": not cell.overlap}
    loop["enable_chunked_prefill"] = cell.chunked
    if cell.chunked:
        rows = BATCH_SIZE * (1 + cell.draft_len)
        loop["max_num_tokens"] = rows + CHUNK_BLOCKS * engine.config.tokens_per_block
    executor = rescheduled(engine, **loop)
    alone: Tokens = {}
    for place in questions.share(questions.alone, number):
        [alone[place]] = generate(executor, [questions.prompts[place]], questions.new_tokens)
    places = questions.share(questions.batched, number)
    together = [questions.prompts[place] for place in places]
    batched = dict(zip(places, generate(executor, together, questions.new_tokens), strict=True))
    steps, accepted = verified_drafts(executor)
    return Outcome(alone, batched, sum(accepted), steps * cell.draft_len - sum(accepted))
