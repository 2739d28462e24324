"""Append and flash decode on the engine's own pools and metadata, against its backend, in fp32."""

from typing import Any

import pytest
import torch
from helpers.dsa import StepSequence, make_manager, make_metadata, set_step
from torch import Tensor

from tensorrt_llm._torch.attention.backends.sparse.dsa.backend import DSATrtllmAttention
from tensorrt_llm._torch.attention.backends.sparse.dsa.cache_manager import DSACacheLayout
from tensorrt_llm._torch.attention.backends.sparse.dsa.indexer import dense_rows
from tensorrt_llm._torch.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
from tensorrt_llm._torch.attention.backends.sparse.dsa.params import DSAParams
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.attention.mla_kv_half_append import (  # noqa: E501
    MlaKvHalfAppend,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.attention.sparse_mla_flash_decode import (  # noqa: E501
    SparseMlaFlashDecode,
)
from tensorrt_llm._torch.modules.rms_norm import rms_norm
from tensorrt_llm._torch.modules.rotary_embedding import RotaryEmbedding, apply_rotary
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import Role

HEADS, LATENT, ROPE, V, LAYER, ROWS = 2, 6, 4, 5, 1, 3
SCALE = 0.3
# Two sequences of 3 rows each; their blocks lie mixed up in the pool.
STEP = [StepSequence(1, 9, ROWS), StepSequence(2, 17, ROWS)]


def engine_step() -> DSAtrtllmAttentionMetadata:
    layout = DSACacheLayout(LATENT + ROPE, 8, torch.float32, fp8=False)
    manager = make_manager(layout)
    for request in (1, 2):
        manager.add_request(request)
    for request, tokens in ((1, 5), (2, 12), (1, 12), (2, 20)):
        manager.resize(request, tokens)
    manager.pool(Role.KEY).view(torch.float32).normal_(generator=torch.Generator().manual_seed(2))
    metadata = make_metadata(manager, layout, DSAParams(2, 8, 32))
    set_step(metadata, [], STEP)
    metadata.prepare()
    return metadata


def pool_arguments(metadata: DSAtrtllmAttentionMetadata, whole: bool) -> dict[str, Any]:
    """The pool from row 0 with the layer's number, or the engine's view of the layer."""
    manager, size = metadata.kv_cache_manager, metadata.kv_cache_manager.tokens_per_block
    rows = metadata.key_rows(LAYER)
    if whole:
        rows = manager.pool(Role.KEY).view(torch.float32).view(-1, LATENT + ROPE)
    return {
        "kv_pool": rows,
        "block_table": metadata.block_table[: metadata.num_seqs],
        "block_size": size,
        "stride_factor": metadata.key_rows_per_block,
        "layer_id": manager.layer_slot(Role.KEY, LAYER) if whole else 0,
    }


@pytest.mark.parametrize("whole", [True, False], ids=["whole pool", "layer's view"])
def test_the_backend_and_the_ops_agree(whole: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    table = RotaryEmbedding(ROPE, 1e4, 64, torch.device("cpu"))
    kv_a, weight = randn(6, LATENT + ROPE), randn(LATENT)
    q, v_b = randn(6, HEADS, LATENT + ROPE), randn(HEADS, V, LATENT)

    ours, theirs = engine_step(), engine_step()
    bmm1, bmm2 = torch.zeros(2), torch.zeros(1)
    pool = pool_arguments(ours, whole)
    append = {
        "kv_a": kv_a,
        "norm_weight": weight,
        "eps": 1e-5,
        "cos_sin": torch.view_as_real(table.table),
        "position_ids": ours.position_ids,
        "softmax_scale": SCALE,
        "bmm1_scale": bmm1,
        "bmm2_scale": bmm2,
        "trigger_at_entry": False,
        **pool,
    }
    MlaKvHalfAppend.is_valid(**append)
    MlaKvHalfAppend.raw_call(**append)

    backend = DSATrtllmAttention(LAYER, LATENT, SCALE)
    rotations = table.rotations(theirs.position_ids)
    key = apply_rotary(kv_a[:, LATENT:].contiguous().unsqueeze(1), rotations).squeeze(1)
    backend.append(torch.cat([rms_norm(kv_a[:, :LATENT], weight, 1e-5), key], dim=-1), theirs)
    # The norm is one formula in two orders: a few fp32 roundings.
    assert_near(as_fp32(ours), as_fp32(theirs), 2**-21)

    chosen = dense_rows(ours.position_ids, 20)
    theirs.selection = theirs.select(chosen)
    decode = {
        "q": q,
        "topk_indices": chosen,
        "kv_lens": ours.kv_lens_cuda[: ours.num_seqs],
        "bmm1_scale": bmm1,
        "bmm2_scale": bmm2,
        "v_b": v_b,
        "gather_before_wait": False,
        **pool,
    }
    SparseMlaFlashDecode.is_valid(**decode)
    out = SparseMlaFlashDecode.raw_call(**decode)
    expected = torch.einsum("thl,hvl->thv", backend.attend(q, theirs), v_b).flatten(1)
    # fp32 sums of 10, 20 and 6 terms and exponents below 2^5, relative to the largest value.
    assert_near(out, expected, 2**-24 * (32 * 10 + 20 + 6))


def as_fp32(metadata: DSAtrtllmAttentionMetadata) -> Tensor:
    return metadata.kv_cache_manager.pool(Role.KEY).view(torch.float32)


def assert_near(out: Tensor, expected: Tensor, relative: float) -> None:
    assert float((out - expected).abs().max()) <= relative * float(expected.abs().max())
