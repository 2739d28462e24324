"""The DSA indexer: scores every cached key with a few cheap heads and keeps the `index_topk` best.

score(s, t) = sum_h w_h(s) * relu(q_h(s) . k(t)) * head_dim^-0.5 * n_heads^-0.5, causal, in fp32.
There is no softmax, and scores may be negative.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from tensorrt_llm._torch.attention.backends.sparse.dsa.cache_manager import (
    INDEX_KEY,
    DSACacheLayout,
)
from tensorrt_llm._torch.attention.backends.sparse.dsa.metadata import (
    DSAtrtllmAttentionMetadata,
    Selection,
)
from tensorrt_llm._torch.attention.backends.sparse.dsa.params import DSAParams
from tensorrt_llm._torch.custom_ops.fp8 import quantize_e4m3_ue8m0
from tensorrt_llm._torch.custom_ops.paged_mqa_logits import paged_mqa_logits
from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.modules.rms_norm import LayerNorm
from tensorrt_llm._torch.modules.rotary_embedding import apply_rotary
from tensorrt_llm._torch.modules.weight_spec import WeightSpec
from tensorrt_llm.mapping import Mapping

KEY_NORM_EPS = 1e-6  # transformers, vLLM and TensorRT-LLM agree on it; the config has no field
# Bytes that the per-head scores of one tile of queries may take.
SCORE_TILE_BYTES = {"cpu": 1 << 25, "cuda": 1 << 29}


class Indexer(nn.Module):
    """Index queries, index keys and the choice of a full-indexer layer; the same on every rank.

    `wk` and `weights_proj` are rows of the attention's fused input projection, which passes their
    results in.

    Args:
        layer_idx: for the index-key pool.
        rope_dim: the first channels of query and key that are rotated.
    """

    def __init__(
        self,
        params: DSAParams,
        layer_idx: int,
        q_lora_rank: int,
        rope_dim: int,
        layout: DSACacheLayout,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.params, self.layout = params, layout
        self.layer_idx, self.rope_dim = layer_idx, rope_dim
        heads, dim = params.index_n_heads, params.index_head_dim
        self.wq_b = Linear(q_lora_rank, heads * dim, mapping=Mapping(), dtype=dtype, device=device)
        self.k_norm = LayerNorm(dim, KEY_NORM_EPS, dtype, device)
        self.weight_scale = dim**-0.5 * heads**-0.5

    def weight_specs(self, name: str) -> Iterator[WeightSpec]:
        yield from self.wq_b.weight_specs(f"{name}.wq_b")
        yield from self.k_norm.weight_specs(f"{name}.k_norm")

    def forward(
        self,
        qr: torch.Tensor,
        k: torch.Tensor,
        weights: torch.Tensor,
        rotations: torch.Tensor,
        metadata: DSAtrtllmAttentionMetadata,
    ) -> Selection:
        """Append the index keys and choose.

        Args:
            qr: [tokens, q_lora_rank], the normed query latent.
            k: [tokens, head_dim], wk's result before its norm.
            weights: [tokens, n_heads], weights_proj's result.
            rotations: complex64 [tokens, 1, rope_dim / 2].
        """
        keys = self._rotate(self.k_norm(k).unsqueeze(1), rotations).squeeze(1)
        # Written also where the choice is skipped, since later steps read it.
        self.layout.write_index_keys(
            metadata.kv_cache_manager,
            self.layer_idx,
            keys,
            metadata.index_block,
            metadata.index_offset,
        )
        chosen = []
        if metadata.num_contexts:
            chosen.append(self._select_contexts(qr, weights, rotations, metadata))
        if metadata.num_generations:
            chosen.append(self._select_generations(qr, weights, rotations, metadata))
        selection = metadata.select(chosen[0] if len(chosen) == 1 else torch.cat(chosen))
        if metadata.in_mtp_draft_loop:
            metadata.keep_shared_selection(selection)
        return selection

    def _rotate(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        rotated = apply_rotary(x[..., : self.rope_dim], rotations)
        return torch.cat([rotated, x[..., self.rope_dim :]], dim=-1)

    def _queries(
        self, qr: torch.Tensor, weights: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 queries [tokens, n_heads, head_dim] and head weights [tokens, n_heads] with all
        scales folded in."""
        q = self.wq_b(qr).view(-1, self.params.index_n_heads, self.params.index_head_dim)
        q = self._rotate(q, rotations)
        w = weights.float() * self.weight_scale
        if not self.layout.fp8:
            return q.float(), w
        quantised, scale = quantize_e4m3_ue8m0(q)
        if scale.shape[-1] == 1:
            return quantised.float(), w * scale.squeeze(-1)
        repeats = q.shape[-1] // scale.shape[-1]
        return quantised.float() * scale.repeat_interleave(repeats, dim=-1), w

    def _select_contexts(
        self,
        qr: torch.Tensor,
        weights: torch.Tensor,
        rotations: torch.Tensor,
        metadata: DSAtrtllmAttentionMetadata,
    ) -> torch.Tensor:
        """One request after the other: their key counts differ and so would the width of a
        batch."""
        chosen, start = [], 0
        for i in range(metadata.num_contexts):
            part = slice(start, start := start + metadata.seq_lens[i])
            positions = metadata.position_ids[part]
            kv_len = metadata.kv_lens[i]
            if kv_len <= self.params.index_topk:
                chosen.append(dense_rows(positions, metadata.selection_width))
                continue
            q, w = self._queries(qr[part], weights[part], rotations[part])
            pages = -(-kv_len // metadata.kv_cache_manager.tokens_per_block)
            blocks = metadata.indexer_k_cache_block_offsets[i, :pages].long()
            keys, scales = self._read(metadata, blocks)
            chosen.append(
                self._top_k_tiled(q, w, keys, scales, positions, metadata.selection_width)
            )
        return torch.cat(chosen)

    def _select_generations(
        self,
        qr: torch.Tensor,
        weights: torch.Tensor,
        rotations: torch.Tensor,
        metadata: DSAtrtllmAttentionMetadata,
    ) -> torch.Tensor:
        """All generation rows at once; equal numbers of rows per request."""
        positions, width = metadata.position_ids, metadata.selection_width
        topk = self.params.index_topk
        if metadata.num_contexts:
            part = slice(metadata.num_ctx_tokens, None)
            qr, weights = qr[part], weights[part]
            rotations, positions = rotations[part], positions[part]
        if metadata.skip_indexer_for_gen_reqs:
            return dense_rows(positions, width)
        metadata.check_indexer_schedule()
        q, w = self._queries(qr, weights, rotations)
        if metadata.num_sms:
            return top_k(self._paged_scores(q, w, positions, metadata), None, topk, width)
        scores = self._gathered_scores(q, w, metadata)
        return top_k(scores, metadata.generation_keys().future, topk, width)

    def _paged_scores(
        self,
        q: torch.Tensor,
        w: torch.Tensor,
        positions: torch.Tensor,
        metadata: DSAtrtllmAttentionMetadata,
    ) -> torch.Tensor:
        """fp32 [rows, keys], causal, by the kernel that reads the pages as the schedule says."""
        manager, requests = metadata.kv_cache_manager, metadata.num_generations
        table = metadata.generation_index_table()
        out = q.new_empty(q.shape[0], table.shape[1] * manager.tokens_per_block)
        paged_mqa_logits(
            q.view(requests, -1, *q.shape[1:]),
            w.view(requests, -1, w.shape[1]),
            manager.pool(INDEX_KEY),
            manager.layer_slot(INDEX_KEY, self.layer_idx),
            self.layout.key_dtype,
            table,
            positions,
            metadata.scheduler_metadata_buffer,
            metadata.row_order[:requests],
            out,
        )
        return out

    def _gathered_scores(
        self, q: torch.Tensor, w: torch.Tensor, metadata: DSAtrtllmAttentionMetadata
    ) -> torch.Tensor:
        """fp32 [rows, keys], not yet causal: all pages gathered, then plain matrix products."""
        keys, scales = self._read(metadata, metadata.generation_keys().blocks)
        requests = metadata.num_generations
        scores = index_scores(
            q.view(requests, -1, *q.shape[1:]),
            w.view(requests, -1, w.shape[1]),
            keys.view(requests, -1, keys.shape[1]),
            None if scales is None else scales.view(requests, -1),
        )
        return scores.flatten(0, 1)

    def _read(
        self, metadata: DSAtrtllmAttentionMetadata, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.layout.read_index_pages(metadata.kv_cache_manager, self.layer_idx, blocks)

    def _top_k_tiled(
        self,
        q: torch.Tensor,
        w: torch.Tensor,
        keys: torch.Tensor,
        scales: torch.Tensor | None,
        positions: torch.Tensor,
        width: int,
    ) -> torch.Tensor:
        per_query = q.shape[1] * keys.shape[0] * 4
        tile = max(1, SCORE_TILE_BYTES[q.device.type] // per_query)
        chosen = []
        for qs, ws, ps in zip(q.split(tile), w.split(tile), positions.split(tile), strict=True):
            scores = index_scores(
                qs[None], ws[None], keys[None], None if scales is None else scales[None]
            )
            future = torch.arange(keys.shape[0], device=q.device) > ps.unsqueeze(1)
            chosen.append(top_k(scores[0], future, self.params.index_topk, width))
        return torch.cat(chosen)


def index_scores(
    q: torch.Tensor, w: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor | None
) -> torch.Tensor:
    """q [requests, rows, heads, dim], w [requests, rows, heads], keys [requests, kv, dim], scales
    [requests, kv] or None, all fp32 -> scores fp32 [requests, rows, kv], not yet causal."""
    requests, rows, heads, _ = q.shape
    dots = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)).relu_()
    scores = torch.bmm(
        w.reshape(requests * rows, 1, heads), dots.view(requests * rows, heads, -1)
    ).view(requests, rows, -1)
    return scores if scales is None else scores * scales.unsqueeze(1)


def top_k(scores: torch.Tensor, future: torch.Tensor | None, k: int, width: int) -> torch.Tensor:
    """The k best keys that are not in the future.

    Args:
        scores: fp32 [tokens, kv]; overwritten.
        future: bool [tokens, kv]; None where the scores are -inf there already.

    Returns:
        int32 [tokens, width], -1 where a token has fewer keys. Which of several equal scores at
        the border are taken is torch.topk's choice.
    """
    if future is not None:
        scores.masked_fill_(future, float("-inf"))
    best = scores.topk(min(k, scores.shape[1]), dim=-1)
    indices = best.indices.masked_fill(best.values == float("-inf"), -1).int()
    missing = width - indices.shape[1]
    return F.pad(indices, (0, missing), value=-1) if missing > 0 else indices


def dense_rows(positions: torch.Tensor, width: int) -> torch.Tensor:
    """[0, 1, ..., p, -1, ...] for each position p: every key, int32 [tokens, width]."""
    keys = torch.arange(width, dtype=torch.int32, device=positions.device)
    return torch.where(keys <= positions.unsqueeze(1), keys, -1)
