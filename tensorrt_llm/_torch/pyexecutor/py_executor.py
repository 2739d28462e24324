"""The step loop of one rank: messages in, schedule, forward, sample, update, responses out.

All ranks run the same loop on the same messages and draw the same conclusions; only rank 0 talks to
the outside.
"""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from tensorrt_llm._torch.distributed import broadcast_object
from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig
from tensorrt_llm._torch.pyexecutor.counters import Counters
from tensorrt_llm._torch.pyexecutor.host_choice import HostChoice
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2, Role
from tensorrt_llm._torch.pyexecutor.launch_counter import LaunchCounts
from tensorrt_llm._torch.pyexecutor.llm_request import (
    LlmRequest,
    RequestLimits,
    RequestState,
    check_message,
)
from tensorrt_llm._torch.pyexecutor.messages import (
    CancelRequest,
    EngineReady,
    EngineStats,
    FinishReason,
    LlmResponse,
    NewRequest,
    Shutdown,
    SpeculationStats,
    TokenLogprobs,
)
from tensorrt_llm._torch.pyexecutor.sampler import SampledToken, TorchSampler, logits_error
from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests, Scheduler
from tensorrt_llm._torch.pyexecutor.speculation_log import SpeculationLog
from tensorrt_llm._torch.pyexecutor.step import SequenceResult, StepPaths
from tensorrt_llm._torch.pyexecutor.stop_criteria import Finish
from tensorrt_llm.logger import logger
from tensorrt_llm.tokenizer import load_tokenizer

Incoming: TypeAlias = NewRequest | CancelRequest | Shutdown
Outgoing: TypeAlias = LlmResponse | EngineStats

STATS_INTERVAL_S = 0.1  # between reports, unless `iter_perf_stats` asks for every step


class StepHandle(Protocol):
    """A launched step."""

    launch_counts: LaunchCounts | None
    paths: StepPaths | None  # of a step without contexts

    def wait(self) -> list[SequenceResult]:
        """Results of the batch's sequences, contexts first."""
        ...


class ModelEngine(Protocol):
    """What the loop needs of a model."""

    @property
    def weights_bytes(self) -> int:
        """Memory of this rank's weights."""
        ...

    @property
    def rows_per_generation(self) -> int:
        """1 + the drafts of a generation request in one step."""
        ...

    def launch(self, batch: ScheduledRequests, choose: HostChoice | None) -> StepHandle:
        """Start a step; the tokens are the same on all ranks. `choose` as in
        `PyTorchModelEngine`."""
        ...


@dataclass
class _Flight:
    """A step that was launched.

    Attributes:
        ending: per context request, whether its chunk ends the prompt and so brings a token.
        choice: what the host sampled for it, if it did.
    """

    batch: ScheduledRequests
    ending: list[bool]
    handle: StepHandle
    choice: HostChoice | None
    start: float


class PyExecutor:
    """The engine of one rank.

    Args:
        config: this rank's.
        model_engine: computes logits and fills the cache.
        kv_cache_manager: owns the blocks.
        sampler: makes tokens.
        eos_token_ids: the model's.
        max_seq_len: prompt plus generated tokens of one request.
        vocab_size: columns of the logits.
        receive: new messages, called on rank 0 alone; with True it waits for one, and may return
            none after a while so that waiting ranks hear from each other.
        send: takes responses and reports, called on rank 0 alone.

    Raises:
        ValueError: an eos id outside of the vocabulary, or a stop tokenizer that cannot be read.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        model_engine: ModelEngine,
        kv_cache_manager: KVCacheManagerV2,
        sampler: TorchSampler,
        eos_token_ids: Collection[int],
        max_seq_len: int,
        vocab_size: int,
        receive: Callable[[bool], list[Incoming]],
        send: Callable[[list[Outgoing]], None],
    ) -> None:
        outside = [i for i in eos_token_ids if not 0 <= i < vocab_size]
        if outside:
            raise ValueError(
                f"eos token ids {outside} are outside the {vocab_size} of the vocabulary"
            )
        self.config = config
        self.model_engine = model_engine
        self.kv_cache_manager = kv_cache_manager
        self.sampler = sampler
        self.eos_token_ids = tuple(eos_token_ids)
        self.limits = RequestLimits(
            max_seq_len=max_seq_len,
            max_prompt_tokens=max_seq_len
            if config.enable_chunked_prefill
            else config.max_num_tokens,
            vocab_size=vocab_size,
        )
        self.scheduler = Scheduler(
            kv_cache_manager,
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            enable_chunked_prefill=config.enable_chunked_prefill,
            rows_per_generation=model_engine.rows_per_generation,
        )
        self._flight: _Flight | None = None
        self._stop_tokenizer = (
            load_tokenizer(config.stop_tokenizer) if config.stop_tokenizer else None
        )
        self._receive, self._send = receive, send
        self._requests: dict[int, LlmRequest] = {}
        self._outbox: list[Outgoing] = []
        self._idle = True
        num_drafts = model_engine.rows_per_generation - 1
        self._unverified = SpeculationStats(0, (0,) * num_drafts) if num_drafts else None
        self._counters = Counters(speculation=self._unverified)
        self._speculation_log = SpeculationLog()

    def ready_message(self) -> EngineReady:
        """What rank 0 tells the outside once everything is loaded and warm."""
        return EngineReady(
            max_seq_len=self.limits.max_seq_len,
            max_num_tokens=self.config.max_num_tokens,
            max_batch_size=self.config.max_batch_size,
            vocab_size=self.limits.vocab_size,
            eos_token_ids=self.eos_token_ids,
            kv_total_blocks=self.kv_cache_manager.num_blocks(Role.KEY),
            tokens_per_block=self.kv_cache_manager.tokens_per_block,
            weights_bytes=self.model_engine.weights_bytes,
            kv_cache_bytes=self.kv_cache_manager.total_bytes,
        )

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `Shutdown`. An exception of the model leaves through here, for the worker."""
        while self._handle(self._next_messages()):
            news = self.step()
            if news and self.config.mapping.rank == 0:
                self._send(news)

    @torch.inference_mode()
    def step(self) -> list[Outgoing]:
        """One iteration without receiving or sending: what there is to say after it."""
        if self.has_work:
            self._iterate() if self.config.disable_overlap_scheduler else self._iterate_overlap()
        if not self.has_work and not self._idle:
            self._become_idle()
        if self.config.mapping.rank == 0 and self._counters.speculation is not None:
            self._speculation_log.update(self._counters.speculation, idle=self._idle)
        news, self._outbox = self._outbox, []
        return news

    def _iterate(self) -> None:
        """The plain step: it is over, and its tokens are out, before the next one begins."""
        self._finish(self._launch(self.scheduler.schedule()))

    def _iterate_overlap(self) -> None:
        """The overlapped step: the next one is launched before the last one's tokens are looked
        at."""
        if self.scheduler.samples_on_host:
            self._land()  # the host needs the last tokens before it can sample the next ones
        previous, batch = self._flight, self.scheduler.schedule()
        self._flight = None if batch.is_empty and previous else self._launch(batch)
        if previous:
            self._finish(previous)
        if batch.samples_on_host:
            self._land()

    def _land(self) -> None:
        """Finish the step in flight, if there is one."""
        flight, self._flight = self._flight, None
        if flight:
            self._finish(flight)

    @property
    def has_work(self) -> bool:
        """Whether there is a request to serve or a step to finish."""
        return self.scheduler.has_requests or self._flight is not None

    def _next_messages(self) -> list[Incoming]:
        """New messages, the same on all ranks; waits for one when there is nothing to do."""
        messages: list[Incoming] = []
        if self.config.mapping.rank == 0:
            messages = self._receive(not self.has_work)
        return broadcast_object(messages, self.config.mapping)

    def _handle(self, messages: list[Incoming]) -> bool:
        """Act on messages in their order; False ends the loop."""
        for message in messages:
            match message:
                case NewRequest():
                    self.add_requests([message])
                case CancelRequest():
                    self.cancel([message.request_id])
                case Shutdown():
                    return False
                case _:
                    raise TypeError(f"unknown message to the engine: {message!r}")
        return True

    # --- requests ---------------------------------------------------------------------------------

    def add_requests(self, messages: Iterable[NewRequest]) -> None:
        """Queue requests; one that cannot be served is answered with an error.

        Raises:
            RuntimeError: the id belongs to a request that is still going on.
        """
        self._idle = False
        for message in messages:
            if message.request_id in self._requests:
                raise RuntimeError(f"request id {message.request_id} is in use")
            try:
                self._requests[message.request_id] = self._queue(message)
            except ValueError as error:
                self._respond(message.request_id, FinishReason.ERROR, str(error))

    def cancel(self, request_ids: Iterable[int]) -> None:
        """End requests and take their blocks back now. An id that has just finished is ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                logger.debug("cancelled request %d is not there any more", request_id)
            else:
                self._release(request)
                self._respond(request_id, FinishReason.CANCELLED, speculation=request.speculation)

    def _queue(self, message: NewRequest) -> LlmRequest:
        check_message(message, self.limits)
        request = LlmRequest(
            message,
            self.limits.max_seq_len,
            self.eos_token_ids,
            self._stop_tokenizer,
            self._unverified,
        )
        self.scheduler.add(request)
        return request

    def _release(self, request: LlmRequest) -> None:
        self.scheduler.remove(request)
        del self._requests[request.request_id]

    def _fail(self, request: LlmRequest, error: str) -> None:
        """End one request because its logits are broken; the others go on."""
        logger.error("%s", error)
        self._counters.nan_failures += 1
        self._release(request)
        self._respond(request.request_id, FinishReason.ERROR, error, request.speculation)

    def _respond(
        self,
        request_id: int,
        reason: FinishReason,
        error: str | None = None,
        speculation: SpeculationStats | None = None,
    ) -> None:
        """Queue a last response without a token."""
        self._outbox.append(
            LlmResponse(request_id, finish_reason=reason, error=error, speculation=speculation)
        )

    # --- one step ---------------------------------------------------------------------------------

    def _launch(self, batch: ScheduledRequests) -> _Flight:
        """Start a step and count what is certain about it."""
        if batch.is_empty:
            raise RuntimeError(
                f"the scheduler is stuck: {self.scheduler.num_running} requests running, "
                f"{self.scheduler.num_waiting} waiting, and none can take a step"
            )
        start = time.perf_counter()
        choice = None
        if batch.samples_on_host:
            rows = self.model_engine.rows_per_generation
            choice = HostChoice(
                self.sampler,
                batch,
                rows,
                self.limits.vocab_size,
                self.config.use_rejection_sampling,
            )
        ending = [request.is_last_chunk for request in batch.context_requests]
        handle = self.model_engine.launch(batch, choice)
        self._counters.count_paths(handle.paths)
        for request in batch.context_requests:
            self._advance_context(request)
        for request in batch.generation_requests:
            request.rows_in_flight += self.model_engine.rows_per_generation
            request.tokens_in_flight += 1
        return _Flight(batch, ending, handle, choice, start)

    def _advance_context(self, request: LlmRequest) -> None:
        request.num_computed_tokens += request.chunk_len
        self._counters.prompt_tokens += request.chunk_len
        if not request.num_remaining_prompt_tokens:
            request.state = RequestState.GENERATION
            request.tokens_in_flight += 1

    def _finish(self, flight: _Flight) -> None:
        """Hand out a step's tokens. A request that has ended meanwhile gets none."""
        batch, choice = flight.batch, flight.choice
        results = flight.handle.wait()
        contexts = len(batch.context_requests)
        for i, request in enumerate(batch.context_requests):
            failure = choice.prompt_errors.get(request.request_id) if choice else None
            if failure:
                self._fail(request, failure)  # it is still there: such a step is not overlapped
            elif flight.ending[i]:
                self._take(request, results[i], choice)
        for request, result in zip(batch.generation_requests, results[contexts:], strict=True):
            request.rows_in_flight -= self.model_engine.rows_per_generation
            request.num_computed_tokens += len(result.token_ids)
            self._take(request, result, choice, verifies=True)
        self._counters.launch = flight.handle.launch_counts
        self._report_step(flight.start)

    def _count_verified(self, request: LlmRequest, num_accepted: int) -> None:
        """A request's drafts were verified, and the first `num_accepted` were right."""
        counters = self._counters
        if counters.speculation is not None and request.speculation is not None:
            counters.speculation = counters.speculation.verified(num_accepted)
            request.speculation = request.speculation.verified(num_accepted)

    def _is_current(self, request: LlmRequest) -> bool:
        return self._requests.get(request.request_id) is request

    def _take(
        self,
        request: LlmRequest,
        result: SequenceResult,
        choice: HostChoice | None,
        *,
        verifies: bool = False,
    ) -> None:
        """Append a step's tokens to a request until one of them ends it; count its drafts if the
        step has verified some."""
        request.tokens_in_flight -= 1
        if not self._is_current(request):
            return
        request.draft_token_ids = result.draft_token_ids
        request.draft_probs = choice.draft_probs(request) if choice else []
        sampled = choice.tokens[request.request_id] if choice else _greedy(request, result)
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        finish: Finish | None = None
        error: str | None = None
        for token in sampled[: len(result.token_ids)]:
            if finish:
                break
            if token.error is not None:
                error = token.error
                break
            request.append(token.token_id)
            tokens.append(token.token_id)
            logprobs += [] if token.logprobs is None else [token.logprobs]
            finish = request.stop_criteria.check(token.token_id, len(request.output_token_ids))
        if verifies:  # drafts behind the request's end do not count
            self._count_verified(request, min(len(result.token_ids) - 1, len(tokens)))
        self._say(request, tokens, logprobs, finish)
        if error is not None:
            self._fail(request, error)

    def _say(
        self,
        request: LlmRequest,
        tokens: list[int],
        logprobs: list[TokenLogprobs],
        finish: Finish | None,
    ) -> None:
        """Report new tokens, and the end with the last of them."""
        if not tokens:
            return
        self._counters.generated_tokens += len(tokens)
        self._outbox.append(
            LlmResponse(
                request.request_id,
                tokens,
                logprobs,
                request.take_prompt_logprobs(),
                finish.reason if finish else None,
                finish.stop_reason if finish else None,
                speculation=request.speculation if finish else None,
            )
        )
        if finish:
            self._release(request)

    # --- reports ----------------------------------------------------------------------------------

    def _report_step(self, start: float) -> None:
        """Count the step; report it now and then, or always under `iter_perf_stats`."""
        counters, now = self._counters, time.perf_counter()
        counters.iterations += 1
        counters.latency_ms = (now - start) * 1e3
        due = self.config.iter_perf_stats or now - counters.reported_at >= STATS_INTERVAL_S
        if due and self.scheduler.has_requests:  # else the idle report follows at once
            counters.reported_at = now
            self._outbox.append(self.stats())

    def _become_idle(self) -> None:
        """Nobody is left: every block must be free."""
        self._idle = True
        self.kv_cache_manager.check_empty()
        self._outbox.append(self.stats())

    def stats(self) -> EngineStats:
        """State right now and totals since start."""
        counters = self._counters
        key_used, key_total = self._blocks(Role.KEY)
        index_used, index_total = self._blocks(Role.INDEX_KEY)
        return EngineStats(
            iter=counters.iterations,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            kv_used_blocks=key_used,
            kv_total_blocks=key_total,
            index_used_blocks=index_used,
            index_total_blocks=index_total,
            generated_tokens=counters.generated_tokens,
            prompt_tokens=counters.prompt_tokens,
            nan_failures=counters.nan_failures,
            iter_latency_ms=counters.latency_ms,
            speculation=counters.speculation,
            generation_steps=dict(counters.generation_steps),
            **(counters.launch._asdict() if counters.launch else {}),
        )

    def _blocks(self, role: Role) -> tuple[int, int]:
        """Used and all blocks of a role; none for a model without it."""
        kv = self.kv_cache_manager
        return (kv.num_used_blocks(role), kv.num_blocks(role)) if role in kv.roles else (0, 0)


def _greedy(request: LlmRequest, result: SequenceResult) -> list[SampledToken]:
    """What the device chose, with an error where a row's largest logit is not finite."""
    return [
        SampledToken(token, error=logits_error(largest, request))
        for token, largest in zip(result.token_ids, result.largest_logits, strict=True)
    ]
