"""What the benchmark asks for: random prompts of a fixed length, or those of a dataset file."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorrt_llm.llmapi.checkpoint import Checkpoint
from tensorrt_llm.tokenizer import load_tokenizer

SEED = 0  # every run asks the same
DEFAULT_NUM_REQUESTS = 10

_KEYS = ("task_id", "prompt", "input_ids", "output_tokens")


@dataclass(frozen=True)
class BenchRequest:
    """A prompt, and how many tokens to generate after it; eos does not end it."""

    prompt_token_ids: list[int]
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.output_tokens


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The requests as the command line describes them.

    Args:
        dataset: a file in TensorRT-LLM's format: JSON lines with `prompt` (text) or `input_ids`,
            and `output_tokens`. None: random prompts.
        input_len, output_len: tokens of each random prompt, and to generate after it.
        num_requests: how many; None takes the whole dataset, or 10 random prompts.
    """

    dataset: Path | None
    input_len: int
    output_len: int
    num_requests: int | None

    def requests(self, checkpoint: Checkpoint) -> list[BenchRequest]:
        """What to run on a model.

        Raises:
            ValueError: a bad or short dataset, or a request beyond the model's longest sequence.
        """
        requests = self._read(checkpoint) if self.dataset else self._random(checkpoint)
        longest = max(request.total_tokens for request in requests)
        if longest > checkpoint.max_position_embeddings:
            raise ValueError(
                f"the longest request has {longest} tokens, prompt and output; the model's "
                f"max_position_embeddings is {checkpoint.max_position_embeddings}"
            )
        return requests

    def _random(self, checkpoint: Checkpoint) -> list[BenchRequest]:
        count = DEFAULT_NUM_REQUESTS if self.num_requests is None else self.num_requests
        vocab_size = checkpoint.config.get("vocab_size")
        if not isinstance(vocab_size, int):
            raise ValueError(f"{checkpoint.directory}/config.json lacks vocab_size")
        return random_requests(count, self.input_len, self.output_len, vocab_size, SEED)

    def _read(self, checkpoint: Checkpoint) -> list[BenchRequest]:
        assert self.dataset is not None
        tokenizer = load_tokenizer(checkpoint.directory)
        requests = read_dataset(self.dataset, lambda text: tokenizer.encode(text).ids)
        if self.num_requests is not None and self.num_requests > len(requests):
            raise ValueError(
                f"num_requests is {self.num_requests}; {self.dataset} has {len(requests)} requests"
            )
        return requests[: self.num_requests]


def random_requests(
    count: int, input_len: int, output_len: int, vocab_size: int, seed: int
) -> list[BenchRequest]:
    """`count` prompts of uniformly random token ids; the same seed gives the same ones."""
    rng = random.Random(seed)
    return [
        BenchRequest([rng.randrange(vocab_size) for _ in range(input_len)], output_len)
        for _ in range(count)
    ]


def read_dataset(path: Path, encode: Callable[[str], list[int]]) -> list[BenchRequest]:
    """The requests of a dataset file, texts encoded.

    Raises:
        ValueError: naming file, line and key.
    """
    with path.open(encoding="utf-8") as lines:
        requests = [_parse(line, f"{path}:{i}", encode) for i, line in enumerate(lines, start=1)]
    if not requests:
        raise ValueError(f"{path} has no requests")
    return requests


def _parse(line: str, where: str, encode: Callable[[str], list[int]]) -> BenchRequest:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is a {type(entry).__name__}; it must be an object")
    unknown = [key for key in entry if key not in _KEYS]
    if unknown:
        raise ValueError(f"{where} has the unknown keys {unknown}; known are {', '.join(_KEYS)}")
    output_tokens = entry.get("output_tokens")
    if type(output_tokens) is not int or output_tokens < 2:
        raise ValueError(f"{where}: output_tokens is {output_tokens!r}; it must be at least 2")
    return BenchRequest(_prompt(entry, where, encode), output_tokens)


def _prompt(entry: dict[str, Any], where: str, encode: Callable[[str], list[int]]) -> list[int]:
    match entry:
        case {"prompt": str(text), **rest} if text and "input_ids" not in rest:
            return encode(text)
        case {"input_ids": [_, *_] as ids, **rest} if "prompt" not in rest:
            if all(type(i) is int for i in ids):
                return ids
    raise ValueError(
        f"{where} must have either prompt (a text) or input_ids (a list of token ids), not empty"
    )
