"""What the tiny GLM is trained on: next tokens, the draft chain, the indexers, expert balance."""

import torch
from evaluate import Batch
from model import BIAS_RANGE, DraftChain, TinyGlm, index_scores, select
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaTopkRouter

DEPTH = 4  # steps of the draft chain that are trained
MTP_WEIGHT = 0.5
PROMPT_WEIGHT = 0.05  # prompts are mostly random: a little of their loss teaches the format


class Watch:
    """Keeps what the backbone's attention layers saw and did in the last forward pass."""

    def __init__(self, model: TinyGlm) -> None:
        self.on = False
        self.weights: list[Tensor] = []  # per layer, averaged over heads [B, S, S]
        self.inputs: list[tuple] = []  # per full layer: indexer, hidden, q latent, rope
        self.groups: list[list[int]] = []  # per full layer: the layers that use its selection
        for i, layer in enumerate(model.backbone.model.layers):
            layer.self_attn.register_forward_hook(self.keep_weights)
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.register_forward_pre_hook(self.keep_inputs)
                self.groups.append([])
            self.groups[-1].append(i)

    def keep_weights(self, module: nn.Module, args: tuple, output: tuple) -> None:
        """Hook of an attention layer; output[1] is [B, heads, S, S]."""
        if self.on:
            self.weights.append(output[1].detach().mean(1))

    def keep_inputs(self, indexer: nn.Module, args: tuple) -> None:
        """Hook of an indexer: its inputs, cut off from the language model's own gradients."""
        if self.on:
            hidden, latent, rope = args[:3]
            self.inputs.append((indexer, hidden.detach(), latent.detach(), rope))

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """Per full layer: differentiable scores and the attention of its group, both [B, S, S]."""
        taken = [
            (index_scores(*inputs), torch.stack([self.weights[i] for i in group]).mean(0))
            for inputs, group in zip(self.inputs, self.groups, strict=True)
        ]
        self.weights, self.inputs = [], []
        return taken


class Balancer:
    """Loss-free expert balance: moves each correction bias a little towards equal load.

    The biases stay where GLM-5.2 has them, around 7 and 0.24 wide, so that rounding them shows.
    """

    def __init__(self, model: TinyGlm) -> None:
        self.gates = [m for m in model.modules() if isinstance(m, GlmMoeDsaTopkRouter)]
        self.loads = [torch.zeros_like(gate.e_score_correction_bias) for gate in self.gates]
        self.valid: Tensor | None = None  # [B * S], set for each training batch
        for gate, load in zip(self.gates, self.loads, strict=True):
            gate.register_forward_hook(lambda _, args, out, load=load: self.count(load, out[2]))

    def count(self, load: Tensor, chosen: Tensor) -> None:
        """Adds one forward pass; chosen [B * S, top]."""
        if self.valid is not None:
            experts = torch.arange(len(load), device=load.device)
            load += ((chosen[..., None] == experts) & self.valid[:, None, None]).sum((0, 1))

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """Applies the counted loads and forgets them."""
        for gate, load in zip(self.gates, self.loads, strict=True):
            gate.e_score_correction_bias += rate * torch.sign(load.mean() - load)
            gate.e_score_correction_bias.clamp_(*BIAS_RANGE)
            load.zero_()
        self.valid = None


def weighted(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy under weights; logits [B, S, vocab], targets and weights [B, S]."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def draft_losses(model: TinyGlm, batch: Batch, chain: DraftChain, weights: Tensor) -> Tensor:
    """Mean loss over the chain's steps, each fed with the true tokens."""
    losses = []
    for step in range(DEPTH):
        logits = chain.step(model.embed(batch.ids, step + 1))[:, : -step - 2]
        counted = weights[:, 1 : -step - 1] * batch.valid()[:, step + 2 :]
        losses.append(weighted(logits, batch.ids[:, step + 2 :], counted))
    return torch.stack(losses).mean()


def index_loss(scores: Tensor, attended: Tensor, valid: Tensor, topk: int) -> Tensor:
    """KL from the attention to the softmax of the scores over the selected keys, mean over rows.

    scores, attended [B, S, S]; valid [B, S] marks the rows that count.
    """
    allowed = select(scores.detach(), topk)
    guess = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).log_softmax(-1)
    target = attended * allowed
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
    kl = (torch.xlogy(target, target) - target * guess).sum(-1)
    return (kl * valid).sum() / valid.sum()


def total_loss(
    model: TinyGlm, batch: Batch, topk: int, watch: Watch, balancer: Balancer, whole: bool
) -> dict[str, Tensor]:
    """The parts of the loss, to be added: `lm`, and when `whole` also `mtp` and `index`."""
    valid, answers = batch.valid(), batch.answers()
    weights = torch.where(answers, 1.0, PROMPT_WEIGHT) * valid
    balancer.valid, watch.on = valid.flatten(), whole
    hidden = model(batch.ids)
    logits = model.backbone.lm_head(hidden[:, :-1])
    losses = {"lm": weighted(logits, batch.ids[:, 1:], weights[:, 1:])}
    if whole:
        chain = DraftChain(model, hidden, topk)
        losses["mtp"] = MTP_WEIGHT * draft_losses(model, batch, chain, weights)
        pairs = watch.take() + [(chain.scores, torch.stack(chain.weights).mean(0))]
        losses["index"] = torch.stack([index_loss(s, a, valid, topk) for s, a in pairs]).mean()
    watch.on = False
    return losses
