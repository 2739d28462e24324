"""Turns scheduled requests into the model's inputs and runs it, eagerly or by replaying a captured
graph."""

from typing import TYPE_CHECKING

import torch

from tensorrt_llm._torch.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
from tensorrt_llm._torch.models.modeling_deepseekv3 import GlmMoeDsaForCausalLM
from tensorrt_llm._torch.pyexecutor.cuda_graph_runner import CUDAGraphRunner

if TYPE_CHECKING:
    from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig
    from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
    from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests


class PyTorchModelEngine:
    """One model on one rank, with its attention metadata and decode graphs."""

    def __init__(
        self,
        model: GlmMoeDsaForCausalLM,
        kv_cache_manager: "KVCacheManagerV2",
        config: "ExecutorConfig",
    ) -> None:
        self.model = model
        self.device = model.config.device
        self.attn_metadata = DSAtrtllmAttentionMetadata(
            config.max_batch_size,
            max(config.max_num_tokens, config.max_batch_size),
            kv_cache_manager,
            self.device,
            params=model.config.pretrained_config.dsa_params,
            layout=model.config.cache_layout,
        )
        self.graphs = CUDAGraphRunner(model, self.attn_metadata, config.cuda_graph_batch_sizes)

    @property
    def weights_bytes(self) -> int:
        """Memory of this rank's weights."""
        return sum(p.nbytes for p in self.model.parameters())

    def warmup(self, progress: bool) -> None:
        """Capture the decode graphs."""
        self.graphs.capture_all(progress)

    def forward(self, batch: "ScheduledRequests") -> torch.Tensor:
        """Logits of one step.

        Returns:
            fp32 [rows, vocab_size]: one row per context (its last token of the chunk; all its
            tokens if `batch.context_logits_needed`), then one per generation request.
        """
        generations = batch.generation_requests
        if not batch.context_requests and self.graphs.fits(len(generations)):
            cached = [r.num_computed_tokens for r in generations]
            return self.graphs.replay(
                [r.request_id for r in generations], [r.last_token for r in generations], cached
            )
        return self._forward_eager(batch)

    def _forward_eager(self, batch: "ScheduledRequests") -> torch.Tensor:
        metadata = self.attn_metadata
        tokens: list[int] = []
        gather: list[int] = []
        self._clear_sequences(len(batch.context_requests))
        for request in batch.context_requests:
            start = request.num_computed_tokens
            chunk = request.prompt_token_ids[start : start + request.chunk_len]
            first = len(tokens) if batch.context_logits_needed else len(tokens) + len(chunk) - 1
            gather += range(first, len(tokens) + len(chunk))
            tokens += chunk
            self._add_sequence(request.request_id, len(chunk), start)
        for request in batch.generation_requests:
            gather.append(len(tokens))
            tokens.append(request.last_token)
            self._add_sequence(request.request_id, 1, request.num_computed_tokens)
        # A decode step has the graphs' shapes also when it runs eagerly, so that both give the
        # same bits.
        metadata.prepare(static_width=self.device.type == "cuda" and not batch.context_requests)
        gather_ids = None if len(gather) == len(tokens) else self._upload(gather)
        return self.model(metadata, self._upload(tokens), metadata.position_ids, gather_ids)

    def _clear_sequences(self, num_contexts: int) -> None:
        self.attn_metadata.num_contexts = num_contexts
        self.attn_metadata.request_ids, self.attn_metadata.seq_lens = [], []
        self.attn_metadata.kv_cache_params.num_cached_tokens_per_seq = []

    def _add_sequence(self, request_id: int, seq_len: int, num_cached: int) -> None:
        self.attn_metadata.request_ids.append(request_id)
        self.attn_metadata.seq_lens.append(seq_len)
        self.attn_metadata.kv_cache_params.num_cached_tokens_per_seq.append(num_cached)

    def _upload(self, values: list[int]) -> torch.Tensor:
        host = torch.tensor(values, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)
