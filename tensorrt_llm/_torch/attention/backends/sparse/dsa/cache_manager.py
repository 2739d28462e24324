"""What one cached token looks like in the two pools of DSA: bytes, pages and typed views.

Roles: "key" holds the latent and the rotary key of every layer, "index_key" the index keys of the
layers that own an indexer. The pools themselves, their blocks and strides, belong to the KV cache
manager.
"""

from dataclasses import dataclass

import torch

from tensorrt_llm._torch.attention.backends.interface import KVCacheManager
from tensorrt_llm._torch.custom_ops.cache_ops import scatter_bytes, scatter_rows
from tensorrt_llm._torch.custom_ops.fp8 import num_scales, quantize_e4m3_ue8m0

KEY = "key"
INDEX_KEY = "index_key"


@dataclass(frozen=True)
class DSACacheLayout:
    """Bytes of one token of one layer.

    Args:
        key_width: kv_lora_rank + qk_rope_head_dim.
        index_head_dim: channels of an index key.
        dtype: activation dtype; also the cache's unless `fp8`.
        fp8: latents as e4m3 at unit scale, index keys as e4m3 with one fp32 UE8M0 scale per 128
            channels.
    """

    key_width: int
    index_head_dim: int
    dtype: torch.dtype
    fp8: bool

    @property
    def key_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.fp8 else self.dtype

    @property
    def key_bytes(self) -> int:
        return self.key_width * self.key_dtype.itemsize

    @property
    def index_data_bytes(self) -> int:
        return self.index_head_dim * self.key_dtype.itemsize

    @property
    def index_scale_bytes(self) -> int:
        return 4 * num_scales(self.index_head_dim) if self.fp8 else 0

    @property
    def index_key_bytes(self) -> int:
        return self.index_data_bytes + self.index_scale_bytes

    def key_rows(self, manager: KVCacheManager, layer_idx: int) -> torch.Tensor:
        """[rows, key_width], where row block * layers * tokens_per_block + token is the layer's
        token of a block.

        The view begins at the layer's place in block 0, so that one slot number serves every layer.
        """
        pool = manager.pool(KEY)
        rows = pool.view(-1).view(self.key_dtype).view(-1, self.key_width)
        return rows[manager.layer_slot(KEY, layer_idx) * manager.tokens_per_block :]

    def write_index_keys(
        self,
        manager: KVCacheManager,
        layer_idx: int,
        keys: torch.Tensor,
        block: torch.Tensor,
        offset: torch.Tensor,
    ) -> None:
        """Store index keys [tokens, index_head_dim] at (block, offset), int64 [tokens]; block -1
        is padding."""
        pool, slot = manager.pool(INDEX_KEY), manager.layer_slot(INDEX_KEY, layer_idx)
        self.write_index_pool(pool, slot, keys, block, offset)

    def write_index_pool(
        self,
        pool: torch.Tensor,
        slot: int,
        keys: torch.Tensor,
        block: torch.Tensor,
        offset: torch.Tensor,
    ) -> None:
        """`write_index_keys` at a layer's slot of the pool, uint8 [blocks, layers, page bytes]."""
        layers, page_bytes = pool.shape[1:]
        tokens_per_block = page_bytes // self.index_key_bytes
        if not self.fp8:  # without scales a page is plain rows
            rows = pool.view(-1).view(self.key_dtype).view(-1, self.index_head_dim)
            row = torch.where(block < 0, block, block * layers * tokens_per_block + offset)
            scatter_rows(rows[slot * tokens_per_block :], row, keys)
            return
        quantised, scales = quantize_e4m3_ue8m0(keys)
        page = (block * layers + slot) * page_bytes
        data = page + offset * self.index_data_bytes
        scale = page + tokens_per_block * self.index_data_bytes + offset * self.index_scale_bytes
        scatter_bytes(pool, data.masked_fill(block < 0, -1), quantised)
        scatter_bytes(pool, scale.masked_fill(block < 0, -1), scales)

    def read_index_pages(
        self, manager: KVCacheManager, layer_idx: int, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gather whole pages: all tokens' data, then all tokens' scales.

        Args:
            blocks: int64 [blocks], not negative.

        Returns:
            (keys fp32 [blocks * tokens_per_block, index_head_dim], scales fp32 [same rows] or
            None). With more than one scale per key they are applied already.
        """
        pool, slot = manager.pool(INDEX_KEY), manager.layer_slot(INDEX_KEY, layer_idx)
        layers, page_bytes = pool.shape[1:]
        taken = pool.view(-1, page_bytes).index_select(0, blocks * layers + slot)
        if not self.fp8:
            return taken.view(self.key_dtype).view(-1, self.index_head_dim).float(), None
        data_bytes = self.index_data_bytes * manager.tokens_per_block
        data, scales = taken.split([data_bytes, page_bytes - data_bytes], dim=1)
        keys = data.reshape(-1, self.index_head_dim).view(self.key_dtype).float()
        # A dense copy, also of a single page: fp32 needs strides of whole words.
        scales = scales.clone(memory_format=torch.contiguous_format)
        scales = scales.view(torch.float32).view(keys.shape[0], -1)
        if scales.shape[1] == 1:
            return keys, scales.squeeze(1)
        return keys * scales.repeat_interleave(keys.shape[1] // scales.shape[1], dim=1), None
