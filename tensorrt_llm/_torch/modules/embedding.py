"""Token embedding, a full copy on every rank, and the LM head, a slice of the vocabulary on
each."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from tensorrt_llm._torch.distributed import allgather
from tensorrt_llm._torch.modules.linear import empty_parameter, shard_range
from tensorrt_llm._torch.modules.weight_spec import WeightSpec
from tensorrt_llm.mapping import Mapping


class Embedding(nn.Module):
    """Rows of `weight` [vocab_size, hidden_size] by token id."""

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = empty_parameter((vocab_size, hidden_size), dtype, device)

    def weight_specs(self, name: str) -> Iterator[WeightSpec]:
        yield WeightSpec(f"{name}.weight", tuple(self.weight.shape), self.weight.data)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [tokens] -> [tokens, hidden_size]."""
        return F.embedding(input_ids, self.weight)


class LMHead(nn.Module):
    """Logits over the vocabulary; each rank computes its slice and gathers the others'."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        mapping: Mapping,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.mapping = mapping
        self.full_shape = (vocab_size, hidden_size)
        self.rows = shard_range(vocab_size, mapping, "vocab_size")
        self.weight = empty_parameter((self.rows[1] - self.rows[0], hidden_size), dtype, device)

    def weight_specs(self, name: str) -> Iterator[WeightSpec]:
        yield WeightSpec(f"{name}.weight", self.full_shape, self.weight.data, rows=self.rows)

    def local_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> [rows, vocab_size / tp_size], this rank's slice in its dtype."""
        return F.linear(hidden_states, self.weight)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> fp32 [rows, vocab_size], the same on all ranks."""
        return allgather(self.local_logits(hidden_states), self.mapping).float()
