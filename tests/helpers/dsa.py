"""Parts of DSA for tests: pools, steps, and reading what is in the pools byte by byte."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from helpers.numerics import Float64, decode_e4m3
from tensorrt_llm._torch.attention.backends.sparse.dsa.cache_manager import DSACacheLayout
from tensorrt_llm._torch.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
from tensorrt_llm._torch.attention.backends.sparse.dsa.params import DSAParams
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import (
    BufferConfig,
    KVCacheManagerV2,
    Role,
)

CPU = torch.device("cpu")
PLAIN_CODES = {torch.float32: "f", torch.float16: "e"}


@dataclass(frozen=True)
class StepSequence:
    """One sequence of a step: `cached` tokens before it and `new` tokens in it."""

    request_id: int
    cached: int
    new: int = 1


def make_manager(
    layout: DSACacheLayout,
    *,
    layers: int = 3,
    full_layers: Sequence[int] = (0, 2),
    tokens_per_block: int = 4,
    num_blocks: int = 40,
    max_seq_len: int = 64,
    max_batch_size: int = 6,
    device: torch.device = CPU,
) -> KVCacheManagerV2:
    """Real pools for a layout; only `full_layers` have index keys."""
    return KVCacheManagerV2(
        buffers=[
            BufferConfig(Role.KEY, tuple(range(layers)), layout.key_bytes),
            BufferConfig(Role.INDEX_KEY, tuple(full_layers), layout.index_key_bytes),
        ],
        tokens_per_block=tokens_per_block,
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        num_blocks={Role.KEY: num_blocks, Role.INDEX_KEY: num_blocks},
        device=device,
    )


def make_metadata(
    manager: KVCacheManagerV2, layout: DSACacheLayout, params: DSAParams, *, max_tokens: int = 128
) -> DSAtrtllmAttentionMetadata:
    return DSAtrtllmAttentionMetadata(
        6, max_tokens, manager, manager.pool(Role.KEY).device, params=params, layout=layout
    )


def set_step(
    metadata: DSAtrtllmAttentionMetadata,
    contexts: Sequence[StepSequence],
    generations: Sequence[StepSequence] = (),
    padding: int = 0,
) -> None:
    """Describe a step as the model engine does; `prepare` is left to the caller."""
    real = [*contexts, *generations]
    metadata.num_contexts = len(contexts)
    metadata.request_ids = [s.request_id for s in real]
    metadata.seq_lens = [s.new for s in real] + [1] * padding
    metadata.kv_cache_params.num_cached_tokens_per_seq = [s.cached for s in real] + [-1] * padding


def page_bytes(manager: KVCacheManagerV2, role: Role, block: int, slot: int) -> bytes:
    """The bytes of one layer's page, found by counting from the pool's first byte."""
    pool = manager.pool(role)
    _, layers, size = pool.shape
    start = (block * layers + slot) * size
    return pool.cpu().numpy().tobytes()[start : start + size]


def decode_values(data: bytes, dtype: torch.dtype) -> Float64:
    """Numbers of a run of bytes in a pool, without torch."""
    if dtype is torch.float8_e4m3fn:
        return np.array([decode_e4m3(b) for b in data])
    if dtype is torch.bfloat16:  # the upper half of an fp32
        halves = struct.unpack(f"<{len(data) // 2}H", data)
        return np.array([struct.unpack("<f", struct.pack("<I", h << 16))[0] for h in halves])
    size = dtype.itemsize
    return np.array(struct.unpack(f"<{len(data) // size}{PLAIN_CODES[dtype]}", data))


def cached_latent(
    manager: KVCacheManagerV2, layout: DSACacheLayout, block: int, slot: int, token: int
) -> Float64:
    """The latent row of one token of a block: tokens lie one after the other."""
    page = page_bytes(manager, Role.KEY, block, slot)
    size = layout.key_width * (1 if layout.fp8 else layout.dtype.itemsize)
    dtype = torch.float8_e4m3fn if layout.fp8 else layout.dtype
    return decode_values(page[token * size : (token + 1) * size], dtype)


def cached_index_key(
    manager: KVCacheManagerV2, layout: DSACacheLayout, block: int, slot: int, token: int
) -> tuple[Float64, Float64]:
    """(data, scales) of one token's index key; no scales outside FP8.

    An FP8 page has all tokens' data bytes first, then all tokens' fp32 scales, one per 128
    channels.
    """
    page, dim = page_bytes(manager, Role.INDEX_KEY, block, slot), layout.index_head_dim
    if not layout.fp8:
        size = dim * layout.dtype.itemsize
        return decode_values(page[token * size : (token + 1) * size], layout.dtype), np.empty(0)
    count = max(1, dim // 128)
    first_scale = manager.tokens_per_block * dim + token * 4 * count
    scales = struct.unpack(f"<{count}f", page[first_scale : first_scale + 4 * count])
    data = decode_values(page[token * dim : (token + 1) * dim], torch.float8_e4m3fn)
    return data, np.array(scales)
