"""One decode step by the target and by the built-in modules, and the formulas of both beside it.

The engines run half a layer at a time from the same residual stream (the target's) and the same
cache, so that errors do not pile up; the formulas take what the engines chose, keys and experts, so
that a choice on a border does not make them drift apart. Whether it was right is for tests to ask.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from helpers.dsa import StepSequence, cached_index_key, cached_latent, set_step
from helpers.engine import executor_config, make_engine
from helpers.glm_tiny import CHECKPOINT, heldout
from helpers.numerics import Float64, to_numpy
from helpers.rounded_layers import (
    Attended,
    Attention,
    BuiltIn,
    Expert,
    Mlp,
    Positions,
    Roundings,
    Target,
)
from tensorrt_llm._torch.custom_ops.fp4 import dequantize_nvfp4
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.decode import (
    FAST,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.modeling import (  # noqa: E501
    GlmTarget,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.comm.mnnvl_hop import (  # noqa: E501
    MnnvlHop,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.comm.mnnvl_moe_finalize_hop import (  # noqa: E501
    MnnvlMoeFinalizeHop,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer.hist_topk import (  # noqa: E501
    HistTopK,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.moe import (
    routed_experts,
)
from tensorrt_llm._torch.models.checkpoints.reader import CheckpointReader
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import Role
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor

REQUEST = 7
ROWS = 4  # of the step: the last token and three drafts
OLDER = 40  # tokens in the cache before it, more than index_topk 16
# name -> (NVFP4 experts, dtype of the cache)
CONFIGS = {"bf16": (False, "auto"), "fp8 cache": (False, "fp8"), "nvfp4, fp8 cache": (True, "fp8")}


@dataclass
class Trace:
    """What one engine made of a step, layer by layer.

    Attributes:
        attended, out: [rows, hidden], the residual stream after attention and after the MLP.
        keys: of each row the keys that it attends to; experts: of each row, of MoE layers alone.
        pools: after the step; hidden: [rows, hidden] after the final norm.
    """

    attended: list[Tensor] = field(default_factory=list)
    out: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    pools: dict[Role, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None


class Step:
    """A model with a prompt in its caches, about to verify a token and its drafts."""

    def __init__(self, executor: PyExecutor, tokens: list[int]) -> None:
        self.model, self.md = executor.model_engine.model, executor.model_engine.attn_metadata
        assert isinstance(self.model, GlmTarget)
        self.core, self.manager = self.model.core, executor.kv_cache_manager
        self.ids = torch.tensor(tokens[OLDER : OLDER + ROWS])
        self.manager.add_request(REQUEST)
        self.manager.resize(REQUEST, OLDER + ROWS)
        self._set(StepSequence(REQUEST, 0, OLDER), context=True)
        self.core(self.md, torch.tensor(tokens[:OLDER]), self.md.position_ids)
        self._set(StepSequence(REQUEST, OLDER, ROWS), context=False)
        self.pools = self._pools()

    def _set(self, sequence: StepSequence, *, context: bool) -> None:
        set_step(self.md, [sequence] if context else [], [] if context else [sequence])
        self.md.kv_limits = [OLDER + ROWS]
        self.md.prepare()

    def _pools(self) -> dict[Role, Tensor]:
        return {role: self.manager.pool(role).clone() for role in Role}

    def restore(self, pools: dict[Role, Tensor]) -> None:
        for role, pool in pools.items():
            self.manager.pool(role).copy_(pool)

    @torch.inference_mode()
    def by_target(self) -> Trace:
        """Through the model's own forward."""
        self.restore(self.pools)
        trace = Trace()
        with _recorded(trace):
            trace.hidden = self.core(self.md, self.ids, self.md.position_ids)
        assert self.core.path == FAST
        trace.pools = self._pools()
        return trace

    @torch.inference_mode()
    def by_modules(self, target: Trace) -> Trace:
        """Each half of a layer from the residual stream that the target had there; layers that
        share a selection take the target's."""
        self.restore(self.pools)
        trace, md = Trace(), self.md
        rotations = self.core.rotary.rotations(md.position_ids)
        before = [self.core.embed_tokens(self.ids), *target.out]
        for i, layer in enumerate(self.core.layers):
            if layer.self_attn.indexer is None:
                md.selection = md.select(target.keys[i])
            x = layer.input_layernorm(before[i])
            trace.attended.append(layer.self_attn(x, rotations, md) + before[i])
            trace.keys.append(md.selection.indices)
            x = layer.post_attention_layernorm(target.attended[i])
            trace.out.append(layer.mlp(x) + target.attended[i])
            if hasattr(layer.mlp, "gate"):
                trace.experts.append(layer.mlp.gate(x)[1])
        trace.pools = self._pools()
        return trace

    @torch.inference_mode()
    def by_built_in_forward(self) -> Trace:
        """All layers, one behind the other; only choices and the result."""
        self.restore(self.pools)
        trace, hooks = Trace(), []
        for layer in self.core.layers:
            hooks.append(
                layer.self_attn.register_forward_hook(
                    lambda *_: trace.keys.append(self.md.selection.indices)
                )
            )
            if hasattr(layer.mlp, "gate"):
                hooks.append(
                    layer.mlp.gate.register_forward_hook(
                        lambda _gate, _args, out: trace.experts.append(out[1])
                    )
                )
        trace.hidden = self.core.builtin_forward(self.md, self.ids, self.md.position_ids)
        for hook in hooks:
            hook.remove()
        return trace


@contextmanager
def _recorded(trace: Trace) -> Iterator[None]:
    """Notes what the hops return, two of a layer, which keys and which experts are chosen."""
    streams: list[Tensor] = []
    hop, moe_hop, topk = MnnvlHop.raw_call, MnnvlMoeFinalizeHop.raw_call, HistTopK.raw_call
    route = routed_experts.noaux_tc
    chosen: list[Tensor] = []

    def noted_hop(call: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            normed, residual = call(*args, **kwargs)
            if len(streams) % 2 == 0:
                trace.keys.append(chosen[-1])
            streams.append(residual)
            return normed, residual

        return staticmethod(noted)

    def noted_topk(*args: Any, **kwargs: Any) -> None:
        topk(*args, **kwargs)
        chosen.append(kwargs["topk_indices"].clone())

    def noted_route(*args: Any) -> Any:
        weights, ids = route(*args)
        trace.experts.append(ids)
        return weights, ids

    with ExitStack() as stack:
        for owner, name, noted in (
            (MnnvlHop, "raw_call", noted_hop(hop)),
            (MnnvlMoeFinalizeHop, "raw_call", noted_hop(moe_hop)),
            (HistTopK, "raw_call", staticmethod(noted_topk)),
            (routed_experts, "noaux_tc", noted_route),
        ):
            stack.enter_context(patch.object(owner, name, noted))
        yield
    trace.attended, trace.out = streams[0::2], streams[1::2]


# --- the formulas beside it -----------------------------------------------------------------------


@dataclass(frozen=True)
class Half:
    """The residual stream [rows, hidden] after half a layer: an engine's, and the formulas' runs of
    the same."""

    got: Float64
    runs: Float64


class Formulas:
    """One path of every layer of a step, on the values that are stored before it."""

    def __init__(self, step: Step, checkpoint: Path, *, fp8: bool, nvfp4: bool) -> None:
        self.step, self.fp8, self.nvfp4 = step, fp8, nvfp4
        config = step.model.config
        self.layout, self.experts = config.cache_layout, config.pretrained_config.n_routed_experts
        rows = list(range(OLDER, OLDER + ROWS))
        self.at = Positions(rows, config.pretrained_config.rope_theta)
        reader, layers = CheckpointReader(checkpoint), list(step.core.layers)
        self.attentions = [Attention(layer) for layer in layers]
        self.mlps = [
            Mlp(layer, self._experts(reader, i) if hasattr(layer.mlp, "gate") else [])
            for i, layer in enumerate(layers)
        ]
        step.restore(step.pools)
        self.older = [self.cached(i, range(OLDER)) for i in range(len(layers))]

    def path(self, kind: type[Roundings]) -> Roundings:
        return kind(fp8=self.fp8, nvfp4=self.nvfp4)

    def attended(self, path: Roundings, i: int, residual: Float64, keys: Tensor) -> Attended:
        return self.attentions[i].forward(path, residual, self.at, *self.older[i], keys.tolist())

    def mlp(
        self, path: Roundings, i: int, residual: Float64, trace: Trace
    ) -> tuple[Float64, Float64 | None]:
        """See `Mlp.forward`."""
        return self.mlps[i].forward(path, residual, self.chosen_experts(i, trace))

    def chosen_experts(self, i: int, trace: Trace) -> list[list[int]]:
        """Of each row in layer i; [] for a dense layer."""
        if not self.mlps[i].experts:
            return []
        return trace.experts[sum(bool(mlp.experts) for mlp in self.mlps[:i])].tolist()

    def hidden_states(self, path: Roundings, trace: Trace) -> Float64:
        """[runs, rows, hidden] after the final norm of the whole step, with the trace's choices."""
        core = self.step.core
        x = to_numpy(core.embed_tokens(self.step.ids))[None]
        for i, keys in enumerate(trace.keys):
            x = self.attended(path, i, x, keys).residual
            x, _ = self.mlp(path, i, x, trace)
        return path.normed(x, to_numpy(core.norm.weight), core.norm.eps)

    def cached(self, i: int, positions: range) -> tuple[Float64, Float64]:
        """Latents and index keys (without an indexer none) of layer i as the pools have them."""
        pools = self.step.manager, self.layout
        latents = [cached_latent(*pools, *self._place(Role.KEY, i, p)) for p in positions]
        if not self.attentions[i].indexer:
            return np.array(latents), np.empty(0)
        keys = [cached_index_key(*pools, *self._place(Role.INDEX_KEY, i, p)) for p in positions]
        return np.array(latents), np.array([k * s if self.fp8 else k for k, s in keys])

    def _place(self, role: Role, layer: int, position: int) -> tuple[int, int, int]:
        manager = self.step.manager
        page, offset = divmod(position, manager.tokens_per_block)
        block = manager.block_ids(REQUEST, role)[page]
        return block, manager.layer_slot(role, layer), offset

    def _experts(self, reader: CheckpointReader, i: int) -> list[Expert]:
        name = f"model.layers.{i}.mlp.experts"
        return [
            Expert(*(self._stored(reader, f"{name}.{e}.{p}_proj") for p in ("gate", "up", "down")))
            for e in range(self.experts)
        ]

    def _stored(self, reader: CheckpointReader, name: str) -> Float64:
        weight = reader.read(f"{name}.weight")
        if not self.nvfp4:
            return to_numpy(weight)
        # Without a global scale the product is exact in fp32.
        values = dequantize_nvfp4(weight, reader.read(f"{name}.weight_scale"), torch.tensor(1.0))
        return to_numpy(values) * float(reader.read(f"{name}.weight_scale_2"))


class Compared:
    """Both engines' step and both paths' formulas, from one residual stream for each half."""

    def __init__(self, name: str, nvfp4: Path) -> None:
        quantised, cache = CONFIGS[name]
        checkpoint = nvfp4 if quantised else CHECKPOINT
        self.step = Step(engine(checkpoint, cache, "require"), context_tokens())
        self.target = self.step.by_target()
        self.traces = {Target: self.target, BuiltIn: self.step.by_modules(self.target)}
        self.formulas = Formulas(self.step, checkpoint, fp8=cache == "fp8", nvfp4=quantised)
        self.attended = {kind: self._attended(kind) for kind in self.traces}
        self.mlps = {kind: self._mlps(kind) for kind in self.traces}

    def _attended(self, kind: type[Roundings]) -> list[Attended]:
        before = [self.step.core.embed_tokens(self.step.ids), *self.target.out]
        path = self.formulas.path(kind)
        return [
            self.formulas.attended(path, i, to_numpy(before[i])[None], keys)
            for i, keys in enumerate(self.traces[kind].keys)
        ]

    def _mlps(self, kind: type[Roundings]) -> list[tuple[Float64, Float64 | None]]:
        path = self.formulas.path(kind)
        return [
            self.formulas.mlp(path, i, to_numpy(residual)[None], self.traces[kind])
            for i, residual in enumerate(self.target.attended)
        ]

    def halves(self, kind: type[Roundings], trace: Trace | None = None) -> dict[str, Half]:
        """By layer and half.

        Args:
            trace: to compare instead of the engine's own.
        """
        found, trace = {}, trace or self.traces[kind]
        for i, (attended, (out, _)) in enumerate(
            zip(self.attended[kind], self.mlps[kind], strict=True)
        ):
            found[f"{i} attention"] = Half(to_numpy(trace.attended[i]), attended.residual)
            found[f"{i} mlp"] = Half(to_numpy(trace.out[i]), out)
        return found


def engine(checkpoint: Path, cache: str, modeling_v2: str, **overrides: Any) -> PyExecutor:
    settings = {"max_seq_len": 64, "max_batch_size": 1, "max_draft_len": ROWS - 1, **overrides}
    return make_engine(
        executor_config(
            checkpoint,
            dtype="bfloat16",
            kv_cache_dtype=cache,
            modeling_v2=modeling_v2,
            latent_norm_eps=None,
            **settings,
        )
    )


def context_tokens() -> list[int]:
    """Questions one behind the other; NVFP4's input scales are calibrated on each of them, among
    others."""
    return [token for prompt, _ in heldout(every=60) for token in prompt][: OLDER + ROWS]
