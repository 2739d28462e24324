"""What a model needs to know of a step beside its tokens: lengths, positions and where the cache
rows are."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from tensorrt_llm._torch.host_staging import HostStaging

NO_LIMIT = torch.iinfo(torch.int32).max


class KVCacheManager(Protocol):
    """The part of the KV cache manager that attention reads."""

    tokens_per_block: int
    max_blocks_per_seq: int
    table_version: int

    def pool(self, role: str) -> torch.Tensor: ...

    def has_buffer(self, role: str, layer_idx: int) -> bool: ...

    def layer_slot(self, role: str, layer_idx: int) -> int: ...

    def max_held_blocks(self, request_ids: list[int], role: str) -> int: ...

    def copy_batch_block_offsets(
        self,
        dst: torch.Tensor,
        request_ids: list[int],
        role: str,
        max_blocks: int | None = None,
    ) -> None: ...


@dataclass
class KVCacheParams:
    """Tokens that each sequence has in the cache before this step."""

    use_cache: bool
    num_cached_tokens_per_seq: list[int]


class AttentionMetadata:
    """Host and device description of one step, reused from step to step.

    Sequences are ordered contexts first. Device tensors are allocated once for the largest step,
    so that a captured graph keeps reading the same addresses; `prepare` fills them.

    Args:
        max_draft_len: drafts per request and step, which advance the lengths on the device.
        trim: issue only the uploads that bring news and the refreshes that somebody reads; off is
            the same step with all of them.

    Attributes:
        kv_lens_hook_idempotent: `on_update_kv_lens` is a function of the current lengths alone, so
            that of two calls only the last counts. A class says so once somebody has looked.
        request_ids, seq_lens, num_contexts, kv_cache_params, kv_limits: set by the model engine
            before `prepare`; kv_limits, the tokens that each sequence has room for, is read only
            where a step drafts.
        seq_lens_cuda: int32 [max_num_requests], tokens of each sequence in this step.
        kv_lens_cuda: int32 [max_num_requests], cached tokens after this step; 0 marks a padding
            row.
        kv_lens: the same on the host.
        kv_limits_cuda: int32 [max_num_requests], tokens that a request has room for; rows at or
            past it are padding, so that drafts never pass a request's end.
        position_ids: int64 [tokens], -1 for padding.
        batch_indices_cuda: int64 [max_num_requests], 0, 1, 2, ...
        num_seqs, num_generations, num_tokens, num_ctx_tokens: counts of the step, padding included.
    """

    kv_lens_hook_idempotent: ClassVar[bool] = False
    position_ids: torch.Tensor

    def __init__(
        self,
        max_num_requests: int,
        max_num_tokens: int,
        kv_cache_manager: KVCacheManager,
        device: torch.device,
        *,
        max_draft_len: int = 0,
        trim: bool = True,
    ) -> None:
        self.max_num_requests = max_num_requests
        self.max_num_tokens = max_num_tokens
        self.kv_cache_manager = kv_cache_manager
        self.device = device
        self.max_draft_len = max_draft_len
        self.trim = trim
        self.staging = HostStaging(skip_unchanged=trim)
        self.request_ids: list[int] = []
        self.seq_lens: list[int] = []
        self.num_contexts = 0
        self.kv_cache_params = KVCacheParams(True, [])
        self.kv_lens: list[int] = []
        self.kv_limits: list[int] = []
        self.num_seqs = self.num_generations = self.num_tokens = self.num_ctx_tokens = 0
        self.seq_lens_cuda = torch.ones(max_num_requests, dtype=torch.int32, device=device)
        self.kv_lens_cuda = torch.zeros(max_num_requests, dtype=torch.int32, device=device)
        self.kv_limits_cuda = torch.full(
            (max_num_requests,), NO_LIMIT, dtype=torch.int32, device=device
        )
        self.batch_indices_cuda = torch.arange(max_num_requests, device=device)
        self._deferred = False

    @property
    def max_kv_len(self) -> int:
        return max(self.kv_lens)

    def prepare(self) -> None:
        """Derive the counts and `kv_lens`, and upload the length vectors."""
        self._count_tokens()
        cached = self.kv_cache_params.num_cached_tokens_per_seq
        self.kv_lens = [c + s for c, s in zip(cached, self.seq_lens, strict=True)]
        self.staging.copy_if_changed(self.seq_lens_cuda, self.seq_lens)
        # Also corrected and advanced on the device, so always uploaded.
        self.staging.copy(self.kv_lens_cuda, self.kv_lens)
        if self.max_draft_len:
            self.staging.copy_if_changed(self.kv_limits_cuda, self.kv_limits)

    @contextmanager
    def defer_cuda_graph_decode_outputs(self) -> Iterator[None]:
        """In this scope `prepare` leaves what follows from the lengths to the head of the forward.

        For an engine whose forward begins with `on_update_kv_lens`, captured or not: nothing reads
        those tables before, and lengths that are still to be corrected would make them in vain.
        """
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def on_update_kv_lens(self) -> None:
        """Recompute everything that follows from `kv_lens_cuda` and `seq_lens_cuda`, on the device
        alone."""

    def _count_tokens(self) -> None:
        self.num_seqs, self.num_tokens = len(self.seq_lens), sum(self.seq_lens)
        self.num_generations = self.num_seqs - self.num_contexts
        self.num_ctx_tokens = sum(self.seq_lens[: self.num_contexts])

    # --- a draft loop over the step's sequences ---------------------------------------------------

    def last_accepted_rows(self, num_accepted: torch.Tensor) -> torch.Tensor:
        """int64 [num_seqs]: each context's last row, each generation's row of the last accepted
        token.

        Args:
            num_accepted: int [num_seqs], at least 1; contexts' entries do not matter.
        """
        ends = self.seq_lens_cuda[: self.num_seqs].long().cumsum(0)
        if self.num_contexts == self.num_seqs:
            return ends - 1
        starts = ends - self.seq_lens_cuda[: self.num_seqs]
        return torch.cat(
            [ends[: self.num_contexts] - 1, (starts + num_accepted - 1)[self.num_contexts :]]
        )

    def begin_draft_rows(self, positions: torch.Tensor) -> None:
        """From here on one row per request, at `positions` int64 [num_seqs]; see
        `end_draft_rows`."""
        n = self.num_seqs
        self._verify_rows = (self.num_contexts, self.seq_lens, self.kv_lens)
        self._saved_lens = (self.seq_lens_cuda[:n].clone(), self.kv_lens_cuda[:n].clone())
        self.seq_lens_cuda[:n] = 1  # and back in `end_draft_rows`, so staging stays right
        self.num_contexts, self.seq_lens = 0, [1] * n
        self._count_tokens()
        self.advance_draft_rows(positions)

    def advance_draft_rows(self, positions: torch.Tensor) -> None:
        """Move each request's row to `positions` int64 [num_seqs]; -1 is padding."""
        self.kv_lens_cuda[: self.num_seqs] = positions + 1
        self.kv_lens = [n + 1 for n in self.kv_lens]
        self.update_for_spec_dec(positions)

    def update_for_spec_dec(self, positions: torch.Tensor) -> None:
        """Refresh what the next draft step reads, whose rows are at `positions`."""
        self.on_update_kv_lens()

    def end_draft_rows(self) -> None:
        """Back to the step's own rows and lengths."""
        n = self.num_seqs
        self.num_contexts, self.seq_lens, self.kv_lens = self._verify_rows
        self.seq_lens_cuda[:n], self.kv_lens_cuda[:n] = self._saved_lens
        self._count_tokens()
