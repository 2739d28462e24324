"""Drafting changes how many steps an answer takes, and nothing else."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from helpers.engine import executor_config, generate, make_engine
from tokenizers import Tokenizer

from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor

CHECKPOINT = Path("examples/glm_tiny/checkpoint")
NEW_TOKENS = 40


def prompts(count: int) -> list[list[int]]:
    """Held-out questions of the shipped checkpoint, shortest first, and one of a single token."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    lines = (CHECKPOINT / "heldout.jsonl").read_text().splitlines()
    texts = [json.loads(line)["messages"][0]["content"] for line in lines[:: len(lines) // count]]
    asked = [
        tokenizer.encode(f"[gMASK]<sop><|user|>\n{t}<|assistant|>\n", add_special_tokens=False).ids
        for t in texts[: count - 1]
    ]
    return [[5], *sorted(asked, key=len)]


def engine(**overrides: object) -> PyExecutor:
    return make_engine(executor_config(CHECKPOINT, max_seq_len=256, **overrides))


def steps_of(executor: PyExecutor) -> int:
    return executor.stats().iter


CELLS = list(itertools.product((0, 1, 3, 7), (True, False)))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generate(engine(), prompts(8), NEW_TOKENS)


@pytest.mark.parametrize(("draft_len", "plain"), CELLS)
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


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [(), (1, 2, 4)], ids=["eager", "graphs"])
@pytest.mark.parametrize(("draft_len", "plain"), CELLS)
def test_cuda_tokens_do_not_depend_on_drafting(draft_len, plain, graphs, expected) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    executor = engine(
        device="cuda",
        max_draft_len=draft_len,
        disable_overlap_scheduler=plain,
        max_num_tokens=40,
        max_batch_size=4,
        cuda_graph_batch_sizes=graphs,
    )
    assert [generate(executor, [p], NEW_TOKENS)[0] for p in prompts(8)] == expected
    assert generate(executor, prompts(8), NEW_TOKENS) == expected
