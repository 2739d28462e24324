"""The shipped checkpoint's held-out questions as token ids, how many an engine answers, and its
quantised exports."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from helpers.engine import run_requests
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm.sampling_params import SamplingParams

EXAMPLE = Path(__file__).parents[2] / "examples" / "glm_tiny"
CHECKPOINT = EXAMPLE / "checkpoint"
LONGEST_ANSWER = 80


def export(kind: str, out: Path) -> Path:
    """The checkpoint as `kind`, "fp8" or "nvfp4", written to the directory `out`."""
    command = [sys.executable, str(EXAMPLE / "export.py"), "--format", kind]
    command += ["--model", str(CHECKPOINT), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    return out


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def heldout(every: int) -> list[tuple[list[int], str]]:
    """(prompt, answer) of every so-manieth line."""
    lines = (CHECKPOINT / "heldout.jsonl").read_text().splitlines()[::every]
    parsed = [json.loads(line) for line in lines]
    return [(chat_ids(line["messages"][0]["content"]), line["answer"]) for line in parsed]


def prompts(count: int) -> list[list[int]]:
    """Held-out questions, shortest first, and one of a single token."""
    asked = [prompt for prompt, _ in heldout(every=360 // count)]
    return [[5], *sorted(asked[: count - 1], key=len)]


def chat_ids(question: str) -> list[int]:
    """One user turn, ready for the answer."""
    text = f"[gMASK]<sop><|user|>\n{question}<|assistant|>\n"
    return tokenizer().encode(text, add_special_tokens=False).ids


def share_answered(engine: PyExecutor, asked: list[tuple[list[int], str]]) -> float:
    """Exact matches of greedy answers, 0 to 1."""
    right = answered(engine, asked)
    return sum(right) / len(right)


def answered(engine: PyExecutor, asked: list[tuple[list[int], str]]) -> list[bool]:
    """Which greedy answers match exactly."""
    params = SamplingParams(max_tokens=LONGEST_ANSWER)
    outputs = run_requests(engine, [prompt for prompt, _ in asked], params)
    answers = [tokenizer().decode(_until_stop(ids)).strip() for ids in outputs]
    return [a == right for a, (_, right) in zip(answers, asked, strict=True)]


def _until_stop(ids: list[int]) -> list[int]:
    stops = json.loads((CHECKPOINT / "generation_config.json").read_text())["eos_token_id"]
    return ids[: next((i for i, token in enumerate(ids) if token in stops), len(ids))]
