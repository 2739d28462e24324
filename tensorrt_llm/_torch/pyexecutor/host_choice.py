"""Choosing a step's tokens on the host, for requests that want more than the likeliest token."""

import torch

from tensorrt_llm._torch.host_staging import HostStaging
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest
from tensorrt_llm._torch.pyexecutor.sampler import (
    SampledToken,
    TorchSampler,
    draft_uniform,
    filters_of,
)
from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests
from tensorrt_llm._torch.speculative.rejection_sampling import DraftSampling


class HostChoice:
    """Called with a step's logits between the target model and the draft loop.

    Each row of a generation request is sampled as if the drafts before it were part of the output,
    so that sampling means the same with and without drafts. Rows after a wrong draft do not count.

    Args:
        rows: logits rows of a generation request, 1 + its drafts.
        sample_drafts: rejection sampling: requests that are not greedy draw their drafts as well.

    Attributes:
        tokens: per request id, what was sampled for its rows.
        prompt_errors: per request id, what is wrong with its prompt's logits.
    """

    def __init__(
        self,
        sampler: TorchSampler,
        batch: ScheduledRequests,
        rows: int,
        vocab_size: int,
        sample_drafts: bool,
    ) -> None:
        self._sampler, self._batch, self._rows = sampler, batch, rows
        self._vocab_size, self._sample_drafts = vocab_size, sample_drafts
        self._draft_sampling: DraftSampling | None = None
        self._drafting: list[int] = []  # ids of the requests that draw their drafts
        self.tokens: dict[int, list[SampledToken]] = {}
        self.prompt_errors: dict[int, str] = {}

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, vocab] -> int64 [contexts + generations * rows]; contexts that go on get
        0."""
        chosen = torch.zeros(self._num_choices, dtype=torch.int64)
        places, rows, requests, drafted = self._plan(logits)
        if requests:
            picked = logits if len(rows) == logits.shape[0] else logits[rows]
            sampled = self._sampler.sample(picked, requests, drafted)
            for place, request, token in zip(places, requests, sampled, strict=True):
                self.tokens.setdefault(request.request_id, []).append(token)
                chosen[place] = token.token_id
        return chosen.to(logits.device)

    def stage_draft_sampling(
        self, staging: HostStaging, device: torch.device
    ) -> DraftSampling | None:
        """For the step's draft loop; None if all its drafts are the likeliest tokens."""
        if not self._sample_drafts:
            return None
        table: list[list[float]] = []
        batch = self._batch
        for row, request in enumerate(batch.context_requests + batch.generation_requests):
            # The drafts of a chunk that does not end its prompt are not used.
            if not request.sampling_params.greedy and request.is_last_chunk:
                uniforms = [draft_uniform(request, place) for place in range(self._rows - 1)]
                table.append([row, *filters_of(request, self._vocab_size), *uniforms])
                self._drafting.append(request.request_id)
        if table:
            self._draft_sampling = DraftSampling.upload(table, staging, device)
        return self._draft_sampling

    def draft_probs(self, request: LlmRequest) -> list[torch.Tensor]:
        """What the request's new drafts were drawn from, see `LlmRequest`; after the launch."""
        sampling = self._draft_sampling
        if sampling is None or request.request_id not in self._drafting:
            return []
        row = self._drafting.index(request.request_id)
        return [probs[row] for probs in sampling.draft_probs]

    @property
    def _num_choices(self) -> int:
        batch = self._batch
        return len(batch.context_requests) + len(batch.generation_requests) * self._rows

    def _plan(
        self, logits: torch.Tensor
    ) -> tuple[list[int], list[int], list[LlmRequest], list[list[int]]]:
        """For each row that gets a token: its place in the result, its row, request and drafts."""
        batch = self._batch
        places: list[int] = []
        rows: list[int] = []
        requests: list[LlmRequest] = []
        drafted: list[list[int]] = []
        end = 0
        for place, request in enumerate(batch.context_requests):
            start, end = end, end + (request.chunk_len if batch.context_logits_needed else 1)
            self._collect_prompt_logprobs(request, logits[start:end])
            if request.is_last_chunk and request.request_id not in self.prompt_errors:
                places.append(place)
                rows.append(end - 1)
                requests.append(request)
                drafted.append([])
        first = len(batch.context_requests)
        for request in batch.generation_requests:
            places += range(first, first + self._rows)
            rows += range(end, end + self._rows)
            requests += [request] * self._rows
            drafted += [request.draft_token_ids[:j] for j in range(self._rows)]
            first, end = first + self._rows, end + self._rows
        if logits.shape != (end, self._vocab_size):
            raise RuntimeError(
                f"the model gave logits {tuple(logits.shape)}, expected {(end, self._vocab_size)}"
            )
        return places, rows, requests, drafted

    def _collect_prompt_logprobs(self, request: LlmRequest, logits: torch.Tensor) -> None:
        num_top, collected = request.sampling_params.prompt_logprobs, request.prompt_logprobs
        if num_top is None or collected is None:
            return
        first = request.num_computed_tokens + 1
        following = request.prompt_token_ids[first : first + request.chunk_len]
        try:
            collected += self._sampler.prompt_logprobs(logits, following, num_top)
        except FloatingPointError as error:
            self.prompt_errors[request.request_id] = f"request {request.request_id}: {error}"
