"""What a request has produced so far, and the ways to wait for more of it."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensorrt_llm._torch.pyexecutor.messages import (
    FinishReason,
    LlmResponse,
    SpeculationStats,
    TokenLogprobs,
)
from tensorrt_llm.executor import EngineDeadError
from tensorrt_llm.llmapi.inbox import Inbox
from tensorrt_llm.llmapi.text_stream import TextStream

if TYPE_CHECKING:
    from collections.abc import Generator

    from tensorrt_llm.executor import GenerationExecutor


@dataclass
class CompletionOutput:
    """One of the `n` completions of a request.

    Args:
        index: which one.
        text: the output without stop strings; empty when not detokenizing.
        token_ids: all generated tokens, the stop token included.
        cumulative_logprob: sum over the generated tokens; None when `logprobs` were not asked for.
        logprobs: per generated token, token id -> Logprob.
        finish_reason: None while it goes on.
        stop_reason: the stop id or stop string that ended it.
        decoding_iter: steps that brought tokens.
        speculation: how its drafts fared, known at its end; None without drafting.
        text_diff, token_ids_diff, logprobs_diff: what the latest step added.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    decoding_iter: int = 0
    speculation: SpeculationStats | None = None
    text_diff: str = ""
    token_ids_diff: list[int] = field(default_factory=list)
    logprobs_diff: list[TokenLogprobs] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids)

    @property
    def avg_decoded_tokens_per_iter(self) -> float | None:
        """Tokens per step: the acceptance length, as far as stops let it be seen; None before the
        first."""
        return self.length / self.decoding_iter if self.decoding_iter else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verify step, the target's own included; None without drafting, before the
        end, and when nothing was verified."""
        return self.speculation.acceptance_length if self.speculation else None

    @property
    def acceptance_per_position(self) -> tuple[float, ...] | None:
        """Share of the verify steps that accepted the first, second, ... draft; None as above."""
        return self.speculation.acceptance_per_position if self.speculation else None

    def _clear_diff(self) -> None:
        self.text_diff, self.token_ids_diff, self.logprobs_diff = "", [], []

    def _apply(self, response: LlmResponse, stream: TextStream | None) -> None:
        self.token_ids_diff, self.logprobs_diff = response.token_ids, response.logprobs
        self.token_ids += response.token_ids
        self.decoding_iter += bool(response.token_ids)
        self.logprobs += response.logprobs
        if response.logprobs:
            chosen = zip(response.token_ids, response.logprobs, strict=True)
            total = sum(logprobs[token_id].logprob for token_id, logprobs in chosen)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + total
        self.finish_reason, self.stop_reason = response.finish_reason, response.stop_reason
        self.speculation = response.speculation
        if stream is not None:
            self.text_diff = _text_of(response, stream)
            self.text += self.text_diff


class RequestOutput:
    """A request on its way, and its result.

    Wait for it with `result()`, `await output` or `await output.aresult()`; or iterate over it with
    `for` or `async for`: when streaming each item is this object after one more step of one of its
    completions, else there is one item, the final state. One consumer at a time. A request whose
    consumer is cancelled, or that is dropped before its end, is aborted.

    Attributes:
        request_id: unique in its `LLM`.
        prompt: as given, if it was a text.
        prompt_token_ids: what the model saw.
        prompt_logprobs: one entry per prompt token when asked for (the first is None).
        outputs: one `CompletionOutput` per completion.
        error: what went wrong, when a completion has finish_reason "error".
    """

    def __init__(
        self,
        executor: "GenerationExecutor",
        inbox: Inbox[LlmResponse | EngineDeadError],
        request_ids: Sequence[int],
        prompt: str | None,
        prompt_token_ids: list[int],
        streams: Sequence[TextStream | None],
        streaming: bool,
    ) -> None:
        self.request_id = request_ids[0]
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.outputs = [CompletionOutput(index) for index in range(len(request_ids))]
        self.error: str | None = None
        self._executor, self._inbox = executor, inbox
        self._choice_of = {request_id: index for index, request_id in enumerate(request_ids)}
        self._streams, self._streaming = streams, streaming
        self._dead: EngineDeadError | None = None

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    def result(self, timeout: float | None = None) -> "RequestOutput":
        """Block until the end.

        Raises:
            TimeoutError: not finished after `timeout` seconds; the request goes on.
            EngineDeadError: the engine died first.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.finished:
            self._step(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self

    async def aresult(self) -> "RequestOutput":
        """As `result`, without blocking the event loop."""
        while not self.finished:
            await self._astep()
        return self

    def abort(self) -> None:
        """Stop generating; what has not ended ends as "cancelled". Harmless at any time."""
        self._executor.abort(list(self._choice_of))

    def __await__(self) -> "Generator[None, None, RequestOutput]":
        return self.aresult().__await__()

    def __iter__(self) -> "RequestOutput":
        return self

    def __next__(self) -> "RequestOutput":
        if self.finished:
            raise StopIteration
        if not self._streaming:
            return self.result()
        self._step()
        return self

    def __aiter__(self) -> "RequestOutput":
        return self

    async def __anext__(self) -> "RequestOutput":
        if self.finished:
            raise StopAsyncIteration
        if not self._streaming:
            return await self.aresult()
        await self._astep()
        return self

    def __del__(self) -> None:
        if not self.finished:
            self.abort()

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id}, prompt={self.prompt!r}, "
            f"outputs={self.outputs}, finished={self.finished})"
        )

    def _step(self, timeout_s: float | None = None) -> None:
        self._raise_if_dead()
        try:
            self._apply(self._inbox.get(timeout_s))
        except TimeoutError:
            raise TimeoutError(f"request {self.request_id} has not finished in time") from None

    async def _astep(self) -> None:
        self._raise_if_dead()
        try:
            self._apply(await self._inbox.aget())
        except asyncio.CancelledError:
            self.abort()
            raise

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _apply(self, news: LlmResponse | EngineDeadError) -> None:
        if isinstance(news, EngineDeadError):
            self._dead = news
            raise news
        for output in self.outputs:
            output._clear_diff()
        index = self._choice_of[news.request_id]
        self.outputs[index]._apply(news, self._streams[index])
        self.prompt_logprobs = news.prompt_logprobs or self.prompt_logprobs
        self.error = news.error or self.error


def _text_of(response: LlmResponse, stream: TextStream) -> str:
    match response.finish_reason:
        case None:
            return stream.append(response.token_ids)
        case FinishReason.STOP:
            return stream.stop(response.token_ids, response.stop_reason)
        case _:
            return stream.finish(response.token_ids)
