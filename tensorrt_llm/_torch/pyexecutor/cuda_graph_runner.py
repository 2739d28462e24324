"""Decode steps as CUDA graphs: one per batch size, and per side of the short/long seam of the
indexer."""

import bisect
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from tensorrt_llm._torch.attention.backends.interface import copy_from_host
from tensorrt_llm._torch.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
from tensorrt_llm._torch.models.modeling_deepseekv3 import GlmMoeDsaForCausalLM
from tensorrt_llm._torch.modules.fused_moe.fused_moe import MAX_GRAPH_TOKENS

WARMUP_RUNS = 2  # lets libraries choose and allocate before a capture forbids it
PADDING = -1  # cached tokens of a padding row: its length becomes 0 and it writes nowhere


class CUDAGraphRunner:
    """Captures the model over the metadata's fixed buffers and replays it.

    A batch runs in the smallest captured size that holds it; the rows above it are padding, which
    writes nowhere and whose logits are dropped. While no request has more than `index_topk` tokens
    a graph without index scores serves ("short").

    Args:
        batch_sizes: sizes to capture; none turns graphs off.

    Raises:
        ValueError: a size that is larger than a step may be or than the experts' capturable path
            serves.
    """

    def __init__(
        self,
        model: GlmMoeDsaForCausalLM,
        attn_metadata: DSAtrtllmAttentionMetadata,
        batch_sizes: Sequence[int],
    ) -> None:
        self.model, self.attn_metadata = model, attn_metadata
        self.batch_sizes = sorted(set(batch_sizes))
        largest = min(attn_metadata.max_num_requests, MAX_GRAPH_TOKENS)
        if self.batch_sizes and self.batch_sizes[-1] > largest:
            raise ValueError(
                f"cuda graph batch size {self.batch_sizes[-1]} is above {largest}, "
                "the most that fits"
            )
        self.graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self.pool: Any = None  # memory that all graphs share, known after the first capture
        self.input_ids = torch.zeros(
            self.batch_sizes[-1] if self.batch_sizes else 0,
            dtype=torch.int64,
            device=attn_metadata.device,
        )

    def fits(self, batch_size: int) -> bool:
        return bool(self.batch_sizes) and batch_size <= self.batch_sizes[-1]

    def capture_all(self, progress: bool) -> None:
        """Capture from the largest size down, so that the smaller ones reuse its memory."""
        for batch_size in tqdm(
            self.batch_sizes[::-1],
            desc="Capturing decode graphs",
            disable=not progress or not self.batch_sizes,
        ):
            for short in (True, False):
                self.graphs[batch_size, short] = self._capture(batch_size, short)

    def replay(self, request_ids: list[int], tokens: list[int], cached: list[int]) -> torch.Tensor:
        """One token of each request -> fp32 logits [requests, vocab_size], valid until the next
        replay."""
        batch_size = self.batch_sizes[bisect.bisect_left(self.batch_sizes, len(tokens))]
        self._set_sequences(request_ids, cached, batch_size)
        self.attn_metadata.prepare(static_width=True)
        copy_from_host(self.input_ids, tokens)
        graph, logits = self.graphs[batch_size, self.attn_metadata.skip_indexer_for_gen_reqs]
        graph.replay()
        return logits[: len(tokens)]

    def _set_sequences(self, request_ids: list[int], cached: list[int], batch_size: int) -> None:
        metadata, padding = self.attn_metadata, batch_size - len(request_ids)
        metadata.request_ids, metadata.num_contexts = request_ids, 0
        metadata.seq_lens = [1] * batch_size
        metadata.kv_cache_params.num_cached_tokens_per_seq = cached + [PADDING] * padding

    def _capture(self, batch_size: int, short: bool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        self._set_sequences([], [], batch_size)
        self.attn_metadata.prepare(static_width=True, skip_indexer=short)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP_RUNS):
                self._run(batch_size)
        torch.cuda.current_stream().wait_stream(side)
        # Forgets the key tables that the warm-up made, or the graph would not make its own.
        self.attn_metadata.on_update_kv_lens()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits = self._run(batch_size)
        self.pool = self.pool or graph.pool()
        return graph, logits

    def _run(self, batch_size: int) -> torch.Tensor:
        return self.model(
            self.attn_metadata, self.input_ids[:batch_size], self.attn_metadata.position_ids
        )
