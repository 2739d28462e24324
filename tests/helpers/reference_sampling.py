"""Filtered distributions as transformers computes them."""

import torch
from transformers.generation import logits_process as hf


def hf_probabilities(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """float64 [vocab] after transformers' warpers in their order."""
    scores = hf.TemperatureLogitsWarper(temperature)(None, logits.double())
    if top_k:
        scores = hf.TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = hf.TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = hf.MinPLogitsWarper(min_p)(None, scores)
    return scores.softmax(-1)[0]
