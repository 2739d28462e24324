"""The attention block over real pools against expanded (not absorbed) attention in float64."""

import numpy as np
import pytest
import torch
from helpers import reference_glm
from helpers.dsa import StepSequence, make_manager, make_metadata, set_step
from helpers.numerics import Float64, to_numpy
from helpers.weights import fill, random_weights

from tensorrt_llm._torch.attention.backends.sparse.dsa.backend import DSATrtllmAttention
from tensorrt_llm._torch.attention.backends.sparse.dsa.cache_manager import DSACacheLayout
from tensorrt_llm._torch.attention.backends.sparse.dsa.params import DSAParams
from tensorrt_llm._torch.modules.mla import MLA
from tensorrt_llm._torch.modules.rotary_embedding import RotaryEmbedding
from tensorrt_llm.mapping import Mapping

HIDDEN, Q_RANK, RANK, NOPE, ROPE, VALUE, THETA, EPS = 40, 24, 32, 24, 16, 20, 8e6, 1e-5
LENGTH, LAYER = 20, 1
# fp32 noise: three products in a row of O(1) values, some tens of roundings each.
TOLERANCE = 2e-5

Keys = list[list[int]]


def make_mla(num_heads: int) -> tuple[MLA, dict[str, Float64]]:
    """A layer that shares a selection, and its full weights."""
    scale = (NOPE + ROPE) ** -0.5
    mla = MLA(
        hidden_size=HIDDEN,
        num_heads=num_heads,
        q_lora_rank=Q_RANK,
        kv_lora_rank=RANK,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        latent_norm_eps=EPS,
        attention=DSATrtllmAttention(LAYER, RANK, scale),
        indexer=None,
        index_sizes=(32, 4),
        mapping=Mapping(),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    weights = random_weights(mla.weight_specs("attn"))
    fill(mla.weight_specs("attn"), weights)
    return mla, {name.removeprefix("attn."): to_numpy(w) for name, w in weights.items()}


def random_keys(position: int, generator: torch.Generator) -> list[int]:
    """Up to 6 keys, the token's own among them."""
    others = torch.randperm(position, generator=generator)[:5].tolist() if position else []
    return [*others, position]


def expected(weights: dict[str, Float64], x: Float64, keys: Keys, num_heads: int) -> Float64:
    """Every head with its own keys [W_UK c | r] and values W_UV c."""
    latent = x @ weights["kv_a_proj_with_mqa.weight"].T
    c = reference_glm.rms_norm(latent[:, :RANK], weights["kv_a_layernorm.weight"], EPS)
    r = np.array([reference_glm.rotate(row, p, THETA) for p, row in enumerate(latent[:, RANK:])])
    qr = reference_glm.rms_norm(
        x @ weights["q_a_proj.weight"].T, weights["q_a_layernorm.weight"], EPS
    )
    q = (qr @ weights["q_b_proj.weight"].T).reshape(len(x), num_heads, NOPE + ROPE)
    kv_b = weights["kv_b_proj.weight"].reshape(num_heads, NOPE + VALUE, RANK)
    out = np.zeros((len(x), num_heads, VALUE))
    for t, chosen in enumerate(keys):
        q_rope = reference_glm.rotate(q[t, :, NOPE:], t, THETA)
        for h in range(num_heads):
            k_nope, values = c[chosen] @ kv_b[h, :NOPE].T, c[chosen] @ kv_b[h, NOPE:].T
            scores = k_nope @ q[t, h, :NOPE] + r[chosen] @ q_rope[h]
            out[t, h] = reference_glm.softmax(scores * (NOPE + ROPE) ** -0.5) @ values
    return out.reshape(len(x), -1) @ weights["o_proj.weight"].T


class Layer:
    """One MLA with a cache, run step by step with given keys."""

    def __init__(self, num_heads: int) -> None:
        self.mla, self.weights = make_mla(num_heads)
        layout = DSACacheLayout(RANK + ROPE, 32, torch.float32, fp8=False)
        manager = make_manager(layout, num_blocks=12)
        self.metadata = make_metadata(manager, layout, DSAParams(4, 32, 6))
        self.rotary = RotaryEmbedding(ROPE, THETA, 64, torch.device("cpu"))
        manager.add_request(0)
        manager.resize(0, LENGTH)

    def step(self, x: torch.Tensor, keys: Keys, start: int, new: int) -> torch.Tensor:
        set_step(self.metadata, [StepSequence(0, start, new)])
        self.metadata.prepare()
        rows = [row + [-1] * (6 - len(row)) for row in keys[start : start + new]]
        self.metadata.selection = self.metadata.select(torch.tensor(rows, dtype=torch.int32))
        rotations = self.rotary.rotations(self.metadata.position_ids)
        return self.mla(x[start : start + new], rotations, self.metadata)


@pytest.mark.parametrize("num_heads", [1, 3, 4, 8])
@pytest.mark.parametrize("steps", [[LENGTH], [7, 1, 12], [1] * LENGTH], ids=str)
def test_absorbed_equals_expanded_attention(steps, num_heads) -> None:
    generator = torch.Generator().manual_seed(num_heads)
    x = torch.randn(LENGTH, HIDDEN, generator=generator)
    keys = [random_keys(p, generator) for p in range(LENGTH)]
    layer, start, out = Layer(num_heads), 0, []
    for new in steps:
        out.append(layer.step(x, keys, start, new))
        start += new
    exact = expected(layer.weights, to_numpy(x), keys, num_heads)
    assert np.abs(to_numpy(torch.cat(out)) - exact).max() <= TOLERANCE < np.abs(exact).mean()


def test_a_shared_layer_without_a_selection_is_an_error() -> None:
    layer = Layer(1)
    set_step(layer.metadata, [StepSequence(0, 0, 2)])
    layer.metadata.prepare()
    rotations = layer.rotary.rotations(layer.metadata.position_ids)
    with pytest.raises(RuntimeError, match=r"layer 1 shares a selection, but no earlier layer"):
        layer.mla(torch.zeros(2, HIDDEN), rotations, layer.metadata)
