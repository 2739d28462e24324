"""What the benchmark asks for: random prompts of a fixed length, or those of a dataset file."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Tokenize = Callable[[str], list[int]]

_KEYS = ("task_id", "prompt", "input_ids", "output_tokens")


@dataclass(frozen=True)
class BenchRequest:
    """A prompt, and how many tokens to generate whatever they are (eos does not end it)."""

    prompt_token_ids: list[int]
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.output_tokens


def random_requests(
    count: int, input_len: int, output_len: int, vocab_size: int, seed: int
) -> list[BenchRequest]:
    """`count` different prompts of uniformly random token ids; the same seed gives the same
    ones."""
    rng = random.Random(seed)
    return [
        BenchRequest([rng.randrange(vocab_size) for _ in range(input_len)], output_len)
        for _ in range(count)
    ]


def read_dataset(path: Path, tokenize: Tokenize) -> list[BenchRequest]:
    """The requests of a JSON lines file in TensorRT-LLM's format.

    Each line has `prompt` (text) or `input_ids` (token ids), and `output_tokens`; `task_id` is not
    looked at.

    Raises:
        ValueError: naming file, line and key.
    """
    lines = path.read_text().splitlines()
    requests = [
        _parse(line, f"{path}:{number}", tokenize)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not requests:
        raise ValueError(f"{path} has no requests")
    return requests


def _parse(line: str, where: str, tokenize: Tokenize) -> BenchRequest:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is a {type(entry).__name__}; it must be an object")
    unknown = [key for key in entry if key not in _KEYS]
    if unknown:
        raise ValueError(f"{where} has unknown keys {unknown}; known are {', '.join(_KEYS)}")
    output_tokens = entry.get("output_tokens")
    if type(output_tokens) is not int or output_tokens < 2:
        raise ValueError(f"{where}: output_tokens is {output_tokens!r}; it must be at least 2")
    return BenchRequest(_prompt(entry, where, tokenize), output_tokens)


def _prompt(entry: dict[str, Any], where: str, tokenize: Tokenize) -> list[int]:
    text, ids = entry.get("prompt"), entry.get("input_ids")
    if (text is None) == (ids is None):
        raise ValueError(f"{where} must have either prompt or input_ids")
    if ids is None:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{where}: prompt is {text!r}; it must be a text")
        return tokenize(text)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ValueError(f"{where}: input_ids is {ids!r}; it must be a list of token ids")
    return ids
