"""Random arguments of cells. A cell may bring a "geometry" and a "dtype" of its own."""

import torch

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell

from ..geometry import GLM_5_2_TP16, Geometry


def geometry_of(cell: Cell) -> Geometry:
    return cell.spec.get("geometry", GLM_5_2_TP16)


def dtype_of(cell: Cell) -> torch.dtype:
    """Activation dtype."""
    return cell.spec.get("dtype", torch.bfloat16)


class Draw:
    """Random tensors of one cell: on one device, from one generator."""

    def __init__(self, device: torch.device, generator: torch.Generator) -> None:
        self.device, self.generator = device, generator

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.float32, std: float = 1.0, mean: float = 0.0
    ) -> torch.Tensor:
        x = torch.empty(shape, dtype=dtype, device=self.device)
        return x.normal_(mean, std, generator=self.generator)

    def weight(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Of a projection [..., outputs, inputs] that keeps the size of what it projects."""
        return self.normal(*shape, dtype=dtype, std=shape[-1] ** -0.5)

    def norm_weight(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        return self.normal(width, dtype=dtype, std=0.1, mean=1.0)

    def integers(
        self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        """Of [low, high)."""
        return torch.randint(
            low, high, shape, dtype=dtype, device=self.device, generator=self.generator
        )
