"""Multi-head latent attention in its absorbed form, with one fused projection of the layer
input."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from tensorrt_llm._torch.modules.linear import (
    Linear,
    TensorParallelMode,
    empty_parameter,
    shard_range,
)
from tensorrt_llm._torch.modules.rms_norm import RMSNorm
from tensorrt_llm._torch.modules.rotary_embedding import apply_rotary
from tensorrt_llm._torch.modules.weight_spec import WeightSpec
from tensorrt_llm.mapping import Mapping


class LatentAttention(Protocol):
    """Cache and attention of one layer."""

    def append(self, latent: torch.Tensor, metadata: Any) -> None: ...

    def attend(self, q: torch.Tensor, metadata: Any) -> torch.Tensor: ...


class KeySelector(Protocol):
    """The indexer of one layer; `weight_specs` without wk and weights_proj, which are rows of the
    fused projection."""

    def weight_specs(self, name: str) -> Iterator[WeightSpec]: ...

    def __call__(
        self,
        qr: torch.Tensor,
        k: torch.Tensor,
        weights: torch.Tensor,
        rotations: torch.Tensor,
        metadata: Any,
    ) -> Any: ...


class MLA(nn.Module):
    """Attention block of one decoder layer.

    With W_UK and W_UV the halves of kv_b_proj: q'_h = W_UK,h^T q_nope,h,
    score = (q'_h . c + q_rope,h . r) * scale and o_h = W_UV,h sum(p c), which equals attention over
    the expanded keys and values.

    Heads are split over the ranks (any number per rank); everything before q_b_proj is the same on
    each.

    Args:
        indexer: None on a layer that reuses an earlier selection.
        index_sizes: (index_head_dim, index_n_heads), the rows of wk and weights_proj in the fused
            projection.
        latent_norm_eps: eps of q_a_layernorm and kv_a_layernorm.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        q_lora_rank: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        latent_norm_eps: float,
        attention: LatentAttention,
        indexer: KeySelector | None,
        index_sizes: tuple[int, int],
        mapping: Mapping,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.nope, self.rope = qk_nope_head_dim, qk_rope_head_dim
        first, last = shard_range(num_heads, mapping, "num_attention_heads")
        self.num_heads = last - first
        self.attention, self.indexer = attention, indexer
        qk_dim = self.nope + self.rope
        self.splits = [q_lora_rank, kv_lora_rank + self.rope]
        if indexer is not None:
            self.splits += index_sizes
        self.fused_a = empty_parameter((sum(self.splits), hidden_size), dtype, device)
        self.q_a_layernorm = RMSNorm(q_lora_rank, latent_norm_eps, dtype, device)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, latent_norm_eps, dtype, device)
        linear = partial(Linear, mapping=mapping, dtype=dtype, device=device)
        column, row = TensorParallelMode.COLUMN, TensorParallelMode.ROW
        self.q_b_proj = linear(q_lora_rank, num_heads * qk_dim, mode=column)
        self.kv_b_proj = linear(kv_lora_rank, num_heads * (self.nope + v_head_dim), mode=column)
        self.o_proj = linear(num_heads * v_head_dim, hidden_size, mode=row)
        # Views of kv_b_proj, [heads, nope, kv_lora_rank] and [heads, kv_lora_rank, v]: loading
        # fills them as well.
        by_head = self.kv_b_proj.weight.data.view(
            self.num_heads, self.nope + v_head_dim, kv_lora_rank
        )
        self.w_uk, self.w_uv = by_head[:, : self.nope], by_head[:, self.nope :].transpose(1, 2)

    def weight_specs(self, name: str) -> Iterator[WeightSpec]:
        parts = self.fused_a.data.split(self.splits)
        names = ["q_a_proj", "kv_a_proj_with_mqa", "indexer.wk", "indexer.weights_proj"]
        for part, tensor in zip(names, parts, strict=False):
            yield WeightSpec(
                f"{name}.{part}.weight", tuple(tensor.shape), tensor, quantizable=part != names[-1]
            )
        for module in ("q_a_layernorm", "kv_a_layernorm", "q_b_proj", "kv_b_proj", "o_proj"):
            yield from getattr(self, module).weight_specs(f"{name}.{module}")
        if self.indexer is not None:
            yield from self.indexer.weight_specs(f"{name}.indexer")

    def forward(
        self, hidden_states: torch.Tensor, rotations: torch.Tensor, metadata: Any
    ) -> torch.Tensor:
        """hidden_states [tokens, hidden], rotations complex64 [tokens, 1, rope / 2] -> [tokens,
        hidden]."""
        if metadata.indexer_skip_topk:  # later draft steps read the first one's keys, and add none
            qr = self.q_a_layernorm(F.linear(hidden_states, self.fused_a[: self.q_lora_rank]))
            metadata.selection = metadata.shared_selection
        else:
            qr = self._append_and_choose(hidden_states, rotations, metadata)
        out = self.attention.attend(self._absorbed_queries(qr, rotations), metadata)
        values = torch.bmm(out.transpose(0, 1), self.w_uv)
        return self.o_proj(values.transpose(0, 1).flatten(1))

    def _append_and_choose(
        self, hidden_states: torch.Tensor, rotations: torch.Tensor, metadata: Any
    ) -> torch.Tensor:
        """Write the step's keys, choose among all if this layer does; the normed query latent."""
        qr, latent, *index_inputs = F.linear(hidden_states, self.fused_a).split(self.splits, dim=-1)
        qr = self.q_a_layernorm(qr)
        if self.indexer is not None:
            k, weights = index_inputs
            metadata.selection = self.indexer(qr, k, weights, rotations, metadata)
        self.attention.append(self._latent_rows(latent, rotations), metadata)
        return qr

    def _latent_rows(self, latent: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """[tokens, kv_lora_rank + rope] as projected -> as cached: latent normed, key part
        rotated."""
        c, r = latent.split([self.kv_lora_rank, self.rope], dim=-1)
        return torch.cat(
            [self.kv_a_layernorm(c), apply_rotary(r.unsqueeze(1), rotations).squeeze(1)], dim=-1
        )

    def _absorbed_queries(self, qr: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """[tokens, q_lora_rank] -> [tokens, heads, kv_lora_rank + rope], comparable with cached
        rows."""
        q = self.q_b_proj(qr).view(-1, self.num_heads, self.nope + self.rope)
        nope, rope = q.split([self.nope, self.rope], dim=-1)
        absorbed = torch.bmm(nope.transpose(0, 1), self.w_uk).transpose(0, 1)
        return torch.cat([absorbed, apply_rotary(rope, rotations)], dim=-1)
