"""Bytes of the two pools: written through the layout, read back by hand and through it."""

import numpy as np
import pytest
import torch
from helpers.dsa import (
    cached_index_key,
    cached_latent,
    make_manager,
    page_bytes,
)
from helpers.numerics import DEVICES, nearest_bf16, nearest_e4m3, smallest_scale, to_numpy
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.attention.backends.sparse.dsa.cache_manager import DSACacheLayout
from tensorrt_llm._torch.custom_ops.cache_ops import scatter_rows
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2, Role

NUM_BLOCKS, TOKENS_PER_BLOCK = 7, 4
FULL_LAYERS = (0, 2)


def make_layout(dtype: torch.dtype, fp8: bool, dim: int = 32, width: int = 48) -> DSACacheLayout:
    return DSACacheLayout(width, dim, dtype, fp8)


def places(draw: st.DrawFn, tokens_per_block: int) -> list[tuple[int, int]]:
    """Distinct (block, offset) in any order, some of them padding."""
    everywhere = [(b, t) for b in range(NUM_BLOCKS) for t in range(tokens_per_block)]
    chosen = draw(st.lists(st.sampled_from(everywhere), unique=True, min_size=1, max_size=12))
    return [(-1, t) if draw(st.booleans()) and i else (b, t) for i, (b, t) in enumerate(chosen)]


@st.composite
def index_key_writes(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int]], int]:
    """(index_head_dim, tokens_per_block, places, model layer); odd sizes leave scales unaligned."""
    dim, tokens_per_block = draw(st.sampled_from([(32, 4), (128, 4), (256, 2), (50, 1), (30, 3)]))
    layer = draw(st.sampled_from(FULL_LAYERS))
    return dim, tokens_per_block, places(draw, tokens_per_block), layer


def dirty_manager(layout: DSACacheLayout, tokens_per_block: int, device: str) -> KVCacheManagerV2:
    """Pools full of 0x5A, so that a byte written in the wrong place shows."""
    manager = make_manager(
        layout,
        num_blocks=NUM_BLOCKS,
        tokens_per_block=tokens_per_block,
        full_layers=FULL_LAYERS,
        device=torch.device(device),
    )
    for role in Role:
        manager.pool(role).fill_(0x5A)
    return manager


def expected_index_key(key: np.ndarray, layout: DSACacheLayout) -> tuple[np.ndarray, np.ndarray]:
    """(stored data, scales) of one float64 key, by counting and rounding."""
    if not layout.fp8:
        return key, np.empty(0)
    blocks = key.reshape(max(1, len(key) // 128), -1)
    scales = np.array([smallest_scale(np.abs(b).max()) for b in blocks])
    return nearest_e4m3(blocks / scales[:, None]).reshape(-1), scales


def test_bytes_per_token_of_glm_5_2() -> None:
    """Latent 512 + rope 64, index head 128."""
    bf16 = DSACacheLayout(576, 128, torch.bfloat16, fp8=False)
    fp8 = DSACacheLayout(576, 128, torch.bfloat16, fp8=True)
    assert (bf16.key_bytes, bf16.index_key_bytes) == (1152, 256)
    assert (fp8.key_bytes, fp8.index_key_bytes) == (576, 132)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "fp8"),
    [
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.float32, True),
        (torch.bfloat16, True),
    ],
    ids=["fp32", "bf16", "fp8 of fp32", "fp8 of bf16"],
)
@given(write=index_key_writes(), data=st.data())
def test_index_keys_lie_where_the_formula_says(dtype, fp8, device, write, data) -> None:
    dim, tokens_per_block, where, layer = write
    layout = make_layout(dtype, fp8, dim)
    manager = dirty_manager(layout, tokens_per_block, device)
    slot = FULL_LAYERS.index(layer)
    keys = torch.randn(len(where), dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    block, offset = torch.tensor(where, device=device).unbind(1)
    layout.write_index_keys(manager, layer, keys.to(device), block, offset)

    written = {place: to_numpy(key) for place, key in zip(where, keys, strict=True)}
    for b in range(NUM_BLOCKS):
        for t in range(tokens_per_block):
            if (b, t) not in written:
                continue
            stored, scales = cached_index_key(manager, layout, b, slot, t)
            expected, expected_scales = expected_index_key(written[b, t], layout)
            np.testing.assert_array_equal(stored, expected)
            np.testing.assert_array_equal(scales, expected_scales)
    untouched = NUM_BLOCKS * tokens_per_block - sum(b >= 0 for b, _ in where)
    _assert_dirty_bytes_left(manager, layout, slot, written, untouched)

    blocks = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=5))
    _assert_pages_read_back(manager, layout, layer, slot, blocks, written)


def _assert_dirty_bytes_left(manager, layout, slot, written, untouched) -> None:
    """Tokens that nobody wrote, and all pages of the other layer, still hold 0x5A."""
    left = 0
    for b in range(NUM_BLOCKS):
        assert set(page_bytes(manager, Role.INDEX_KEY, b, 1 - slot)) == {0x5A}
        for t in range(manager.tokens_per_block):
            if (b, t) not in written:
                page, dim = page_bytes(manager, Role.INDEX_KEY, b, slot), layout.index_data_bytes
                data = page[t * dim : (t + 1) * dim]
                first = manager.tokens_per_block * dim + t * layout.index_scale_bytes
                left += set(data + page[first : first + layout.index_scale_bytes]) == {0x5A}
    assert left == untouched
    assert set(manager.pool(Role.KEY).flatten().tolist()) == {0x5A}


def _assert_pages_read_back(manager, layout, layer, slot, blocks, written) -> None:
    """`read_index_pages` against the bytes read by hand, in the order of the blocks asked for."""
    device = manager.pool(Role.KEY).device
    keys, scales = layout.read_index_pages(manager, layer, torch.tensor(blocks, device=device))
    assert keys.dtype == torch.float32
    assert (scales is None) == (not layout.fp8 or layout.index_head_dim > 128)
    whole = keys if scales is None else keys * scales.unsqueeze(1)
    size = manager.tokens_per_block
    for i, b in enumerate(blocks):
        for t in range(size):
            if (b, t) in written:
                data, own = cached_index_key(manager, layout, b, slot, t)
                repeats = len(data) // max(1, len(own))
                expected = data * (np.repeat(own, repeats) if len(own) else 1)
                np.testing.assert_array_equal(to_numpy(whole[i * size + t]), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "fp8"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["fp32", "bf16", "fp8"],
)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_latents_lie_where_the_formula_says(layer, dtype, fp8, device) -> None:
    """One slot number serves every layer: block * layers * tokens_per_block + token."""
    layout = make_layout(dtype, fp8)
    manager = dirty_manager(layout, TOKENS_PER_BLOCK, device)
    where = [(6, 3), (0, 0), (2, 1), (2, 2)]
    slots = torch.tensor([b * 3 * TOKENS_PER_BLOCK + t for b, t in where] + [-1], device=device)
    values = 30 * torch.randn(len(slots), layout.key_width, device=device)
    scatter_rows(layout.key_rows(manager, layer), slots, values)
    nearest = nearest_e4m3 if fp8 else nearest_bf16 if dtype is torch.bfloat16 else np.float64
    for (block, token), value in zip(where, to_numpy(values), strict=False):
        row = cached_latent(manager, layout, block, layer, token)
        np.testing.assert_array_equal(row, nearest(value))
    for other in {0, 1, 2} - {layer}:
        for block in range(NUM_BLOCKS):
            assert set(page_bytes(manager, Role.KEY, block, other)) == {0x5A}
    changed = int((manager.pool(Role.KEY) != 0x5A).any(-1).sum())
    assert changed == len({b for b, _ in where})


def test_a_layer_without_an_indexer_has_no_index_keys() -> None:
    layout = make_layout(torch.float32, fp8=True)
    manager = make_manager(layout, full_layers=FULL_LAYERS)
    nothing = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(KeyError, match=r"layer 1 has no index_key buffer; layers \[0, 2\]"):
        layout.write_index_keys(manager, 1, torch.zeros(1, 32), nothing, nothing)
    with pytest.raises(KeyError, match="layer 1"):
        layout.read_index_pages(manager, 1, nothing)
