"""SwiGLU feed-forward block: the dense layers and the shared expert."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from tensorrt_llm._torch.distributed import AllReduce
from tensorrt_llm._torch.modules.linear import empty_parameter, shard_range
from tensorrt_llm._torch.modules.weight_spec import WeightSpec
from tensorrt_llm.mapping import Mapping


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x), split over all tensor-parallel ranks along the intermediate size.

    The partial sums are reduced over the whole TP group, so the split is over the whole group too,
    also when it spans nodes: a split capped at the GPUs of one node would count each partial sum
    tp / mlp_tp times.

    Args:
        reduce_output: False returns this rank's partial sum.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        mapping: Mapping,
        reduce_output: bool = True,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.part = shard_range(intermediate_size, mapping, "intermediate_size")
        self.local_size = self.part[1] - self.part[0]
        self.gate_up_proj = empty_parameter((2 * self.local_size, hidden_size), dtype, device)
        self.down_proj = empty_parameter((hidden_size, self.local_size), dtype, device)
        self.reduce = AllReduce(mapping) if reduce_output else None

    def weight_specs(self, name: str) -> Iterator[WeightSpec]:
        yield from gated_mlp_specs(
            name, self.gate_up_proj.data, self.down_proj.data, self.intermediate_size, self.part
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden_size] -> [tokens, hidden_size]."""
        y = F.linear(silu_and_mul(F.linear(x, self.gate_up_proj)), self.down_proj)
        return y if self.reduce is None else self.reduce(y)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2n] as [gate | up] -> silu(gate) * up, [..., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gated_mlp_specs(
    name: str,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    intermediate_size: int,
    part: tuple[int, int],
) -> Iterator[WeightSpec]:
    """Specs of one SwiGLU block whose gate rows are stored before its up rows.

    Args:
        gate_up: [2 * local, hidden], down: [hidden, local], the parameters (or one expert's views).
        part: this rank's (start, stop) of the intermediate size.
    """
    hidden, local = down.shape
    shape = (intermediate_size, hidden)
    yield WeightSpec(
        f"{name}.gate_proj.weight", shape, gate_up[:local], rows=part, quantizable=True
    )
    yield WeightSpec(f"{name}.up_proj.weight", shape, gate_up[local:], rows=part, quantizable=True)
    yield WeightSpec(
        f"{name}.down_proj.weight", (hidden, intermediate_size), down, cols=part, quantizable=True
    )
