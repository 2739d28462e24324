"""Runs one step of the model on one rank: target, choice of tokens, and the draft loop.

What a step hands to the next one (tokens, drafts, how far the guess about the cache was off) stays
on the device in the `TokenStore`, so that the next step can be launched before this one is over.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tensorrt_llm._torch.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
from tensorrt_llm._torch.models.modeling_deepseekv3 import GlmMoeDsaForCausalLM
from tensorrt_llm._torch.pyexecutor.cuda_graph_runner import CUDAGraphRunner
from tensorrt_llm._torch.pyexecutor.launch_counter import DeviceOps, LaunchCounts
from tensorrt_llm._torch.pyexecutor.step import (
    StepHandle,
    StepInputs,
    StepPaths,
    TokenStore,
)
from tensorrt_llm._torch.speculative.interface import SpecMetadata, SpecOutputs, SpecWorkerBase

if TYPE_CHECKING:
    from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig
    from tensorrt_llm._torch.pyexecutor.host_choice import HostChoice
    from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
    from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest
    from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests


class PyTorchModelEngine:
    """One model on one rank, with its attention metadata, token store and decode graphs.

    Args:
        worker: accepts and drafts; without drafting it only accepts.
    """

    def __init__(
        self,
        model: GlmMoeDsaForCausalLM,
        kv_cache_manager: "KVCacheManagerV2",
        config: "ExecutorConfig",
        worker: SpecWorkerBase,
    ) -> None:
        self.model, self.worker = model, worker
        self.kv_cache_manager = kv_cache_manager
        self.device = model.config.device
        self.rows_per_generation = 1 + worker.max_draft_len
        self.counts_launches = config.iter_perf_stats
        self.attn_metadata = DSAtrtllmAttentionMetadata(
            config.max_batch_size,
            max(config.max_num_tokens, config.max_batch_size * self.rows_per_generation),
            kv_cache_manager,
            self.device,
            params=model.config.pretrained_config.dsa_params,
            layout=model.config.cache_layout,
            max_draft_len=worker.max_draft_len,
            trim=worker.tail_trim,
        )
        self.store = TokenStore(config.max_batch_size, worker.max_draft_len, self.device)
        self.graphs = CUDAGraphRunner(self, config.cuda_graph_batch_sizes)

    @property
    def weights_bytes(self) -> int:
        """Memory of this rank's weights."""
        return sum(p.nbytes for p in self.model.parameters())

    def warmup(self, progress: bool) -> None:
        """Capture the decode graphs."""
        self.graphs.capture_all(progress)

    @torch.inference_mode()
    def launch(self, batch: "ScheduledRequests", choose: "HostChoice | None" = None) -> StepHandle:
        """Start a step; its results come through the handle.

        Args:
            choose: makes the tokens from the logits: one row per context (its chunk's last; all its
                rows if `batch.context_logits_needed`), then 1 + K rows per generation. None is
                greedy.
        """
        if not self.counts_launches:
            return self._launch(batch, choose)
        staging = self.attn_metadata.staging
        before = staging.num_uploads
        with DeviceOps(self.device) as ops:
            handle = self._launch(batch, choose)
        uploads = staging.num_uploads - before
        handle.launch_counts = LaunchCounts(uploads, ops.count - uploads)
        return handle

    def _launch(self, batch: "ScheduledRequests", choose: "HostChoice | None") -> StepHandle:
        generations = batch.generation_requests
        greedy_decode = choose is None and not batch.context_requests
        if greedy_decode and self.graphs.fits(len(generations)):
            packed, paths = self.graphs.replay(generations)
        else:
            packed, paths = self.run(self._stage(batch), choose)
        counted = None if batch.context_requests else paths
        return StepHandle(packed, self.rows_per_generation, counted)

    # --- staging: host to device ------------------------------------------------------------------

    def _stage(self, batch: "ScheduledRequests") -> StepInputs:
        metadata = self.attn_metadata
        tokens: list[int] = []
        following: list[int] = []
        gather: list[int] = []
        self.begin_sequences(len(batch.context_requests))
        for request in batch.context_requests:
            start = request.num_computed_tokens
            end = start + request.chunk_len
            first = len(tokens) if batch.context_logits_needed else len(tokens) + end - start - 1
            tokens += request.prompt_token_ids[start:end]
            gather += range(first, len(tokens))
            following.append(-1 if request.is_last_chunk else request.prompt_token_ids[end])
            self.add_sequence(request, end - start, start)
        for request in batch.generation_requests:
            self.add_sequence(request, self.rows_per_generation, request.num_assumed_tokens)
        self.finish_sequences()
        rows = len(batch.generation_requests) * self.rows_per_generation
        gather += range(len(tokens), len(tokens) + rows)
        # A decode step has the graphs' shapes also when it runs eagerly, so that both give the same
        # bits.
        static = self.device.type == "cuda" and not batch.context_requests
        self.prepare(static_width=static)
        return StepInputs(
            num_contexts=len(batch.context_requests),
            num_generations=len(batch.generation_requests),
            context_tokens=self._upload(tokens),
            context_next_tokens=self._upload(following),
            gather_ids=None if len(gather) == metadata.num_tokens else self._upload(gather),
        )

    def begin_sequences(self, num_contexts: int) -> None:
        """Forget the last step's sequences."""
        metadata = self.attn_metadata
        metadata.num_contexts = num_contexts
        metadata.request_ids, metadata.seq_lens, metadata.kv_limits = [], [], []
        metadata.kv_cache_params.num_cached_tokens_per_seq = []
        self._slots: list[int] = []
        self._corrected: list[int] = []

    def add_sequence(self, request: "LlmRequest", seq_len: int, num_cached: int) -> None:
        """Add one sequence of `seq_len` rows after `num_cached` tokens."""
        metadata = self.attn_metadata
        metadata.request_ids.append(request.request_id)
        metadata.seq_lens.append(seq_len)
        metadata.kv_limits.append(request.max_total_tokens)
        metadata.kv_cache_params.num_cached_tokens_per_seq.append(num_cached)
        slot = self.kv_cache_manager.row(request.request_id)
        self._slots.append(slot)
        self._corrected.append(slot if request.rows_in_flight else -1)

    def add_padding(self) -> None:
        """Add rows that write nowhere and whose results nobody reads."""
        metadata, rows = self.attn_metadata, self.rows_per_generation
        metadata.seq_lens.append(rows)
        metadata.kv_limits.append(0)
        metadata.kv_cache_params.num_cached_tokens_per_seq.append(-rows)
        self._slots.append(self.store.spare_slot)
        self._corrected.append(-1)

    def finish_sequences(self) -> None:
        """Upload where the sequences live in the token store, and whose cache length was a
        guess."""
        staging, store = self.attn_metadata.staging, self.store
        staging.copy_if_changed(store.slots, self._slots)
        staging.copy_if_changed(store.corrected, self._corrected)

    def prepare(self, *, static_width: bool, skip_indexer: bool | None = None) -> None:
        """Fill the attention metadata, but for what the head of the step recomputes anyway."""
        metadata = self.attn_metadata
        if not metadata.trim:
            metadata.prepare(static_width=static_width, skip_indexer=skip_indexer)
            return
        with metadata.defer_cuda_graph_decode_outputs():
            metadata.prepare(static_width=static_width, skip_indexer=skip_indexer)

    def _upload(self, values: list[int]) -> torch.Tensor:
        return self.attn_metadata.staging.upload(values, self.device)

    # --- the step on the device -------------------------------------------------------------------

    def run(
        self, inputs: StepInputs, choose: "HostChoice | None" = None
    ) -> tuple[torch.Tensor, StepPaths]:
        """The whole step on staged inputs; without `choose` a graph can capture it.

        Returns:
            float64 [seqs, 2 + 3 * K + 1], see `StepHandle`, and which paths it took.
        """
        metadata, store = self.attn_metadata, self.store
        slots = store.slots[: inputs.num_seqs]
        self._preprocess_inputs(inputs)
        draft_sampling = (
            choose.stage_draft_sampling(metadata.staging, self.device) if choose else None
        )
        verified = store.next_new_tokens[slots[inputs.num_contexts :]]
        input_ids = verified.flatten()
        if inputs.num_contexts:
            input_ids = torch.cat([inputs.context_tokens, input_ids])
        hidden_states = self.model.model(metadata, input_ids, metadata.position_ids)
        logits = self.model.logits_processor(hidden_states, self.model.lm_head, inputs.gather_ids)
        best, target_tokens = logits.max(dim=-1)
        if choose is not None:
            target_tokens = choose(logits)
            best = torch.zeros(target_tokens.shape, device=self.device)  # `choose` has looked
        spec_metadata = SpecMetadata(
            max_draft_len=self.worker.max_draft_len,
            num_contexts=inputs.num_contexts,
            num_generations=inputs.num_generations,
            draft_tokens=verified[:, 1:],
            context_next_tokens=inputs.context_next_tokens,
            slot_ids=slots,
            draft_sampling=draft_sampling,
            is_cuda_graph=inputs.is_cuda_graph,
        )
        outputs = self.worker.forward(
            input_ids,
            hidden_states,
            target_tokens,
            metadata,
            spec_metadata,
            self.model.draft_model,
        )
        store.update(slots, outputs, inputs.num_contexts)
        paths = StepPaths(self.model.decode_path, self.worker.draft_path)
        return _pack(outputs, best, inputs.num_contexts), paths

    def _preprocess_inputs(self, inputs: StepInputs) -> None:
        """Correct the cache lengths by what the step in flight really accepted, then derive from
        them."""
        metadata, store, n = self.attn_metadata, self.store, inputs.num_seqs
        if self.worker.max_draft_len:  # without drafts the host is never wrong
            if not (metadata.trim and metadata.kv_lens_hook_idempotent):
                metadata.on_update_kv_lens()
            corrected = store.corrected[:n]
            offsets = store.kv_correction[corrected.clamp(min=0)].masked_fill(corrected < 0, 0)
            metadata.kv_lens_cuda[:n] += offsets
        metadata.on_update_kv_lens()


def _pack(outputs: SpecOutputs, best: torch.Tensor, num_contexts: int) -> torch.Tensor:
    """One tensor for one transfer. Ids are below 2^53, so float64 holds them and the logits."""
    rows = outputs.new_tokens.shape[1]
    contexts = F.pad(best[:num_contexts].unsqueeze(1), (0, rows - 1))
    largest = torch.cat([contexts, best[num_contexts:].view(-1, rows)])
    counts = outputs.new_tokens_lens.unsqueeze(1)
    integers = torch.cat([counts, outputs.new_tokens, outputs.next_draft_tokens], dim=1)
    return torch.cat([integers.double(), largest.double()], dim=1)
