"""Arithmetic that several records share, and how far kernels may be from it.

References keep the activation dtype of their inputs: with bf16 they round where the kernels do,
with fp32 nothing is rounded.
"""

import math

import torch
import torch.nn.functional as F

from tensorrt_llm._torch.modeling_v2.catalog._op import assert_within_ulp
from tensorrt_llm._torch.modeling_v2.catalog.rms_norm import (
    rms_norm_rounded_once as rms_norm_rounded_once,
)
from tensorrt_llm._torch.modeling_v2.catalog.silu_and_mul import (
    swiglu_rounded_once as swiglu_rounded_once,
)


def project(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [rows, inputs] @ weight [outputs, inputs].T, rounded once to `out_dtype` (x's if None).

    bf16 sums are formed in fp64, so that their bits do not depend on an order; fp32 ones in fp32,
    as the modules form them.
    """
    if x.dtype == torch.float32:
        return F.linear(x, weight).to(out_dtype or x.dtype)
    return F.linear(x.double(), weight.double()).float().to(out_dtype or x.dtype)


def rows_or_zeros(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """table[ids] [*ids.shape, width], bit copies; rows of +0 for ids outside of [0, rows of table).

    Args:
        table: [rows, width].
        ids: int32 or int64, any shape.
    """
    outside = (ids < 0) | (ids >= table.shape[0])
    return F.embedding(ids.masked_fill(outside, 0), table).masked_fill(outside.unsqueeze(-1), 0)


def noaux_tc(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, routed_scaling_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3 routing in one group.

    score = 0.5 tanh(logit / 2) + 0.5 and choice = score + bias in fp32; the `top_k` largest choices
    win, in falling order, equal ones by rising id. The weight of a winner is
    score * routed_scaling_factor / (sum of the winners' scores + 1e-20), formed in fp64 and rounded
    to fp32. Scores of logits below about -17 are exactly 0.

    Args:
        logits: fp32 [tokens, experts].
        bias: fp32 [experts], e_score_correction_bias.

    Returns:
        (weights fp32 [tokens, top_k], expert ids int64 [tokens, top_k]).
    """
    scores = 0.5 * torch.tanh(0.5 * logits) + 0.5
    order = (scores + bias).sort(dim=-1, descending=True, stable=True).indices
    ids = order[:, :top_k]
    won = scores.gather(1, ids).double()
    weights = won * routed_scaling_factor / (won.sum(-1, keepdim=True) + 1e-20)
    return weights.float(), ids


def assert_rounded_once(out: torch.Tensor, ref: torch.Tensor) -> None:
    """Both are the same value up to fp32 summation, each rounded once.

    Such values differ by at most the spacing there, which is at most 1 ulp of the row's largest
    magnitude, and only where a rounding boundary lies between them. Summation errors are below
    2^-16 of the result (n <= 16384 terms of random sign, see `assert_summed_in_fp32`) and the
    spacing is at least 2^-8 of it, so below 1 % are hit: an rms of at most 0.1 ulp.
    """
    assert_within_ulp(out, ref, element_ulp=1, rms_ulp=0.1)


def assert_chained(out: torch.Tensor, ref: torch.Tensor) -> None:
    """Like `assert_rounded_once` after one or two more roundings inside of the chain.

    Up to 1 % of the inner values are off by up to 2 ulp of their own (2^-7 relative each). The sums
    over them are then off by at most 0.2 ulp rms before the last rounding, whose boundaries turn a
    difference of d ulp into one of sqrt(d) ulp rms: 0.5. Of one element four times 0.2 come on top
    of the one spacing: 2.
    """
    assert_within_ulp(out, ref, element_ulp=2, rms_ulp=0.5)


def assert_summed_in_fp32(out: torch.Tensor, ref: torch.Tensor, terms: int) -> None:
    """Both are fp32 sums of `terms` products of random sign, in any order.

    The longest chain adds one by one: its k-th partial sum is sqrt(k) of one term, each addition is
    off by 2^-24 / sqrt(3) of that, so the sum by 2^-24 sqrt(terms / 6) of itself (all rms), and two
    such sums by sqrt(terms / 12) ulp from each other. Single elements: six standard deviations.
    """
    rms = math.sqrt(terms / 12)
    assert_within_ulp(out, ref, element_ulp=6 * rms, rms_ulp=rms)
