"""The two halves of eh_proj: their sum is the projection, and each rank's parts make the whole."""

import numpy as np
import pytest
import torch
from helpers.numerics import gamma, nearest_bf16, to_numpy

from tensorrt_llm._torch.modeling_v2.catalog._op import ULP, assert_bitwise
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.gemm.draft_hidden_half import (  # noqa: E501
    draft_hidden_half,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.spec import (  # noqa: E501
    _draft_token_table,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.spec._draft_token_table import (  # noqa: E501
    draft_hidden_half_weight,
    draft_token_table,
)

HIDDEN, VOCABULARY, EPS = 32, 24, 1e-5


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def weights(request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {
        "embed": (VOCABULARY, HIDDEN),
        "enorm": (HIDDEN,),
        "hnorm": (HIDDEN,),
        "eh_proj": (HIDDEN, 2 * HIDDEN),
    }
    return {name: torch.randn(shape).to(request.param) for name, shape in shapes.items()}


def table(weights: dict[str, torch.Tensor], tokens: range) -> torch.Tensor:
    return draft_token_table(weights["embed"], weights["enorm"], weights["eh_proj"], EPS, tokens)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) / HIDDEN + EPS) * weight


def test_both_halves_add_up_to_the_projection(weights) -> None:
    h = torch.randn(1, HIDDEN).to(weights["embed"].dtype)
    shares = [
        draft_hidden_half(
            h, weights["hnorm"], draft_hidden_half_weight(weights["eh_proj"], r, 4), EPS
        )
        for r in range(4)
    ]
    whole = to_numpy(table(weights, range(VOCABULARY))) + to_numpy(torch.cat(shares, dim=1))
    e, enorm, hnorm, weight = (to_numpy(weights[n]) for n in ("embed", "enorm", "hnorm", "eh_proj"))
    halves = [normed(e, enorm), np.repeat(normed(to_numpy(h), hnorm), VOCABULARY, axis=0)]
    exact = np.concatenate(halves, axis=1) @ weight.T
    # Each half is normed and summed in fp32, and in bf16 rounded after the norm; the table's half
    # is rounded once more after the sum.
    size = np.abs(np.concatenate(halves, axis=1)) @ np.abs(weight).T
    off = gamma(3 * HIDDEN) * size
    if weights["embed"].dtype == torch.bfloat16:
        off = off + 2.01 * 2.0**-8 * size
    assert (np.abs(whole - exact) <= off).all()


@pytest.mark.parametrize("weights", [torch.bfloat16], indirect=True)
def test_bf16_rounds_the_normed_row_and_the_product(weights) -> None:
    rows = nearest_bf16(normed(to_numpy(weights["embed"]), to_numpy(weights["enorm"])))
    products = nearest_bf16(rows @ to_numpy(weights["eh_proj"])[:, :HIDDEN].T)
    assert np.array_equal(to_numpy(table(weights, range(VOCABULARY))), products)


@pytest.mark.parametrize("chunk", [5, 8, 1024])
def test_shards_and_chunks_are_parts_of_the_whole(weights, chunk, monkeypatch) -> None:
    whole = table(weights, range(VOCABULARY))
    monkeypatch.setattr(_draft_token_table, "CHUNK_TOKENS", chunk)
    shards = torch.cat([table(weights, range(at, at + 8)) for at in range(0, VOCABULARY, 8)])
    assert shards.dtype == whole.dtype
    # Sums of other orders; in bf16 a rounding boundary may lie between two.
    e, enorm, weight = (np.abs(to_numpy(weights[n])) for n in ("embed", "enorm", "eh_proj"))
    off = 2 * gamma(HIDDEN) * (normed(e, enorm) @ weight[:, :HIDDEN].T)
    if whole.dtype == torch.bfloat16:
        off = off + ULP[torch.bfloat16] * np.abs(to_numpy(whole))
    assert (np.abs(to_numpy(shards) - to_numpy(whole)) <= off).all()


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_the_ranks_rows_make_the_right_half(weights, ranks) -> None:
    parts = [draft_hidden_half_weight(weights["eh_proj"], rank, ranks) for rank in range(ranks)]
    assert all(part.is_contiguous() for part in parts)
    assert_bitwise([torch.cat(parts)], [weights["eh_proj"][:, HIDDEN:]])


def test_bad_arguments_are_refused(weights) -> None:
    with pytest.raises(ValueError, match=r"the shard is range\(16, 32\); .* \[0, 24\)"):
        table(weights, range(16, 32))
    with pytest.raises(ValueError, match="hidden size is 32, which 5 ranks do not divide"):
        draft_hidden_half_weight(weights["eh_proj"], 0, 5)
