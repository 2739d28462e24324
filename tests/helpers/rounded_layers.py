"""A decoder layer of GLM-MoE-DSA with the roundings of the built-in modules, and of the target.

The formulas are exact (float64, from the stored weights and cache rows). `Roundings` say where an
engine in bf16 rounds within them. Both round what they store in bf16 between two operations:
projections, attention's output and values, the residual stream. Beyond that:

                        built-in modules                      target
    norms               before and after the weight           after the weight
    query               q_a's norm, q_b, absorbed product,    the folded weight; then once, to the
                        rotation                              cache's dtype
    latent row          norm twice, rotation, then the        once, to the cache's dtype
                        cache's dtype
    scores              product, scaling                      not at all (fp32)
    softmax weights     to bf16, after the division           256 times them, to the cache's dtype,
                                                              before the division
    index query         q_a's norm twice, wq_b                the folded weight, wq_b
    SwiGLU              silu, product                         product
    routing weights     not at all (fp32)                     to bf16
    NVFP4 experts       the weights, as numbers in bf16       input and inner activations to NVFP4,
                                                              nothing else before the second GEMM
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers.numerics import Float64, smallest_scale, to_numpy
from helpers.random_rounding import RandomRounding, linear
from helpers.reference_glm import INDEX_NORM_EPS, layer_norm, rotate, silu
from tensorrt_llm._torch.modules.gated_mlp import GatedMLP


@dataclass(frozen=True)
class Expert:
    """gate, up [inner, hidden] and down [hidden, inner] as they are stored."""

    gate: Float64
    up: Float64
    down: Float64


@dataclass(frozen=True)
class Positions:
    """Of the step's rows: int [rows], and the base of their rotations."""

    of_rows: list[int]
    theta: float

    def rotated(self, x: Float64) -> Float64:
        """x [runs, rows, ..., channels]."""
        turned = [rotate(x[:, t], p, self.theta) for t, p in enumerate(self.of_rows)]
        return np.stack(turned, axis=1)


class Roundings(ABC):
    """Where one engine rounds.

    Args:
        fp8: latents are cached as e4m3, index keys and queries as e4m3 with a power-of-two scale.
        nvfp4: the routed experts are stored in NVFP4.
    """

    def __init__(self, *, fp8: bool, nvfp4: bool, seed: int = 0) -> None:
        self.random, self.fp8, self.nvfp4 = RandomRounding(seed), fp8, nvfp4
        self.act = self.random.bf16

    def cached(self, x: Float64) -> Float64:
        """In the dtype of the latents' cache."""
        return self.random.e4m3(x) if self.fp8 else self.act(x)

    def index_value(self, x: Float64) -> Float64:
        """An index key or query, bf16 already, as it is stored."""
        if not self.fp8:
            return x
        scale = np.vectorize(smallest_scale)(np.abs(x[:1]).max(-1, keepdims=True))
        return self.random.e4m3(x, scale)

    @abstractmethod
    def normed(self, x: Float64, weight: Float64, eps: float) -> Float64: ...

    @abstractmethod
    def queries(self, q_a: Float64, mla: "Attention", at: Positions) -> Float64:
        """[runs, rows, q_lora_rank] -> [runs, rows, heads, latent + rope]."""

    @abstractmethod
    def latent_rows(self, kv_a: Float64, mla: "Attention", at: Positions) -> Float64: ...

    @abstractmethod
    def attended(self, q: Float64, keys: Float64, scale: float, latent: int) -> Float64:
        """q [runs, heads, width], keys [runs, kv, width] -> [runs, heads, latent]."""

    @abstractmethod
    def projected_index_queries(self, q_a: Float64, mla: "Attention") -> Float64:
        """[runs, rows, q_lora_rank] -> [runs, rows, heads * dim]."""

    @abstractmethod
    def swiglu(self, gate: Float64, up: Float64) -> Float64: ...

    @abstractmethod
    def routing_weights(self, weights: Float64) -> Float64: ...

    @abstractmethod
    def expert(self, x: Float64, expert: Expert) -> Float64:
        """[runs, 1, hidden] -> [runs, 1, hidden]."""


class BuiltIn(Roundings):
    def normed(self, x: Float64, weight: Float64, eps: float) -> Float64:
        return self.act(self.act(unit(x, eps)) * weight)

    def queries(self, q_a: Float64, mla: "Attention", at: Positions) -> Float64:
        q = self.act(linear(self.normed(q_a, mla.q_a_norm, mla.latent_eps), mla.q_b))
        q = q.reshape(*q.shape[:2], mla.heads, -1)
        nope, rope = q[..., : mla.nope], q[..., mla.nope :]
        absorbed = self.act(np.einsum("sthn,hnl->sthl", nope, mla.w_uk))
        return np.concatenate([absorbed, self.act(at.rotated(rope))], axis=-1)

    def latent_rows(self, kv_a: Float64, mla: "Attention", at: Positions) -> Float64:
        c, r = kv_a[..., : mla.latent], kv_a[..., mla.latent :]
        normed = self.normed(c, mla.kv_a_norm, mla.latent_eps)
        row = np.concatenate([normed, self.act(at.rotated(r))], axis=-1)
        return self.cached(row) if self.fp8 else row

    def attended(self, q: Float64, keys: Float64, scale: float, latent: int) -> Float64:
        scores = self.act(self.act(linear(q, keys)) * scale)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = self.act(weights / weights.sum(-1, keepdims=True))
        return self.act(weights @ keys[..., :latent])

    def projected_index_queries(self, q_a: Float64, mla: "Attention") -> Float64:
        return self.act(linear(self.normed(q_a, mla.q_a_norm, mla.latent_eps), mla.wq_b))

    def swiglu(self, gate: Float64, up: Float64) -> Float64:
        return self.act(self.act(silu(gate)) * up)

    def routing_weights(self, weights: Float64) -> Float64:
        return weights

    def expert(self, x: Float64, expert: Expert) -> Float64:
        product = self.random.rounded_weights if self.nvfp4 else linear
        gate, up = (self.act(product(x, w)) for w in (expert.gate, expert.up))
        return self.act(product(self.swiglu(gate, up), expert.down))


class Target(Roundings):
    def normed(self, x: Float64, weight: Float64, eps: float) -> Float64:
        return self.act(unit(x, eps) * weight)

    def queries(self, q_a: Float64, mla: "Attention", at: Positions) -> Float64:
        folded = mla.absorbed_q_b * mla.q_a_norm
        y = self.random.rounded_weights(
            unit(q_a, mla.latent_eps), folded.reshape(-1, len(mla.q_a_norm))
        )
        y = y.reshape(*y.shape[:2], mla.heads, -1)
        rotated = at.rotated(y[..., mla.latent :])
        return self.cached(np.concatenate([y[..., : mla.latent], rotated], axis=-1))

    def latent_rows(self, kv_a: Float64, mla: "Attention", at: Positions) -> Float64:
        c, r = kv_a[..., : mla.latent], kv_a[..., mla.latent :]
        normed = unit(c, mla.latent_eps) * mla.kv_a_norm
        return self.cached(np.concatenate([normed, at.rotated(r)], axis=-1))

    def attended(self, q: Float64, keys: Float64, scale: float, latent: int) -> Float64:
        scores = linear(q, keys) * scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        rounded = self.cached(256 * weights) / 256
        return self.act(rounded @ keys[..., :latent] / weights.sum(-1, keepdims=True))

    def projected_index_queries(self, q_a: Float64, mla: "Attention") -> Float64:
        folded = mla.wq_b * mla.q_a_norm
        return self.act(self.random.rounded_weights(unit(q_a, mla.latent_eps), folded))

    def swiglu(self, gate: Float64, up: Float64) -> Float64:
        return self.act(silu(gate) * up)

    def routing_weights(self, weights: Float64) -> Float64:
        return self.act(weights)

    def expert(self, x: Float64, expert: Expert) -> Float64:
        if not self.nvfp4:
            gate, up = (self.act(linear(x, w)) for w in (expert.gate, expert.up))
            return self.act(linear(self.swiglu(gate, up), expert.down))
        x = self.random.nvfp4(x)
        inner = self.random.nvfp4(silu(linear(x, expert.gate)) * linear(x, expert.up))
        return self.act(linear(inner, expert.down))


def unit(x: Float64, eps: float) -> Float64:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


# --- attention ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attended:
    """All over the runs.

    Attributes:
        residual: [rows, hidden] after the attention.
        latents: [rows, latent + rope], the step's own as they are cached.
        index_keys: [rows, dim], likewise; scores: [rows, keys], those in the future too. None
            without an indexer.
    """

    residual: Float64
    latents: Float64
    index_keys: Float64 | None
    scores: Float64 | None


class Attention:
    """One layer's attention on the module's weights.

    Args:
        layer: the built-in decoder layer.
    """

    def __init__(self, layer: Any) -> None:
        mla, norm = layer.self_attn, layer.input_layernorm
        self.norm, self.eps = to_numpy(norm.weight), norm.eps
        self.latent, self.nope, self.rope = mla.kv_lora_rank, mla.nope, mla.rope
        self.heads, self.latent_eps = mla.num_heads, mla.q_a_layernorm.eps
        self.fused_a, self.splits = to_numpy(mla.fused_a), np.cumsum(mla.splits)[:-1]
        self.q_a_norm = to_numpy(mla.q_a_layernorm.weight)
        self.kv_a_norm = to_numpy(mla.kv_a_layernorm.weight)
        self.q_b, self.o_proj = to_numpy(mla.q_b_proj.weight), to_numpy(mla.o_proj.weight)
        kv_b = to_numpy(mla.kv_b_proj.weight).reshape(self.heads, -1, self.latent)
        self.w_uk, self.w_uv = kv_b[:, : self.nope], kv_b[:, self.nope :]
        by_head = self.q_b.reshape(self.heads, self.nope + self.rope, -1)
        latent = np.einsum("hnl,hnr->hlr", self.w_uk, by_head[:, : self.nope])
        self.absorbed_q_b = np.concatenate([latent, by_head[:, self.nope :]], axis=1)
        self.indexer = mla.indexer is not None
        if self.indexer:
            self.wq_b = to_numpy(mla.indexer.wq_b.weight)
            self.k_norm = [
                to_numpy(w) for w in (mla.indexer.k_norm.weight, mla.indexer.k_norm.bias)
            ]
            self.index_heads = mla.indexer.params.index_n_heads

    def forward(
        self,
        path: Roundings,
        residual: Float64,
        at: Positions,
        latents: Float64,
        index_keys: Float64,
        chosen: list[list[int]],
    ) -> Attended:
        """
        Args:
            residual: [runs, rows, hidden] before the layer.
            latents, index_keys: [older keys, width] as they are cached.
            chosen: of each row, the keys that it attends to.
        """
        x = path.normed(residual, self.norm, self.eps)
        q_a, kv_a, *index_inputs = np.split(path.act(linear(x, self.fused_a)), self.splits, axis=-1)
        own = path.latent_rows(kv_a, self, at)
        keys, q = _behind(latents, own), path.queries(q_a, self, at)
        scale = (self.nope + self.rope) ** -0.5
        rows = [
            path.attended(q[:, t], keys[:, of_row], scale, self.latent)
            for t, of_row in enumerate(chosen)
        ]
        values = path.act(np.einsum("sthl,hvl->sthv", np.stack(rows, axis=1), self.w_uv))
        out = path.act(linear(values.reshape(*values.shape[:2], -1), self.o_proj))
        index = (
            self._scores(path, q_a, *index_inputs, at, index_keys) if index_inputs else (None,) * 2
        )
        return Attended(path.act(residual + out), own, *index)

    def _scores(
        self,
        path: Roundings,
        q_a: Float64,
        k: Float64,
        weights: Float64,
        at: Positions,
        older: Float64,
    ) -> tuple[Float64, Float64]:
        """(the step's index keys, scores of all keys)."""
        normed = path.act(layer_norm(k, *self.k_norm, INDEX_NORM_EPS))
        own = path.index_value(self._rotated(path, normed, at))
        q = path.projected_index_queries(q_a, self)
        q = self._rotated(path, q.reshape(*q.shape[:2], self.index_heads, -1), at)
        dots = np.einsum("sthd,skd->sthk", path.index_value(q), _behind(older, own))
        scores = np.einsum("sthk,sth->stk", np.maximum(dots, 0), weights)
        return own, scores * (self.index_heads * k.shape[-1]) ** -0.5

    def _rotated(self, path: Roundings, x: Float64, at: Positions) -> Float64:
        turned = path.act(at.rotated(x[..., : self.rope]))
        return np.concatenate([turned, x[..., self.rope :]], axis=-1)


def _behind(older: Float64, own: Float64) -> Float64:
    """[runs, older + own, width]."""
    return np.concatenate([np.broadcast_to(older, (len(own), *older.shape)), own], axis=1)


# --- MLP ------------------------------------------------------------------------------------------


class Mlp:
    """One layer's MLP on the module's weights.

    Args:
        layer: the built-in decoder layer.
        experts: the routed ones as they are stored; none for a dense layer.
    """

    def __init__(self, layer: Any, experts: list[Expert]) -> None:
        norm, mlp = layer.post_attention_layernorm, layer.mlp
        self.norm, self.eps, self.experts = to_numpy(norm.weight), norm.eps, experts
        dense = mlp if isinstance(mlp, GatedMLP) else mlp.shared_experts
        gate, up = np.split(to_numpy(dense.gate_up_proj), 2)
        self.dense = Expert(gate, up, to_numpy(dense.down_proj))
        if experts:
            self.router = to_numpy(mlp.gate.weight)
            self.bias, self.scale = to_numpy(mlp.gate.e_score_correction_bias), mlp.gate.scale

    def forward(
        self, path: Roundings, residual: Float64, chosen: list[list[int]]
    ) -> tuple[Float64, Float64 | None]:
        """
        Args:
            residual: [runs, rows, hidden] after the attention.
            chosen: of each row, its experts; of a dense layer nothing is read.

        Returns:
            ([runs, rows, hidden] after the MLP, what the experts are chosen by [runs, rows,
            experts] or None).
        """
        x = path.normed(residual, self.norm, self.eps)
        gate, up = (path.act(linear(x, w)) for w in (self.dense.gate, self.dense.up))
        out = path.act(linear(path.swiglu(gate, up), self.dense.down))
        if not self.experts:
            return path.act(residual + out), None
        scores = 1 / (1 + np.exp(-linear(x, self.router)))
        routed = [
            self._row(path, x[:, t : t + 1], scores[:, t], ids) for t, ids in enumerate(chosen)
        ]
        out = path.act(path.act(np.concatenate(routed, axis=1)) + out)
        return path.act(residual + out), scores + self.bias

    def _row(self, path: Roundings, x: Float64, scores: Float64, ids: list[int]) -> Float64:
        won = scores[:, ids]
        weights = path.routing_weights(self.scale * won / won.sum(-1, keepdims=True))
        each = (path.expert(x, self.experts[e]) for e in ids)
        return sum(w[:, None, None] * y for w, y in zip(weights.T, each, strict=True))
