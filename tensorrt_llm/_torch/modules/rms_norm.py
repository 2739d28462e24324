"""RMSNorm, with the residual add that comes before it, and the indexer's LayerNorm."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from tensorrt_llm._torch.modules.linear import empty_parameter
from tensorrt_llm._torch.modules.weight_spec import WeightSpec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in fp32."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter((hidden_size,), dtype, device)

    def weight_specs(self, name: str) -> Iterator[WeightSpec]:
        yield WeightSpec(f"{name}.weight", tuple(self.weight.shape), self.weight.data, init="norm")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); the sum is rounded to the activation dtype once."""
        total = x + residual
        return rms_norm(total, self.weight, self.eps), total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The normalised value is rounded to x's dtype before the weight multiplies it, as transformers does."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


class LayerNorm(nn.Module):
    """LayerNorm with weight and bias; the indexer's key norm (eps 1e-6)."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter((hidden_size,), dtype, device)
        self.bias = empty_parameter((hidden_size,), dtype, device)

    def weight_specs(self, name: str) -> Iterator[WeightSpec]:
        yield WeightSpec(f"{name}.weight", tuple(self.weight.shape), self.weight.data, init="norm")
        yield WeightSpec(f"{name}.bias", tuple(self.bias.shape), self.bias.data, init="zero")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> same shape and dtype."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
