"""How far fp32 may be from the exact hidden states of one decode step.

The step runs in float64 with a slot at each result that fp32 rounds: a zero that is added there.
Backward passes say how much each slot moves an output, so to first order

    fp32 - exact = sum over slots of (d output / d slot) * (error of the slot).

A slot's error comes from n roundings of at most 2^-24 times the magnitudes that are rounded, for
sums in any order and for both ways to compute the step: the built-in modules, and the target's ops
on folded weights. With roundings as independent errors of mean zero (Higham and Mary, "A new
approach to probabilistic rounding error analysis", 2019) Hoeffding's inequality bounds the sum by

    LAMBDA * sqrt(sum over slots of (d output / d slot)^2 * n * (2^-24 * magnitude)^2)

but for a share of 2 exp(-LAMBDA^2 / 2) = 2.5e-14 of all outputs. An error of two roundings' size,
as of an exponential, counts as four. What many results have in common (a norm's factor, a
constant) is one slot for all of them. Errors are below 1e-3 of what they change, so all of second
order lies in the 1 % on top.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.numerics import UNIT_ROUNDOFF

LAMBDA = 8.0
SECOND_ORDER = 1.01
EXPONENTIAL = 4
# Outputs whose derivatives are taken at once.
CHUNK = 128


@dataclass
class Slots:
    """The slots of a step, and the largest rms of each one's error (all float64)."""

    slots: list[Tensor] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)
    constants: dict[str, Tensor] = field(default_factory=dict)

    def rounded(self, exact: Tensor, roundings: float, magnitude: Tensor) -> Tensor:
        """`exact` after so many roundings of numbers of at most `magnitude`, which has its
        shape."""
        slot = torch.zeros_like(exact, requires_grad=True)
        self.slots.append(slot)
        self.errors.append(roundings**0.5 * UNIT_ROUNDOFF[torch.float32] * magnitude.detach())
        return exact + slot

    def relative(self, exact: Tensor, roundings: float) -> Tensor:
        return self.rounded(exact, roundings, exact.abs())

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., rows, n] @ weight [..., n, columns]: n - 1 sums, and n products whose errors
        together are one sum's."""
        return self.rounded(x @ weight, x.shape[-1], x.abs() @ weight.abs())

    def factor(self, roundings: float, *shape: int) -> Tensor:
        """A factor of 1 that is rounded."""
        return self.relative(torch.ones(shape, dtype=torch.float64), roundings)

    def constant(self, name: str) -> Tensor:
        """A factor for the rounding of one number that all layers use."""
        if name not in self.constants:
            self.constants[name] = self.factor(EXPONENTIAL, 1)
        return self.constants[name]

    def band(self, output: Tensor) -> Tensor:
        """Bound on the error of each element of a result of the step."""
        flat = output.flatten()
        basis = torch.eye(len(flat), dtype=torch.float64).split(CHUNK)
        squares = torch.cat([self._squares(flat, rows) for rows in basis])
        return SECOND_ORDER * LAMBDA * squares.sqrt().view(output.shape)

    def _squares(self, flat: Tensor, basis: Tensor) -> Tensor:
        derivatives = torch.autograd.grad(
            flat, self.slots, basis, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        total = torch.zeros(len(basis), dtype=torch.float64)
        for derivative, error in zip(derivatives, self.errors, strict=True):
            if derivative is not None:
                total += derivative.square().flatten(1) @ error.square().flatten()
        return total


@dataclass(frozen=True)
class DecodeStep:
    """One request's rows through the layers of a checkpoint.

    Args:
        config: config.json.
        weights: of the checkpoint, float64, by name.
        latent_eps: eps of q_a_layernorm and kv_a_layernorm.
        rotations: complex128 [rows, rope / 2], as the engine has them.
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]
    latent_eps: float
    rotations: Tensor
    slots: Slots = field(default_factory=Slots)

    def embedding(self, tokens: list[int]) -> Tensor:
        return self._weight("model.embed_tokens")[tokens]

    def layer(self, i: int, x: Tensor, past: Tensor, selection: Tensor) -> Tensor:
        """Residual stream [rows, hidden] -> the same after layer i.

        Args:
            past: [tokens, latent + rope], the layer's cache before the step.
            selection: int64 [rows, k], the keys that each row attends to; -1 is none.
        """
        name = f"model.layers.{i}"
        normed = self._norm(f"{name}.input_layernorm", x)
        attended = self._attention(f"{name}.self_attn", normed, past, selection)
        x = self.slots.relative(x + attended, 1)
        normed = self._norm(f"{name}.post_attention_layernorm", x)
        dense = self.config["mlp_layer_types"][i] == "dense"
        out = (self._mlp if dense else self._moe)(f"{name}.mlp", normed)
        return self.slots.relative(x + out, 1)

    def _weight(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self.slots.product(x, self._weight(name).T)

    def _norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        """The root halves the error of the sum of squares; with eps, the root and the division
        that is the factor's, and the products with it and with the weight are each element's."""
        size, eps = x.shape[-1], self.config["rms_norm_eps"] if eps is None else eps
        root = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        factor = self.slots.factor(size / 4 + 8, len(x), 1) * self.slots.constant(f"norm {size}")
        return self.slots.relative(x * root * factor * self._weight(name), 3)

    def _rotate(self, x: Tensor) -> Tensor:
        """[rows, ..., rope]; an element is the sum of two products."""
        turns = self.rotations.view(len(x), *[1] * (x.dim() - 2), -1)
        a, b, cos, sin = x[..., 0::2], x[..., 1::2], turns.real, turns.imag
        parts = torch.stack([a * cos, -b * sin]), torch.stack([a * sin, b * cos])
        exact, magnitude = (
            torch.stack([total.sum(0) for total in pair], dim=-1).flatten(-2)
            for pair in (parts, [part.abs() for part in parts])
        )
        return self.slots.rounded(exact, 2, magnitude)

    def _attention(self, name: str, x: Tensor, past: Tensor, selection: Tensor) -> Tensor:
        c, rank = self.config, self.config["kv_lora_rank"]
        projected = self._linear(f"{name}.kv_a_proj_with_mqa", x)
        latent = self._norm(f"{name}.kv_a_layernorm", projected[:, :rank], self.latent_eps)
        keys = torch.cat([past, torch.cat([latent, self._rotate(projected[:, rank:])], dim=1)])
        by_head = self._weight(f"{name}.kv_b_proj").view(c["num_attention_heads"], -1, rank)
        w_uk, w_uv = by_head.split([c["qk_nope_head_dim"], c["v_head_dim"]], dim=1)
        q = self._queries(name, x, w_uk)
        out = self._attend(q, keys[selection.clamp(min=0)], selection < 0)
        values = self.slots.product(out.transpose(0, 1), w_uv.transpose(1, 2))
        return self._linear(f"{name}.o_proj", values.transpose(0, 1).flatten(1))

    def _queries(self, name: str, x: Tensor, w_uk: Tensor) -> Tensor:
        """[rows, heads, latent + rope]. The built-in modules round after q_b_proj and again after
        W_UK. The target rounds the product of the two, and after its product with the row. The
        former error is the same in all rows, so that the squares of their sums are up to `rows`
        times the sum of their squares."""
        c = self.config
        q_a = self._linear(f"{name}.q_a_proj", x)
        qr = self._norm(f"{name}.q_a_layernorm", q_a, self.latent_eps)
        by_head = self._weight(f"{name}.q_b_proj").view(len(w_uk), -1, qr.shape[1])
        w_nope, w_rope = by_head.split([c["qk_nope_head_dim"], c["qk_rope_head_dim"]], dim=1)
        nope, rope = (self.slots.product(qr, w.transpose(1, 2)) for w in (w_nope, w_rope))
        folded = (w_nope.transpose(1, 2) @ w_uk).abs()
        absorbed = self.slots.product(nope, w_uk)
        absorbed = self.slots.rounded(absorbed, qr.shape[1] + 1 + len(x), qr.abs() @ folded)
        rotated = self._rotate(rope.transpose(0, 1))
        return torch.cat([absorbed.transpose(0, 1), rotated], dim=-1)

    def _attend(self, q: Tensor, keys: Tensor, absent: Tensor) -> Tensor:
        """q [rows, heads, width] over each row's keys [rows, k, width], absent bool [rows, k] ->
        [rows, heads, latent]. Each score is scaled and the largest subtracted; an exponential;
        and the sum of all weights and the division by it, which may be a product with a factor."""
        rows, heads, k = *q.shape[:2], keys.shape[1]
        scale = (self.config["qk_nope_head_dim"] + self.config["qk_rope_head_dim"]) ** -0.5
        scores = self.slots.product(q, keys.transpose(1, 2)) * scale * self.slots.constant("scale")
        largest = scores.abs().amax(-1, keepdim=True).expand_as(scores)
        scores = self.slots.rounded(scores, 2, 2 * largest)
        weights = scores.masked_fill(absent.unsqueeze(1), float("-inf")).softmax(-1)
        weights = self.slots.relative(weights, EXPONENTIAL + 2)
        weights = weights * self.slots.factor(k + EXPONENTIAL + 2, rows, heads, 1)
        return self.slots.product(weights, keys[..., : self.config["kv_lora_rank"]])

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        """SiLU takes an exponential, a sum and a division; then the product with `up`."""
        gate, up = self._linear(f"{name}.gate_proj", x), self._linear(f"{name}.up_proj", x)
        hidden = self.slots.relative(F.silu(gate) * up, EXPONENTIAL + 3)
        return self._linear(f"{name}.down_proj", hidden)

    def _moe(self, name: str, x: Tensor) -> Tensor:
        """A score may be 0.5 tanh + 0.5, so that its error is relative to 1. The weighted sum takes
        a product and a sum for each expert, and the sum with the shared one."""
        top_k = self.config["num_experts_per_tok"]
        scores = self._linear(f"{name}.gate", x).sigmoid()
        scores = self.slots.rounded(scores, EXPONENTIAL + 2, torch.ones_like(scores))
        bias = self.weights[f"{name}.gate.e_score_correction_bias"]
        chosen = (scores + bias).topk(top_k, dim=-1).indices
        won = scores.gather(1, chosen)
        share = won / won.sum(-1, keepdim=True) * self.config["routed_scaling_factor"]
        share = self.slots.relative(share, 2) * self.slots.factor(top_k + 2, len(x), 1)
        outs = [
            torch.cat([self._mlp(f"{name}.experts.{e}", x[t : t + 1]) for e in experts])
            for t, experts in enumerate(chosen.tolist())
        ]
        terms = torch.stack(outs) * share.unsqueeze(2)
        total = terms.sum(1) + (shared := self._mlp(f"{name}.shared_experts", x))
        return self.slots.rounded(total, 2 * top_k + 1, terms.abs().sum(1) + shared.abs())
