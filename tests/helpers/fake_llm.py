"""A scripted stand-in for `LLM`: same interface, no engine; texts come byte by byte."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tensorrt_llm.logger import logger
from tensorrt_llm.sampling_params import SamplingParams

MODEL = "scripted"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if thinking is defined %}[{{ thinking + '!' }}]{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_SEQ_LEN = 64
VOCAB_SIZE = 260


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Poll until `condition` holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: ids 0 to 255 are bytes (in the alphabet's order), 256 is `<|end|>`."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    return fast


@dataclass(frozen=True)
class FakeLogprob:
    logprob: float
    rank: int


@dataclass
class FakeCompletion:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, FakeLogprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def length(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class FakeStats:
    iter: int = 7
    num_running: int = 0
    num_waiting: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 10
    index_used_blocks: int = 0
    index_total_blocks: int = 20
    nan_failures: int = 0


class FakeRequestOutput:
    """Yields after every token of the script; choice k gets k question marks more."""

    def __init__(self, llm: "FakeLLM", prompt_ids: list[int], params: SamplingParams) -> None:
        self._llm = llm
        self._params = params
        self.prompt_token_ids = prompt_ids
        self.prompt_logprobs = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *(self._entry(t) for t in prompt_ids[1:])]
        self.outputs = [FakeCompletion(k) for k in range(params.n)]
        self.error: str | None = None
        self.aborted = False

    @property
    def finished(self) -> bool:
        return all(one.finish_reason for one in self.outputs)

    def abort(self) -> None:
        self.aborted = True

    async def __aiter__(self) -> AsyncIterator["FakeRequestOutput"]:
        self._llm.running += 1
        try:
            while not self.finished:
                await asyncio.sleep(self._llm.delay)
                self._llm.raise_if_dead()
                for one in self.outputs:
                    if not one.finish_reason:
                        self._advance(one)
                yield self
        finally:
            self._llm.running -= 1

    def _advance(self, one: FakeCompletion) -> None:
        if self.aborted:
            one.finish_reason = "cancelled"
            return
        if self._llm.error:
            one.finish_reason, self.error = "error", self._llm.error
            return
        script = self._llm.script + one.index * "?"
        ids = self._llm.tokenizer.encode(script) + [self._llm.tokenizer.eos_token_id]
        token = ids[one.length]
        one.token_ids.append(token)
        if self._params.logprobs is not None:
            one.logprobs.append(self._entry(token))
        text = self._llm.tokenizer.decode(one.token_ids, skip_special_tokens=True)
        if self._params.detokenize and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            one.text = text
        if one.length == len(ids):
            one.finish_reason = "stop"
        elif one.length == self._params.max_tokens:
            one.finish_reason = "length"

    def _entry(self, token: int) -> dict[int, FakeLogprob]:
        top = self._params.logprobs or 0
        likely = {k: FakeLogprob(-1.0 - k, k + 1) for k in range(top)}
        return {token: FakeLogprob(-0.5, top + 1)} | likely


class FakeLLM:
    """The part of `LLM` that the server uses."""

    max_seq_len = MAX_SEQ_LEN
    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizer()
        self.reset()

    def reset(self) -> None:
        """Back to the default script, alive and without calls."""
        self.script = "grün €5"
        self.delay = 0.0
        self.error: str | None = None  # every request ends with it
        self.dead: Exception | None = None
        self.running = 0
        self.calls: list[tuple[Any, SamplingParams]] = []
        self.outputs: list[FakeRequestOutput] = []
        self.latest_stats: FakeStats | None = None

    def generate_async(
        self, inputs: str | list[int], params: SamplingParams, streaming: bool = False
    ) -> FakeRequestOutput:
        self.raise_if_dead()
        ids = self.tokenizer.encode(inputs) if isinstance(inputs, str) else list(inputs)
        if len(ids) >= self.max_seq_len:
            raise ValueError(f"the prompt has {len(ids)} tokens; max_seq_len is {MAX_SEQ_LEN}")
        if any(not 0 <= t < self.vocab_size for t in ids):
            raise ValueError(f"prompt has a token id outside of the vocabulary of {VOCAB_SIZE}")
        self.calls.append((inputs, params))
        output = FakeRequestOutput(self, ids, replace(params))
        self.outputs.append(output)
        return output

    def is_healthy(self) -> bool:
        return self.dead is None

    def die(self, cause: str) -> None:
        """As the real one: the cause is logged, then everything fails with it."""
        logger.error(cause)
        self.dead = RuntimeError(cause)

    def raise_if_dead(self) -> None:
        if self.dead is not None:
            raise self.dead

    def shutdown(self) -> None:
        self.dead = RuntimeError("shut down")
