"""The sequences of one HTTP request: run together, watched together, given up together."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorrt_llm._torch.pyexecutor.messages import FinishReason, SpeculationStats, TokenLogprobs
from tensorrt_llm.serve.errors import ApiError
from tensorrt_llm.serve.metrics import SequenceMeter, ServerMetrics

if TYPE_CHECKING:
    from tensorrt_llm.llmapi import CompletionOutput, RequestOutput


@dataclass(frozen=True)
class Delta:
    """What one choice gained since it was last looked at.

    Args:
        index: of the choice among all of the request's (prompt-major).
        source: the prompt's output, for what does not change while it runs.
        first: whether this is the choice's first delta.
        text, token_ids, logprobs: the news; logprobs is empty unless asked for.
        finish_reason: STOP or LENGTH in the choice's last delta, else None.
        stop_reason: the stop id or text that ended it.
        avg_decoded_tokens_per_iter: tokens per step up to now.
        speculation: of the whole choice, in its last delta; None without drafting.
    """

    index: int
    source: "RequestOutput"
    first: bool
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    avg_decoded_tokens_per_iter: float | None
    speculation: SpeculationStats | None


class Choice:
    """One sequence and how much of it has been handed out."""

    def __init__(self, index: int, source: "RequestOutput", meter: SequenceMeter) -> None:
        self.meter = meter
        self._index = index
        self._source = source
        self._first = True
        self._finished = False
        self._characters = 0
        self._tokens = 0

    def news(self, output: "CompletionOutput") -> Delta | None:
        """What is new in `output`, or None; the finish reason is news exactly once."""
        if self._finished or (
            output.length == self._tokens
            and len(output.text) == self._characters
            and output.finish_reason is None
        ):
            return None
        delta = Delta(
            index=self._index,
            source=self._source,
            first=self._first,
            text=output.text[self._characters :],
            token_ids=list(output.token_ids[self._tokens :]),
            logprobs=list(output.logprobs[self._tokens :]) if output.logprobs else [],
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            avg_decoded_tokens_per_iter=output.avg_decoded_tokens_per_iter,
            speculation=output.speculation,
        )
        self._first = False
        self._finished = delta.finish_reason is not None
        self._characters += len(delta.text)
        self._tokens += len(delta.token_ids)
        return delta


class Generation:
    """Owner of a request's sequences from submission to `close`.

    Args:
        outputs: one per prompt, already submitted.
        choices: sequences per prompt.
        metrics: where tokens and times are counted.
        arrival: when the request came, on `perf_counter`'s clock.
    """

    def __init__(
        self,
        outputs: "Sequence[RequestOutput]",
        choices: int,
        metrics: ServerMetrics,
        arrival: float,
    ) -> None:
        self.outputs = outputs
        self._choices = [
            [
                Choice(i * choices + k, output, SequenceMeter(metrics, arrival))
                for k in range(choices)
            ]
            for i, output in enumerate(outputs)
        ]
        self._failed = False
        metrics.prompt_tokens.inc(sum(len(output.prompt_token_ids) for output in outputs))

    async def updates(self) -> AsyncIterator[int]:
        """Yield the number of each prompt whose output has news, until all have finished.

        Raises:
            ApiError: a sequence failed (500) or was given up by a server that shuts down (503).
            Exception: whatever the LLM raises when the engine dies.
        """
        try:
            async for i in _merge(self.outputs):
                self._observe(i)
                yield i
        except Exception:
            self._failed = True
            raise

    def news(self, i: int) -> Iterator[Delta]:
        """What the choices of prompt `i` gained since the last look."""
        for choice, output in zip(self._choices[i], self.outputs[i].outputs, strict=True):
            delta = choice.news(output)
            if delta is not None:
                yield delta

    def usage(self) -> dict[str, int]:
        """Token counts; every token generated counts, the one that ended the answer included."""
        prompt = sum(len(output.prompt_token_ids) for output in self.outputs)
        completion = sum(one.length for output in self.outputs for one in output.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def speculation(self) -> SpeculationStats | None:
        """Of all finished choices together; None without drafting."""
        return SpeculationStats.total(
            one.speculation for output in self.outputs for one in output.outputs
        )

    def abort(self) -> None:
        """Have the engine give up what still runs; the outputs end as cancelled."""
        for output in self.outputs:
            if not output.finished:
                output.abort()

    def close(self) -> None:
        """Release everything; sequences that have not ended count as failed or cancelled."""
        self.abort()
        for row in self._choices:
            for choice in row:
                choice.meter.finish("failed" if self._failed else "cancelled")

    def _observe(self, i: int) -> None:
        for choice, output in zip(self._choices[i], self.outputs[i].outputs, strict=True):
            choice.meter.observe(output.length, output.finish_reason)
            if output.finish_reason is FinishReason.ERROR:
                raise ApiError(500, f"generation failed: {self.outputs[i].error}")
            if output.finish_reason is FinishReason.CANCELLED:
                raise ApiError(503, "the request was given up because the server shuts down")


async def _merge(streams: "Sequence[RequestOutput]") -> AsyncIterator[int]:
    """The number of a stream each time it yields; ends when all have, raises when one does."""
    if len(streams) == 1:
        async for _ in streams[0]:
            yield 0
        return
    queue: asyncio.Queue[int | BaseException | None] = asyncio.Queue()

    async def pump(i: int, stream: AsyncIterator[Any]) -> None:
        try:
            async for _ in stream:
                queue.put_nowait(i)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
