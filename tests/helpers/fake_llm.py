"""A scripted stand-in for `LLM`: same interface, no engine; texts come byte by byte."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from helpers.byte_tokenizer import byte_tokenizer
from tensorrt_llm._torch.pyexecutor.messages import (
    EngineStats,
    FinishReason,
    Logprob,
    SpeculationStats,
)
from tensorrt_llm.executor.errors import EngineDeadError
from tensorrt_llm.llmapi.request_output import CompletionOutput
from tensorrt_llm.logger import logger
from tensorrt_llm.sampling_params import SamplingParams

MODEL = "scripted"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if thinking is defined %}[{{ thinking + '!' }}]{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_SEQ_LEN = 64


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and a chat template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def engine_stats(**changes: Any) -> EngineStats:
    """A report of an idle engine with 10 key and 20 index key blocks."""
    idle = EngineStats(
        iter=7,
        num_running=0,
        num_waiting=0,
        kv_used_blocks=0,
        kv_total_blocks=10,
        index_used_blocks=0,
        index_total_blocks=20,
        generated_tokens=0,
        prompt_tokens=0,
        nan_failures=0,
        iter_latency_ms=1.0,
    )
    return replace(idle, **changes)


class FakeRequestOutput:
    """Yields after every token of the script; choice k gets k question marks more."""

    def __init__(self, llm: "FakeLLM", prompt_ids: list[int], params: SamplingParams) -> None:
        self._llm = llm
        self._params = params
        self.prompt_token_ids = prompt_ids
        self.prompt_logprobs = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *(self._entry(t) for t in prompt_ids[1:])]
        self.outputs = [CompletionOutput(k) for k in range(params.n)]
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

    def _advance(self, one: CompletionOutput) -> None:
        if self.aborted:
            one.finish_reason = FinishReason.CANCELLED
            return
        if self._llm.error:
            one.finish_reason, self.error = FinishReason.ERROR, self._llm.error
            return
        script = self._llm.script + one.index * "?"
        ids = self._llm.tokenizer.encode(script) + [self._llm.tokenizer.eos_token_id]
        token = ids[one.length]
        one.token_ids.append(token)
        one.decoding_iter += 1
        if self._params.logprobs is not None:
            one.logprobs.append(self._entry(token))
        text = self._llm.tokenizer.decode(one.token_ids, skip_special_tokens=True)
        if self._params.detokenize and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            one.text = text
        if one.length == len(ids):
            one.finish_reason = FinishReason.STOP
        elif one.length == self._params.max_tokens:
            one.finish_reason = FinishReason.LENGTH
        if one.finish_reason:
            one.speculation = self._llm.speculation

    def _entry(self, token: int) -> dict[int, Logprob]:
        top = self._params.logprobs or 0
        likely = {k: Logprob(-1.0 - k, k + 1) for k in range(top)}
        return {token: Logprob(-0.5, top + 1)} | likely


class FakeLLM:
    """The part of `LLM` that the server uses."""

    def __init__(self) -> None:
        self.tokenizer = chat_tokenizer()
        self.reset()

    def reset(self) -> None:
        """Back to the default script, alive and without calls."""
        self.script = "grün €5"
        self.delay = 0.0
        self.error: str | None = None  # every request ends with it
        self.speculation: SpeculationStats | None = None  # of every choice
        self.dead: EngineDeadError | None = None
        self.running = 0
        self.calls: list[tuple[Any, SamplingParams]] = []
        self.outputs: list[FakeRequestOutput] = []
        self.latest_stats: EngineStats | None = None

    def generate_async(
        self, inputs: str | list[int], params: SamplingParams, streaming: bool = False
    ) -> FakeRequestOutput:
        self.raise_if_dead()
        ids = self.tokenizer.encode(inputs) if isinstance(inputs, str) else list(inputs)
        if len(ids) >= MAX_SEQ_LEN:
            raise ValueError(f"the prompt has {len(ids)} tokens; max_seq_len is {MAX_SEQ_LEN}")
        if any(not 0 <= t < len(self.tokenizer) for t in ids):
            raise ValueError(f"prompt has a token id not below {len(self.tokenizer)}")
        self.calls.append((inputs, params))
        output = FakeRequestOutput(self, ids, replace(params))
        self.outputs.append(output)
        return output

    def is_healthy(self) -> bool:
        return self.dead is None

    def die(self, cause: str) -> None:
        """As the real one: the cause is logged, then everything fails with it."""
        logger.error(cause)
        self.dead = EngineDeadError(cause)

    def raise_if_dead(self) -> None:
        if self.dead is not None:
            raise self.dead

    def shutdown(self) -> None:
        self.dead = EngineDeadError("shut down")
