"""GLM-MoE-DSA in float64 with numpy alone: the formulas written out, one token after the other.

Nothing here comes from the project or from transformers. Two things in the model have borders,
where an engine in fp32 may rightly fall on the other side than float64: rounding to an FP8 cache,
and the choice of the best keys. `Decisions` makes both; a subclass may follow an engine's, after
checking that each is right up to rounding noise.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from helpers.numerics import Float64, nearest_e4m3, smallest_scale, to_numpy

QUANT_BLOCK = 128
INDEX_NORM_EPS = 1e-6


# --- formulas -------------------------------------------------------------------------------------


def rms_norm(x: Float64, weight: Float64, eps: float) -> Float64:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def layer_norm(x: Float64, weight: Float64, bias: Float64, eps: float) -> Float64:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def rotate(x: Float64, position: int, theta: float) -> Float64:
    """Pair j, channels (2j, 2j + 1) as a complex number, turned by position * theta^(-2j/dim)."""
    dim = x.shape[-1]
    turns = np.exp(1j * position * theta ** (-np.arange(0, dim, 2) / dim))
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turns
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def rotate_first(x: Float64, channels: int, position: int, theta: float) -> Float64:
    return np.concatenate([rotate(x[..., :channels], position, theta), x[..., channels:]], axis=-1)


def silu(x: Float64) -> Float64:
    return x / (1 + np.exp(-x))


def softmax(x: Float64) -> Float64:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def through_fp8(x: Float64) -> Float64:
    """What is left of one row of channels after e4m3 with a power-of-two scale per 128 channels."""
    blocks = x.reshape(max(1, len(x) // QUANT_BLOCK), -1)
    scales = np.array([smallest_scale(np.abs(b).max()) for b in blocks])[:, None]
    return (nearest_e4m3(blocks / scales) * scales).reshape(x.shape)


def index_scores(queries: Float64, weights: Float64, keys: Float64) -> Float64:
    """queries [heads, dim], weights [heads], keys [kv, dim] -> [kv]."""
    heads, dim = queries.shape
    return weights @ np.maximum(queries @ keys.T, 0) * heads**-0.5 * dim**-0.5


# --- decisions ------------------------------------------------------------------------------------


class Decisions:
    """What the reference decides by itself: the nearest FP8 values and the best keys.

    Args:
        fp8: latents are cached as e4m3 at unit scale, index keys and queries as `through_fp8` says.
    """

    def __init__(self, fp8: bool = False) -> None:
        self.fp8 = fp8

    def cached_latent(self, layer: int, position: int, row: Float64) -> Float64:
        """The row as later read from the cache."""
        return nearest_e4m3(row) if self.fp8 else row

    def cached_index_key(self, layer: int, position: int, key: Float64) -> Float64:
        return through_fp8(key) if self.fp8 else key

    def index_query(self, query: Float64) -> Float64:
        """One head's query as it meets the cached keys."""
        return through_fp8(query) if self.fp8 else query

    def select(
        self, layer: int, position: int, scores: Float64, noise: Float64, count: int
    ) -> list[int]:
        """`count` of the keys 0 ... position.

        Args:
            scores: of each of these keys.
            noise: how much an engine's rounding may have changed each score.
        """
        return np.argsort(-scores, kind="stable")[:count].tolist()


class ContraryDecisions(Decisions):
    """Breaks every tie, and every choice within noise, the other way.

    What comes out the same hangs on no choice that an engine may rightly make otherwise.
    """

    def select(
        self, layer: int, position: int, scores: Float64, noise: Float64, count: int
    ) -> list[int]:
        """See `Decisions`."""
        last = super().select(layer, position, scores, noise, count)[-1]
        near = np.abs(scores - scores[last]) <= noise + noise[last]
        mirrored = np.where(near, 2 * scores[last] - scores, scores)
        return np.argsort(-mirrored, kind="stable")[:count].tolist()


def score_noise(
    queries: Float64, weights: Float64, keys: Float64, relative: float, fp8: bool
) -> Float64:
    """Bound on the error of `index_scores` [kv] when each query channel is off by `relative` of its
    head's largest one. A channel that this moves over a border of e4m3 counts with the whole step.
    """
    slack = relative * np.abs(queries).max(-1, keepdims=True)
    off = np.broadcast_to(slack, queries.shape)
    if fp8:
        low, high = (np.array([through_fp8(h) for h in queries + d]) for d in (-slack, slack))
        off = off + np.abs(high - low)
    heads, dim = queries.shape
    magnitude = np.abs(weights) @ (np.abs(queries) @ np.abs(keys).T)
    moved = np.abs(weights) @ (off @ np.abs(keys).T)
    return (moved + 3 * relative * magnitude) * heads**-0.5 * dim**-0.5


# --- the model ------------------------------------------------------------------------------------


@dataclass
class LayerCache:
    latents: list[Float64]
    index_keys: list[Float64]

    def copy(self) -> "LayerCache":
        return LayerCache(list(self.latents), list(self.index_keys))


class ReferenceGlm:
    """A checkpoint: `forward` is the backbone, `DraftChain` runs the MTP layer.

    Args:
        latent_eps: eps of q_a_layernorm and kv_a_layernorm.
        noise: relative error that an fp32 engine's activations may have, for `Decisions.select`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        latent_eps: float,
        decisions: Decisions | None = None,
        noise: float = 1e-5,
    ) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        stored = load_file(directory / "model.safetensors")
        self.weights = {name: to_numpy(tensor) for name, tensor in stored.items()}
        self.latent_eps, self.noise = latent_eps, noise
        self.decisions = decisions or Decisions()
        self.theta = self.config["rope_parameters"]["rope_theta"]
        self.mtp_layer = self.config["num_hidden_layers"]
        # The MTP layer's block is of the kinds that config.json does not list.
        self.indexer_types = [*self.config["indexer_types"], "full"]
        self.mlp_types = [*self.config["mlp_layer_types"], "sparse"]

    def forward(self, tokens: list[int]) -> Float64:
        """Logits [tokens, vocab] of one sequence from an empty cache."""
        return np.array([self.logits(hidden) for hidden in self.hidden_states(tokens)])

    def hidden_states(self, tokens: list[int]) -> list[Float64]:
        """After the final norm, [hidden] of each token of one sequence from an empty cache."""
        caches = [LayerCache([], []) for _ in range(self.mtp_layer)]
        hidden = []
        for position, token in enumerate(tokens):
            x, chosen = self._embedding(token), []
            for layer, cache in enumerate(caches):
                x, chosen = self._block(layer, x, position, cache, chosen)
            hidden.append(self._rms("model.norm", x))
        return hidden

    def logits(self, hidden: Float64) -> Float64:
        """[hidden] after the final norm, or after an MTP layer's, -> [vocab]."""
        return self._weight("lm_head") @ hidden

    def draft_hidden(
        self, token: int, hidden: Float64, position: int, cache: LayerCache, keys: list[int] | None
    ) -> tuple[Float64, list[int]]:
        """One row of the MTP layer: (hidden state after `shared_head.norm`, keys attended to).

        Args:
            token: the one after `position`.
            hidden: [hidden] of `position`, after the final norm or of the draft step before.
            keys: attend to these and append nothing; None appends the row and chooses.
        """
        name = f"model.layers.{self.mtp_layer}"
        both = [
            self._rms(f"{name}.enorm", self._embedding(token)),
            self._rms(f"{name}.hnorm", hidden),
        ]
        x = self._weight(f"{name}.eh_proj") @ np.concatenate(both)
        x, chosen = self._block(self.mtp_layer, x, position, cache, keys or [], append=keys is None)
        return self._rms(f"{name}.shared_head.norm", x), chosen

    def _embedding(self, token: int) -> Float64:
        return self._weight("model.embed_tokens")[token]

    def _weight(self, name: str) -> Float64:
        return self.weights[f"{name}.weight"]

    def _rms(self, name: str, x: Float64, eps: float | None = None) -> Float64:
        return rms_norm(x, self._weight(name), self.config["rms_norm_eps"] if eps is None else eps)

    def _block(
        self,
        layer: int,
        x: Float64,
        position: int,
        cache: LayerCache,
        chosen: list[int],
        append: bool = True,
    ) -> tuple[Float64, list[int]]:
        """(output, keys attended to). Without `append` those are `chosen`, and the cache stays."""
        name = f"model.layers.{layer}"
        normed = self._rms(f"{name}.input_layernorm", x)
        qr = self._rms(
            f"{name}.self_attn.q_a_layernorm",
            self._weight(f"{name}.self_attn.q_a_proj") @ normed,
            self.latent_eps,
        )
        if append:
            self._append_latent(layer, normed, position, cache)
            if self.indexer_types[layer] == "full":
                chosen = self._choose(layer, normed, qr, position, cache)
        out = self._attention(layer, qr, position, np.array(cache.latents)[chosen])
        x = x + out
        normed = self._rms(f"{name}.post_attention_layernorm", x)
        dense = self.mlp_types[layer] == "dense"
        return x + (self._mlp if dense else self._moe)(f"{name}.mlp", normed), chosen

    def _append_latent(self, layer: int, x: Float64, position: int, cache: LayerCache) -> None:
        name, rank = f"model.layers.{layer}.self_attn", self.config["kv_lora_rank"]
        latent = self._weight(f"{name}.kv_a_proj_with_mqa") @ x
        row = np.concatenate(
            [
                self._rms(f"{name}.kv_a_layernorm", latent[:rank], self.latent_eps),
                rotate(latent[rank:], position, self.theta),
            ]
        )
        cache.latents.append(self.decisions.cached_latent(layer, position, row))

    def _attention(self, layer: int, qr: Float64, position: int, rows: Float64) -> Float64:
        """Expanded (not absorbed) attention of the normed query latent over cached rows."""
        c, name = self.config, f"model.layers.{layer}.self_attn"
        nope, rope, heads = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["num_attention_heads"]
        rank = c["kv_lora_rank"]
        q = (self._weight(f"{name}.q_b_proj") @ qr).reshape(heads, nope + rope)
        q_rope = rotate(q[:, nope:], position, self.theta)
        kv_b = self._weight(f"{name}.kv_b_proj").reshape(heads, nope + c["v_head_dim"], rank)
        out = []
        for h in range(heads):
            expanded = rows[:, :rank] @ kv_b[h].T
            scores = expanded[:, :nope] @ q[h, :nope] + rows[:, rank:] @ q_rope[h]
            out.append(softmax(scores * (nope + rope) ** -0.5) @ expanded[:, nope:])
        return self._weight(f"{name}.o_proj") @ np.concatenate(out)

    def _choose(
        self, layer: int, x: Float64, qr: Float64, position: int, cache: LayerCache
    ) -> list[int]:
        c, name = self.config, f"model.layers.{layer}.self_attn.indexer"
        heads, dim, rope = c["index_n_heads"], c["index_head_dim"], c["qk_rope_head_dim"]
        key = layer_norm(
            self._weight(f"{name}.wk") @ x,
            self._weight(f"{name}.k_norm"),
            self.weights[f"{name}.k_norm.bias"],
            INDEX_NORM_EPS,
        )
        key = rotate_first(key, rope, position, self.theta)
        cache.index_keys.append(self.decisions.cached_index_key(layer, position, key))
        exact = (self._weight(f"{name}.wq_b") @ qr).reshape(heads, dim)
        exact = rotate_first(exact, rope, position, self.theta)
        queries = np.array([self.decisions.index_query(q) for q in exact])
        weights, keys = self._weight(f"{name}.weights_proj") @ x, np.array(cache.index_keys)
        scores = index_scores(queries, weights, keys)
        noise = score_noise(exact, weights, keys, self.noise, self.decisions.fp8)
        count = min(c["index_topk"], position + 1)
        return self.decisions.select(layer, position, scores, noise, count)

    def _mlp(self, name: str, x: Float64) -> Float64:
        gate, up = self._weight(f"{name}.gate_proj") @ x, self._weight(f"{name}.up_proj") @ x
        return self._weight(f"{name}.down_proj") @ (silu(gate) * up)

    def _moe(self, name: str, x: Float64) -> Float64:
        scores = 1 / (1 + np.exp(-self._weight(f"{name}.gate") @ x))
        ranked = np.argsort(-(scores + self.weights[f"{name}.gate.e_score_correction_bias"]))
        experts = ranked[: self.config["num_experts_per_tok"]]
        share = scores[experts] / scores[experts].sum() * self.config["routed_scaling_factor"]
        out = self._mlp(f"{name}.shared_experts", x)
        for weight, expert in zip(share, experts, strict=True):
            out = out + weight * self._mlp(f"{name}.experts.{expert}", x)
        return out


class DraftChain:
    """The drafts that belong after each token of a sequence.

    The first draft step runs the MTP layer on every position, with its hidden state after the final
    norm and the token after it. The later steps are one row each, from the last row on: the last
    draft, and the hidden state after `shared_head.norm`, one position further. With index share
    they attend to the keys that the last row of the first step chose and append none; else they
    append and choose like any row, and what they appended is forgotten with the drafts.
    """

    def __init__(self, model: ReferenceGlm, index_share: bool) -> None:
        self.model, self.index_share = model, index_share
        self.cache = LayerCache([], [])
        self.hidden: Float64 = np.empty(0)
        self.keys: list[int] = []

    def extend(self, hidden: Float64, following: int) -> None:
        """Add a position: its hidden state after the final norm [hidden], and the token after
        it."""
        position = len(self.cache.latents)
        self.hidden, self.keys = self.model.draft_hidden(
            following, hidden, position, self.cache, None
        )

    def drafts(self, count: int) -> list[int]:
        """What follows the last token."""
        cache, hidden, drafts = self.cache.copy(), self.hidden, [self._best(self.hidden)]
        keys = self.keys if self.index_share else None
        for position in range(len(self.cache.latents), len(self.cache.latents) + count - 1):
            hidden, _ = self.model.draft_hidden(drafts[-1], hidden, position, cache, keys)
            drafts.append(self._best(hidden))
        return drafts

    def _best(self, hidden: Float64) -> int:
        return int(self.model.logits(hidden).argmax())
