"""The whole model with an FP8 cache, and with an fp32 one, against float64 formulas.

The engine's cache bytes and choices are checked one by one (each the nearest value, each among the
best keys, up to fp32 noise) and then taken over by the reference, so that a value on a border does
not make the two drift apart. What is left in the logits is fp32 noise alone.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.dsa import StepSequence, cached_index_key, cached_latent, set_step
from helpers.engine import executor_config, generate, make_engine
from helpers.glm_oracle import TRANSFORMERS_LATENT_EPS, make_checkpoint, random_prompt
from helpers.numerics import Float64, nearest_e4m3, smallest_scale, to_numpy
from helpers.reference_glm import QUANT_BLOCK, Decisions, ReferenceGlm

from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import Role
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor

VARIANTS = ["glm52", "odd_pattern", "one_dense_layer"]
REQUEST = 7
# fp32 noise of activations and logits of up to 10 after 8 layers of differently ordered sums: some
# tens of roundings of 10 * 2^-24.
NOISE = 3e-5
# (tokens of the prompt's chunks, tokens decoded one by one after them)
SCHEDULES = {"one prompt": ([50], 0), "chunks and decode": ([13, 3, 20], 14)}


class EngineDecisions(Decisions):
    """Follows an engine that has run the tokens already."""

    def __init__(self, engine: PyExecutor, selections: list[list[list[int]]]) -> None:
        layout = engine.model_engine.model.config.cache_layout
        super().__init__(layout.fp8)
        self.layout, self.manager, self.selections = layout, engine.kv_cache_manager, selections

    def _place(self, role: Role, layer: int, position: int) -> tuple[int, int, int]:
        page, offset = divmod(position, self.manager.tokens_per_block)
        block = self.manager.block_ids(REQUEST, role)[page]
        return block, self.manager.layer_slot(role, layer), offset

    def cached_latent(self, layer: int, position: int, row: Float64) -> Float64:
        stored = cached_latent(self.manager, self.layout, *self._place(Role.KEY, layer, position))
        best = nearest_e4m3(row) if self.fp8 else row
        assert (np.abs(stored - row) <= np.abs(best - row) + NOISE).all()
        return stored

    def cached_index_key(self, layer: int, position: int, key: Float64) -> Float64:
        place = self._place(Role.INDEX_KEY, layer, position)
        data, scales = cached_index_key(self.manager, self.layout, *place)
        if not self.fp8:
            assert np.abs(data - key).max() <= NOISE
            return data
        blocks = key.reshape(max(1, len(key) // QUANT_BLOCK), -1)
        for block, scale in zip(blocks, scales, strict=True):
            amax = np.abs(block).max()
            assert scale in {smallest_scale(amax - NOISE), smallest_scale(amax + NOISE)}
        spread = np.repeat(scales, blocks.shape[1])
        best = nearest_e4m3(key / spread) * spread
        assert (np.abs(data * spread - key) <= np.abs(best - key) + NOISE).all()
        return data * spread

    def select(
        self, layer: int, position: int, scores: Float64, noise: Float64, count: int
    ) -> list[int]:
        chosen = self.selections[layer][position]
        assert len(set(chosen)) == len(chosen) == count
        left = np.setdiff1d(np.arange(position + 1), chosen)
        if len(left):
            assert (scores + noise)[chosen].min() >= (scores - noise)[left].max()
        return chosen


def run_engine(
    engine: PyExecutor, tokens: list[int], chunks: list[int]
) -> tuple[Float64, list[list[list[int]]]]:
    """(logits of all tokens, per layer the keys that each token attended to); the cache stays."""
    model, metadata = engine.model_engine.model, engine.model_engine.attn_metadata
    selections: list[list[list[int]]] = [[] for _ in model.model.layers]

    def record(layer: int) -> None:
        for row in metadata.selection.indices.tolist():
            selections[layer].append([key for key in row if key != -1])

    for i, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda *_, i=i: record(i))
    engine.kv_cache_manager.add_request(REQUEST)
    engine.kv_cache_manager.resize(REQUEST, len(tokens))
    logits, start = [], 0
    while start < len(tokens):
        in_prompt = bool(chunks)
        new = StepSequence(REQUEST, start, chunks.pop(0) if in_prompt else 1)
        set_step(metadata, [new] if in_prompt else [], [] if in_prompt else [new])
        metadata.prepare()
        ids = torch.tensor(tokens[start : start + new.new])
        logits.append(to_numpy(model(metadata, ids, metadata.position_ids)))
        start += new.new
    return np.concatenate(logits), selections


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("fp8")
    return {
        name: make_checkpoint(root / name, name, seed=40 + i) for i, name in enumerate(VARIANTS)
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_formulas(variant, kv_cache_dtype, schedule, checkpoints) -> None:
    """Prompts and decode steps read the same cache, so one reference serves every schedule."""
    chunks, decoded = SCHEDULES[schedule]
    tokens = random_prompt(sum(chunks) + decoded, seed=3)
    engine = make_engine(executor_config(checkpoints[variant], kv_cache_dtype=kv_cache_dtype))
    logits, selections = run_engine(engine, tokens, list(chunks))
    reference = ReferenceGlm(
        checkpoints[variant],
        latent_eps=TRANSFORMERS_LATENT_EPS,
        decisions=EngineDecisions(engine, selections),
        noise=NOISE,
    )
    assert np.abs(logits - reference.forward(tokens)).max() <= NOISE


def test_the_fp8_cache_changes_the_logits(checkpoints) -> None:
    """Else the test above would pass with a cache that is not quantised at all."""
    tokens, logits = random_prompt(50, seed=3), []
    for kv_cache_dtype in ("auto", "fp8"):
        engine = make_engine(executor_config(checkpoints["glm52"], kv_cache_dtype=kv_cache_dtype))
        logits.append(run_engine(engine, tokens, [len(tokens)])[0])
    assert np.abs(logits[0] - logits[1]).max() > 100 * NOISE


def test_generated_tokens_are_the_references(checkpoints) -> None:
    """Through the step loop, FP8 cache: each greedy token is the reference's best one."""
    directory, prompt = checkpoints["glm52"], random_prompt(21, seed=8)
    stepped = make_engine(executor_config(directory, kv_cache_dtype="fp8", max_num_tokens=16))
    [generated] = generate(stepped, [prompt], 24)
    tokens = prompt + generated[:-1]
    engine = make_engine(executor_config(directory, kv_cache_dtype="fp8"))
    _, selections = run_engine(engine, tokens, [len(tokens)])
    reference = ReferenceGlm(
        directory,
        latent_eps=TRANSFORMERS_LATENT_EPS,
        decisions=EngineDecisions(engine, selections),
        noise=NOISE,
    )
    logits = reference.forward(tokens)[len(prompt) - 1 :]
    best = logits.max(-1)
    taken = logits[np.arange(len(generated)), generated]
    assert (best - taken <= 2 * NOISE).all()


def test_the_references_own_decisions_agree_in_fp32(checkpoints) -> None:
    """Without following the engine: in fp32 nothing lies close enough to a border to differ."""
    tokens = random_prompt(50, seed=3)
    engine = make_engine(executor_config(checkpoints["glm52"]))
    logits, _ = run_engine(engine, tokens, [len(tokens)])
    own = ReferenceGlm(checkpoints["glm52"], latent_eps=TRANSFORMERS_LATENT_EPS).forward(tokens)
    assert np.abs(logits - own).max() <= NOISE
