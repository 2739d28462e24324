"""Draws from logits in exact integer arithmetic.

A token's weight is its probability relative to the likeliest token's, as a fixed-point integer;
sums of integers do not depend on their order, so the outcome is the same on every rank, in any
batch and for any way in which a device adds up.
"""

import torch

NUM_FILTERS = 4  # columns of `filters`: temperature, top-k, top-p, min-p
WHOLE = 1 << 52  # the total of `probabilities`; float64 holds all of its parts exactly


def draw_tokens(
    logits: torch.Tensor, filters: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """One token per row, by inverse CDF over the filtered tokens in order of weight.

    Args:
        logits: fp32 [rows, vocab].
        filters: float64 [rows, 4], see `filtered_weights`.
        uniforms: float64 [rows], in [0, 1).

    Returns:
        int64 [rows]. A row that is not finite gives some valid id.
    """
    weights, order = filtered_weights(logits, filters)
    return order.gather(1, draw(weights, uniforms).unsqueeze(1)).squeeze(1)


def probabilities(logits: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    """Each row's distribution over the vocabulary, as int64 [rows, vocab] that sum to `WHOLE`.

    The weights are scaled in float64 and rounded down, and the likeliest token takes what is left.
    So a token is off by at most 1 / WHOLE and a relative 2**-51, and the likeliest one by the sum
    of that: 2**-34 + 2**-51 for 2**18 tokens. A row that is not finite has all on some valid id.

    Args:
        logits, filters: as for `draw_tokens`.
    """
    weights, order = filtered_weights(logits, filters)
    scale = WHOLE / weights.sum(-1, keepdim=True).clamp_(min=1).double()
    parts = (weights * scale).long()
    parts[:, 0] += WHOLE - parts.sum(-1)
    return torch.empty_like(parts).scatter_(1, order, parts)


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse CDF: int64 [rows, n] weights and float64 [rows] in [0, 1) -> int64 [rows], a place
    with a weight above 0, or some place of a row without any."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding may lift the product to the total itself, which would be one past the last token.
    target = torch.minimum((uniforms.unsqueeze(1) * total).long(), total - 1).clamp_(min=0)
    place = torch.searchsorted(cumulative, target, right=True)
    return place.clamp_(max=weights.shape[1] - 1).squeeze(1)


def filtered_weights(
    logits: torch.Tensor, filters: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights after temperature and filters, in descending order.

    Args:
        logits: fp32 [rows, vocab].
        filters: float64 [rows, 4]: temperature, top-k, top-p, min-p; neutral are vocab, 1 and 0.

    Returns:
        (weights int64 [rows, vocab], the tokens they belong to, int64 [rows, vocab]). A row sums
        to below 2**62, and to 0 if its logits are not finite.
    """
    temperature, top_k, top_p, min_p = filters.unsqueeze(2).unbind(1)
    weights, order = _weights(logits, temperature).sort(dim=-1, descending=True, stable=True)
    weights *= torch.arange(logits.shape[1], device=logits.device) < top_k
    ahead = weights.cumsum(-1) - weights  # of the tokens before each
    weights *= ahead < top_p * weights.sum(-1, keepdim=True)
    weights *= weights >= min_p * weights[:, :1]
    return weights, order


def _weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Probabilities over the row's largest as int64 [rows, vocab]; a row sums to below 2**62."""
    one = 1 << (62 - logits.shape[1].bit_length())
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).double().div_(temperature)
    return scaled.exp_().mul_(one).nan_to_num_(0.0).long()
