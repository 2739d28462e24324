"""Sparse MLA over the paged latent cache of one layer."""

import torch

from tensorrt_llm._torch.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
from tensorrt_llm._torch.custom_ops.cache_ops import scatter_rows
from tensorrt_llm._torch.custom_ops.sparse_mla import sparse_mla_attention


class DSATrtllmAttention:
    """Appends latents and attends to the selection in the metadata, contexts and generations
    alike."""

    def __init__(self, layer_idx: int, kv_lora_rank: int, scale: float) -> None:
        self.layer_idx = layer_idx
        self.kv_lora_rank, self.scale = kv_lora_rank, scale

    def append(self, latent: torch.Tensor, metadata: DSAtrtllmAttentionMetadata) -> None:
        """latent [tokens, kv_lora_rank + rope_dim]: normed latent and rotated key of the step's
        tokens."""
        scatter_rows(metadata.key_rows(self.layer_idx), metadata.slot_mapping, latent)

    def attend(self, q: torch.Tensor, metadata: DSAtrtllmAttentionMetadata) -> torch.Tensor:
        """q [tokens, heads, kv_lora_rank + rope_dim] -> [tokens, heads, kv_lora_rank].

        Raises:
            RuntimeError: no full-indexer layer has made a selection in this step yet.
        """
        chosen = metadata.selection
        if chosen is None:
            raise RuntimeError(
                f"layer {self.layer_idx} shares a selection, but no earlier layer made one"
            )
        rows = metadata.key_rows(self.layer_idx)
        return sparse_mla_attention(
            q, rows, chosen.slots, chosen.bias, self.scale, self.kv_lora_rank
        )
