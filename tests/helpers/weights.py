"""Filling modules by their loading plan, as the checkpoint loader does."""

from collections.abc import Iterable

import torch

from tensorrt_llm._torch.modules.weight_spec import WeightSpec


def random_weights(specs: Iterable[WeightSpec], seed: int = 0) -> dict[str, torch.Tensor]:
    """Full fp32 tensors by name, matrices scaled by their fan-in."""
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randn(spec.shape, generator=generator) / spec.shape[-1] ** 0.5
        for spec in specs
    }


def fill(specs: Iterable[WeightSpec], weights: dict[str, torch.Tensor]) -> None:
    """Give each parameter the part of the full tensor that its spec asks for."""
    for spec in specs:
        full = weights[spec.name]
        assert tuple(full.shape) == spec.shape, spec.name
        part = full[slice(*(spec.rows or (None,)))]
        spec.target.copy_(part if full.ndim == 1 else part[:, slice(*(spec.cols or (None,)))])
