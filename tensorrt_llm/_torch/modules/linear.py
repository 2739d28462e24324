"""Matrix multiplication with a weight that may be split over the tensor-parallel ranks."""

from collections.abc import Iterator
from enum import Enum

import torch
import torch.nn.functional as F
from torch import nn

from tensorrt_llm._torch.distributed import AllReduce
from tensorrt_llm._torch.modules.weight_spec import WeightSpec
from tensorrt_llm.mapping import Mapping


class TensorParallelMode(Enum):
    """COLUMN splits the outputs, ROW the inputs (partial sums), NONE keeps a full copy on each
    rank."""

    NONE = "none"
    COLUMN = "column"
    ROW = "row"


def shard_range(size: int, mapping: Mapping, what: str) -> tuple[int, int]:
    """This rank's (start, stop) of `size` split evenly; ValueError names `what` when it does not
    divide."""
    if size % mapping.tp_size:
        raise ValueError(f"{what} is {size}, which tp_size {mapping.tp_size} does not divide")
    part = size // mapping.tp_size
    return mapping.tp_rank * part, (mapping.tp_rank + 1) * part


class Linear(nn.Module):
    """y = x W^T with W [out_features, in_features] (this rank's part of it).

    Args:
        reduce_output: ROW only; sum the partial results over the ranks here. False leaves that to
            the caller.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        mapping: Mapping,
        mode: TensorParallelMode = TensorParallelMode.NONE,
        reduce_output: bool = True,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.shape = (out_features, in_features)
        self.rows = self.cols = None
        if mode is TensorParallelMode.COLUMN:
            self.rows = shard_range(out_features, mapping, "out_features")
        elif mode is TensorParallelMode.ROW:
            self.cols = shard_range(in_features, mapping, "in_features")
        local = (_extent(self.rows, out_features), _extent(self.cols, in_features))
        self.weight = empty_parameter(local, dtype, device)
        self.reduce = (
            AllReduce(mapping) if mode is TensorParallelMode.ROW and reduce_output else None
        )

    def weight_specs(self, name: str) -> Iterator[WeightSpec]:
        """What to load: `name` is the hub name without `.weight`."""
        yield WeightSpec(
            f"{name}.weight",
            self.shape,
            self.weight.data,
            rows=self.rows,
            cols=self.cols,
            quantizable=True,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight)
        return y if self.reduce is None else self.reduce(y)


def empty_parameter(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """A parameter for inference: no gradient, values from the loader."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def _extent(part: tuple[int, int] | None, full: int) -> int:
    return full if part is None else part[1] - part[0]
