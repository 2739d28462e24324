"""Answers in OpenAI's JSON: whole, or as the chunks of a stream."""

import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from tensorrt_llm._torch.pyexecutor.messages import FinishReason, SpeculationStats, TokenLogprobs
from tensorrt_llm.serve.generation import Delta, Generation
from tensorrt_llm.serve.logprobs import TokenTexts, chat_logprobs, completion_logprobs
from tensorrt_llm.serve.openai_protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingRequest,
)

Json = dict[str, Any]


class Answer(ABC):
    """One HTTP answer in the making."""

    prefix: ClassVar[str]  # of the id
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, request: SamplingRequest, texts: TokenTexts) -> None:
        self._texts = texts
        self._include_usage = request.include_usage
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model,
        }

    async def whole(self, generation: Generation) -> Json:
        """The answer once every sequence has ended."""
        async for _ in generation.updates():
            pass
        choices = [
            self._choice(delta)
            for i in range(len(generation.outputs))
            for delta in generation.news(i)
        ]
        return self._envelope(self.whole_object, choices) | _totals(generation)

    async def chunks(self, generation: Generation) -> AsyncIterator[Json]:
        """The stream: each choice ends with exactly one chunk that has a finish reason."""
        async for i in generation.updates():
            for delta in generation.news(i):
                if self._is_worth_a_chunk(delta):
                    yield self._chunk([self._chunk_choice(delta)])
        if self._include_usage:
            yield self._chunk([]) | _totals(generation)

    @abstractmethod
    def _choice(self, delta: Delta) -> Json:
        """A choice of the whole answer."""

    @abstractmethod
    def _chunk_choice(self, delta: Delta) -> Json:
        """A choice of one chunk."""

    def _is_worth_a_chunk(self, delta: Delta) -> bool:
        """False while text is held back: an unfinished character, a possible stop text."""
        return bool(delta.text or delta.finish_reason or delta.logprobs)

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._envelope(self.chunk_object, choices)
        return chunk | {"usage": None} if self._include_usage else chunk

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return self._head | {"object": kind, "choices": choices}


class CompletionAnswer(Answer):
    """Of /v1/completions, where a chunk has the shape of the whole."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, request: CompletionRequest, texts: TokenTexts, prompts: list[str]) -> None:
        """`prompts` are the texts that `echo` repeats; empty without it."""
        super().__init__(request, texts)
        self._prompts = prompts
        self._choices_per_prompt = request.choices
        self._wants_logprobs = request.logprobs is not None
        self._wants_ids = request.detokenize is False
        self._offsets: defaultdict[int, int] = defaultdict(int)  # text_offset by choice

    def _is_worth_a_chunk(self, delta: Delta) -> bool:
        return self._wants_ids or super()._is_worth_a_chunk(delta)

    def _choice(self, delta: Delta) -> Json:
        echoed = self._prompts and delta.first
        prompt = self._prompts[delta.index // self._choices_per_prompt] if echoed else ""
        choice: Json = {
            "index": delta.index,
            "text": prompt + delta.text,
            "logprobs": self._logprobs(delta, bool(echoed)) if self._wants_logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **_ending(delta),
        }
        return choice | {"token_ids": delta.token_ids} if self._wants_ids else choice

    _chunk_choice = _choice

    def _logprobs(self, delta: Delta, echoed: bool) -> Json:
        tokens = delta.token_ids
        entries: list[TokenLogprobs | None] = [*delta.logprobs]
        if echoed:
            tokens = [*delta.source.prompt_token_ids, *tokens]
            entries = [*(delta.source.prompt_logprobs or []), *entries]
        offset = self._offsets[delta.index]
        result = completion_logprobs(self._texts, tokens, entries, offset)
        self._offsets[delta.index] += sum(len(piece) for piece in result["tokens"])
        return result


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatCompletionRequest, texts: TokenTexts) -> None:
        super().__init__(request, texts)
        self._choices = request.choices
        self._top = (request.top_logprobs or 0) if request.logprobs else None

    async def chunks(self, generation: Generation) -> AsyncIterator[Json]:
        for index in range(self._choices):
            opening = {"role": "assistant", "content": ""}
            yield self._chunk([_chat_choice(index, "delta", opening, None, None, None)])
        async for chunk in super().chunks(generation):
            yield chunk

    def _choice(self, delta: Delta) -> Json:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return self._filled("message", message, delta)

    def _chunk_choice(self, delta: Delta) -> Json:
        return self._filled("delta", {"content": delta.text} if delta.text else {}, delta)

    def _filled(self, key: str, message: Json, delta: Delta) -> Json:
        logprobs = None
        if self._top is not None:
            logprobs = chat_logprobs(self._texts, delta.token_ids, delta.logprobs, self._top)
        choice = _chat_choice(
            delta.index, key, message, logprobs, delta.finish_reason, delta.stop_reason
        )
        return choice | _ending(delta)


def _chat_choice(
    index: int,
    key: str,
    message: Json,
    logprobs: Json | None,
    finish_reason: FinishReason | None,
    stop_reason: int | str | None,
) -> Json:
    return {
        "index": index,
        key: message,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }


def _ending(delta: Delta) -> Json:
    """What comes with a choice's finish reason beyond OpenAI's fields."""
    if delta.finish_reason is None:
        return {}
    steps = {"avg_decoded_tokens_per_iter": delta.avg_decoded_tokens_per_iter}
    return steps | _speculation(delta.speculation)


def _totals(generation: Generation) -> Json:
    """What is said about all choices together."""
    return {"usage": generation.usage()} | _speculation(generation.speculation())


def _speculation(stats: SpeculationStats | None) -> Json:
    return {} if stats is None else {"speculation": stats.as_dict()}
