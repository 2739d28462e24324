"""The residual stream after each layer of a decode step, by the target and by the built-in
modules, against float64, in fp32."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import glm_tiny
from helpers.dsa import StepSequence, cached_latent, set_step
from helpers.engine import executor_config, make_engine
from helpers.glm_oracle import TRANSFORMERS_LATENT_EPS, make_checkpoint, random_prompt
from helpers.rounding_glm import DecodeStep
from safetensors.torch import load_file
from torch import Tensor

from tensorrt_llm._torch.modules.rotary_embedding import RotaryEmbedding
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import Role
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor

REQUEST = 3
DRAFT_LEN = 1
INDEX_TOPK = 16
ROWS = 1 + DRAFT_LEN
# Cached tokens before a step that takes all keys, and before one that chooses.
CONTEXTS = {"short": INDEX_TOPK - 1 - 2 * DRAFT_LEN, "long": 3 * INDEX_TOPK}
RANDOM = {
    "num_hidden_layers": 8,
    "hidden_size": 128,
    "q_lora_rank": 64,
    "num_attention_heads": 8,
    "index_topk": INDEX_TOPK,
    "first_k_dense_replace": 3,
    "indexer_types": ["full", "shared", "full", "shared", "shared", "full", "full", "shared"],
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": True,
}


@dataclass(frozen=True)
class Trace:
    """Of one decode step.

    Attributes:
        past: by layer [cached tokens, latent + rope], the cache before the step.
        hidden: by layer [rows, hidden], the residual stream after it.
        keys: by layer int64 [rows, index_topk], the keys that each row attends to in rising order,
            after the places without one (-1).
    """

    past: list[Tensor]
    hidden: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)

    def add(self, hidden: Tensor, keys: Tensor) -> None:
        rows = keys.long().sort(dim=-1).values
        self.hidden.append(hidden.clone())
        self.keys.append(F.pad(rows, (INDEX_TOPK - rows.shape[1], 0), value=-1))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    random = make_checkpoint(tmp_path_factory.mktemp("hidden") / "random", "glm52", 4, **RANDOM)
    return {"glm_tiny": glm_tiny.CHECKPOINT, "random": random}


def trace(directory: Path, modeling_v2: str, tokens: list[int]) -> Trace:
    """All but the last `ROWS` tokens as a prompt, those as the rows of a decode step."""
    engine = make_engine(
        executor_config(directory, modeling_v2=modeling_v2, max_draft_len=DRAFT_LEN)
    )
    cached = len(tokens) - ROWS
    engine.kv_cache_manager.add_request(REQUEST)
    engine.kv_cache_manager.resize(REQUEST, len(tokens))
    forward(engine, tokens[:cached], [StepSequence(REQUEST, 0, cached)], [])
    traced = Trace(cache_of(engine, cached))
    watch(engine, traced)
    forward(engine, tokens[cached:], [], [StepSequence(REQUEST, cached, ROWS)])
    assert engine.model_engine.model.decode_path == (None if modeling_v2 == "off" else "fast")
    return traced


def forward(
    engine: PyExecutor,
    tokens: list[int],
    contexts: list[StepSequence],
    generations: list[StepSequence],
) -> None:
    model, metadata = engine.model_engine.model, engine.model_engine.attn_metadata
    set_step(metadata, contexts, generations)
    metadata.prepare()
    model(metadata, torch.tensor(tokens), metadata.position_ids)


def watch(engine: PyExecutor, traced: Trace) -> None:
    """From now on every layer adds to the trace."""
    model, metadata = engine.model_engine.model, engine.model_engine.attn_metadata
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _m, _a, out: traced.add(out[0] + out[1], metadata.selection.indices)
        )
    if model.decode_path is None:
        return
    decode = model.core.decode
    layer_of_target = decode.layer

    def watched(*args: object) -> tuple[Tensor, Tensor]:
        normed, residual = layer_of_target(*args)
        traced.add(residual, decode.step.topk_indices)
        return normed, residual

    decode.layer = watched


def cache_of(engine: PyExecutor, count: int) -> list[Tensor]:
    """By layer the first cached rows of the request, float64."""
    manager, config = engine.kv_cache_manager, engine.model_engine.model.config
    blocks, size = manager.block_ids(REQUEST, Role.KEY), manager.tokens_per_block

    def row(layer: int, position: int) -> Tensor:
        page, offset = divmod(position, size)
        slot = manager.layer_slot(Role.KEY, layer)
        return torch.tensor(cached_latent(manager, config.cache_layout, blocks[page], slot, offset))

    layers = range(config.pretrained_config.num_hidden_layers)
    return [torch.stack([row(i, position) for position in range(count)]) for i in layers]


def exact_step(directory: Path, tokens: list[int]) -> DecodeStep:
    """Float64 rows of the last `ROWS` of these tokens; the engine's own table of rotations, which
    the model defines as fp32."""
    config = json.loads((directory / "config.json").read_text())
    stored = load_file(directory / "model.safetensors")
    rope, theta = config["qk_rope_head_dim"], config["rope_parameters"]["rope_theta"]
    table = RotaryEmbedding(rope, theta, len(tokens), torch.device("cpu")).table[-ROWS:]
    weights = {name: tensor.double() for name, tensor in stored.items()}
    return DecodeStep(config, weights, TRANSFORMERS_LATENT_EPS, table.to(torch.complex128))


def tokens_of(name: str, count: int) -> list[int]:
    if name == "random":
        return random_prompt(count, seed=count)
    return [token for question, _ in glm_tiny.heldout(every=31) for token in question][-count:]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", ["glm_tiny", "random"])
def test_hidden_states_after_each_layer(name, context, checkpoints) -> None:
    """Both within the band around the exact values of a step on the same cache and with the same
    keys; the band tells a step that misses one key apart."""
    tokens = tokens_of(name, CONTEXTS[context] + ROWS)
    target, builtin = (trace(checkpoints[name], way, tokens) for way in ("require", "off"))
    exact, aside = (exact_step(checkpoints[name], tokens) for _ in range(2))
    x = exact.embedding(tokens[-ROWS:])
    for i, (past, keys) in enumerate(zip(builtin.past, builtin.keys, strict=True)):
        assert torch.equal(target.past[i], past) and torch.equal(target.keys[i], keys), i
        without_last = torch.cat([keys[:, :-1], torch.full_like(keys[:, :1], -1)], dim=1)
        spoilt = aside.layer(i, x.detach(), past, without_last)
        x = exact.layer(i, x, past, keys)
        band = exact.slots.band(x)
        for way in (target, builtin):
            assert ((way.hidden[i] - x).abs() <= band).all(), i
        assert ((spoilt - x).abs() > 2 * band).any(dim=1).all(), i
