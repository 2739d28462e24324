"""RMSNorm, with the residual add that comes before it, and the indexer's LayerNorm."""

import functools
from collections.abc import Iterator
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

from tensorrt_llm._torch.modules.linear import empty_parameter
from tensorrt_llm._torch.modules.weight_spec import WeightSpec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in fp32.

    On CUDA in half precision it is flashinfer's kernel where flashinfer is installed.
    """

    def __init__(
        self, hidden_size: int, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter((hidden_size,), dtype, device)
        half_on_cuda = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
        self.kernels = _flashinfer_norm() if half_on_cuda else None

    def weight_specs(self, name: str) -> Iterator[WeightSpec]:
        yield WeightSpec(f"{name}.weight", tuple(self.weight.shape), self.weight.data, init="norm")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> same shape and dtype."""
        if self.kernels is not None:
            return self.kernels.rmsnorm(x.contiguous(), self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual), both [tokens, hidden_size].

        flashinfer writes them over x and residual, and norms the sum before it is rounded; the
        plain form rounds the sum first.
        """
        if self.kernels is not None:
            self.kernels.fused_add_rmsnorm(x, residual, self.weight, self.eps)
            return x, residual
        total = x + residual
        return rms_norm(total, self.weight, self.eps), total


@functools.cache
def _flashinfer_norm() -> ModuleType | None:
    """flashinfer's norm kernels, or None where the package is not installed."""
    try:
        import flashinfer.norm
    except ImportError:
        return None
    return flashinfer.norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The normalised value is rounded to x's dtype before the weight multiplies it, as in
    transformers."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps) if x.is_cuda else _on_cpu(x, weight, eps)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _on_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / (sqrt(|x|^2 + n eps) / sqrt(n)) * weight: for few tokens half the time of F.rms_norm,
    which has no kernel of its own on the CPU."""
    root, floor = _constants(x.shape[-1], eps)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x / length.hypot_(floor).div_(root)).mul_(weight)


@functools.cache
def _constants(n: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """sqrt(n) and sqrt(n eps); as tensors, since a Python number is converted at each use."""
    return torch.tensor(n).sqrt(), torch.tensor(n * eps).sqrt()


class LayerNorm(nn.Module):
    """LayerNorm with weight and bias; the indexer's key norm (eps 1e-6)."""

    def __init__(
        self, hidden_size: int, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
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
