"""What a model needs to know of a step beside its tokens: lengths, positions and where the cache
rows are."""

from dataclasses import dataclass
from typing import Protocol

import torch

from tensorrt_llm._torch.host_staging import HostStaging


class KVCacheManager(Protocol):
    """The part of the KV cache manager that attention reads."""

    tokens_per_block: int
    max_blocks_per_seq: int
    table_version: int

    def pool(self, role: str) -> torch.Tensor: ...

    def has_buffer(self, role: str, layer_idx: int) -> bool: ...

    def layer_slot(self, role: str, layer_idx: int) -> int: ...

    def copy_batch_block_offsets(
        self, dst: torch.Tensor, request_ids: list[int], role: str
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

    Attributes:
        request_ids, seq_lens, num_contexts, kv_cache_params, kv_limits: set by the model engine
            before `prepare`; kv_limits, the tokens that each sequence has room for, only where a
            step may draft past them.
        seq_lens_cuda: int32 [max_num_requests], tokens of each sequence in this step.
        kv_lens_cuda: int32 [max_num_requests], cached tokens after this step; 0 marks a padding
            row.
        kv_lens: the same on the host.
        batch_indices_cuda: int64 [max_num_requests], 0, 1, 2, ...
        num_seqs, num_generations, num_tokens, num_ctx_tokens: counts of the step, padding included.
    """

    def __init__(
        self,
        max_num_requests: int,
        max_num_tokens: int,
        kv_cache_manager: KVCacheManager,
        device: torch.device,
    ) -> None:
        self.max_num_requests = max_num_requests
        self.max_num_tokens = max_num_tokens
        self.kv_cache_manager = kv_cache_manager
        self.device = device
        self.staging = HostStaging()
        self.request_ids: list[int] = []
        self.seq_lens: list[int] = []
        self.num_contexts = 0
        self.kv_cache_params = KVCacheParams(True, [])
        self.kv_lens: list[int] = []
        self.kv_limits: list[int] = []
        self.num_seqs = self.num_generations = self.num_tokens = self.num_ctx_tokens = 0
        self.seq_lens_cuda = torch.ones(max_num_requests, dtype=torch.int32, device=device)
        self.kv_lens_cuda = torch.zeros(max_num_requests, dtype=torch.int32, device=device)
        self.batch_indices_cuda = torch.arange(max_num_requests, device=device)

    @property
    def max_kv_len(self) -> int:
        return max(self.kv_lens)

    def prepare(self) -> None:
        """Derive the counts and `kv_lens`, and upload both length vectors."""
        self._count_tokens()
        cached = self.kv_cache_params.num_cached_tokens_per_seq
        self.kv_lens = [c + s for c, s in zip(cached, self.seq_lens, strict=True)]
        self.staging.copy_if_changed(self.seq_lens_cuda, self.seq_lens)
        # Also corrected and advanced on the device, so always uploaded.
        self.staging.copy(self.kv_lens_cuda, self.kv_lens)

    def _count_tokens(self) -> None:
        self.num_seqs, self.num_tokens = len(self.seq_lens), sum(self.seq_lens)
        self.num_generations = self.num_seqs - self.num_contexts
        self.num_ctx_tokens = sum(self.seq_lens[: self.num_contexts])
