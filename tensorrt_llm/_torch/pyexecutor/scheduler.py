"""Who takes part in the next step: first come, first served, and never an eviction."""

from collections import deque
from dataclasses import dataclass, field

from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest, RequestState


@dataclass
class ScheduledRequests:
    """One step.

    Args:
        context_requests: each computes `chunk_len` prompt tokens from `num_computed_tokens` on.
        generation_requests: each computes its last token and the drafts after it.
    """

    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)

    @property
    def context_logits_needed(self) -> bool:
        """Whether the forward has to return a row for every context token, for prompt logprobs."""
        return any(r.sampling_params.prompt_logprobs is not None for r in self.context_requests)

    @property
    def is_empty(self) -> bool:
        return not self.context_requests and not self.generation_requests

    @property
    def samples_on_host(self) -> bool:
        """Whether some request's tokens are not simply the likeliest ones."""
        return any(r.samples_on_host for r in self.context_requests + self.generation_requests)


class Scheduler:
    """Continuous batching with blocks reserved up front.

    A request is admitted when every pool has the blocks for its prompt and all tokens it may
    generate, so a running one never runs out and is never evicted. Who came first is admitted
    first: a request that has to wait lets nobody pass.

    Args:
        kv_cache_manager: hands out the blocks.
        max_batch_size: requests in one step.
        max_num_tokens: tokens in one step.
        enable_chunked_prefill: a prompt may be spread over several steps.
        rows_per_generation: tokens of a generation request in one step, drafts included.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManagerV2,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        enable_chunked_prefill: bool,
        rows_per_generation: int = 1,
    ) -> None:
        self._kv = kv_cache_manager
        self._max_num_tokens = max_num_tokens
        self._chunked = enable_chunked_prefill
        self._rows = rows_per_generation
        # More requests than that could never generate together.
        self._max_running = max(1, min(max_batch_size, max_num_tokens // rows_per_generation))
        self._waiting: deque[LlmRequest] = deque()
        self._running: list[LlmRequest] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_requests(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def samples_on_host(self) -> bool:
        """Whether a step with everybody would have to sample on the host."""
        return any(r.samples_on_host for r in (*self._running, *self._waiting))

    def add(self, request: LlmRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: it could not run even with the whole cache to itself; has both numbers.
        """
        needed = self._kv.blocks_for(self._reservation(request))
        for role in self._kv.roles:
            if needed > self._kv.num_blocks(role):
                raise ValueError(
                    f"prompt and output of up to {request.max_total_tokens} tokens need {needed} "
                    f"blocks of the {role} cache, which has {self._kv.num_blocks(role)}"
                )
        self._waiting.append(request)

    def remove(self, request: LlmRequest) -> None:
        """Take a request out, whatever its state, and its blocks back at once."""
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._kv.free(request.request_id)
        request.state = RequestState.FINISHED

    def schedule(self) -> ScheduledRequests:
        """Choose the next step: all generations, then contexts as far as everything reaches."""
        batch = ScheduledRequests()
        for request in self._running:
            if request.state is RequestState.GENERATION and not request.ends_in_flight:
                batch.generation_requests.append(request)
        budget = self._max_num_tokens - len(batch.generation_requests) * self._rows
        if len(batch.generation_requests) < len(self._running) or self._waiting:
            self._schedule_contexts(batch, budget)
        return batch

    def _schedule_contexts(self, batch: ScheduledRequests, budget: int) -> None:
        contexts = [r for r in self._running if r.state is RequestState.CONTEXT]
        while budget > 0:
            request = contexts.pop(0) if contexts else self._next_waiting()
            if request is None:
                return
            chunk = self._chunk_len(request, budget, first=not batch.context_requests)
            if chunk == 0 or (request.state is RequestState.WAITING and not self._admit(request)):
                return
            request.chunk_len = chunk
            batch.context_requests.append(request)
            budget -= chunk

    def _next_waiting(self) -> LlmRequest | None:
        has_place = self._waiting and len(self._running) < self._max_running
        return self._waiting[0] if has_place else None

    def _chunk_len(self, request: LlmRequest, budget: int, first: bool) -> int:
        """Prompt tokens to compute now; 0 waits for a step with more room.

        Chunks end on a block boundary. Only where not even one block fits may the first context of
        a step take what there is, so that every step with room for a context makes progress.
        """
        start, remaining = request.num_computed_tokens, request.num_remaining_prompt_tokens
        if remaining <= budget:
            return remaining
        if not self._chunked:
            return 0
        size = self._kv.tokens_per_block
        aligned = (start + budget) // size * size - start
        return aligned if aligned > 0 else budget * first

    def _admit(self, request: LlmRequest) -> bool:
        """Start the head of the queue if every pool can hold all it may ever need."""
        reservation = self._reservation(request)
        if not self._kv.can_hold([reservation]):
            return False
        self._kv.add_request(request.request_id)
        self._kv.resize(request.request_id, reservation)
        self._waiting.popleft()
        self._running.append(request)
        request.state = RequestState.CONTEXT
        return True

    def _reservation(self, request: LlmRequest) -> int:
        return request.max_total_tokens + self._kv.num_extra_kv_tokens
