"""The routed experts, each rank holding a slice of every one."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from tensorrt_llm._torch.modules.gated_mlp import gated_mlp_specs, silu_and_mul
from tensorrt_llm._torch.modules.linear import empty_parameter, shard_range
from tensorrt_llm._torch.modules.weight_spec import WeightSpec
from tensorrt_llm.mapping import Mapping

# On CUDA, up to this many tokens take the path without a host decision, which a decode graph can
# capture.
MAX_GRAPH_TOKENS = 128
# That path gathers the chosen experts' weights, so many tokens at a time. It pays for few tokens
# anywhere, such as the rows of a verify step.
GATHER_TOKENS = 8
# In fp32 on the CPU, up to this many multiplications run all experts in less time than the calls
# take that run the chosen ones. In bf16 a CPU's multiplications may be slower than its calls.
ALL_EXPERTS_WORK = 1 << 22


class FusedMoE(nn.Module):
    """sum_k weight_k * down_k(silu(gate_k x) * up_k x), without the reduction over the ranks.

    Parameters (local = moe_intermediate_size / tp_size):
        gate_up: [experts, 2 * local, hidden], gate rows before up rows.
        down: [experts, hidden, local].
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        mapping: Mapping,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.intermediate_size = intermediate_size
        self.part = shard_range(intermediate_size, mapping, "moe_intermediate_size")
        local = self.part[1] - self.part[0]
        self.gate_up = empty_parameter((num_experts, 2 * local, hidden_size), dtype, device)
        self.down = empty_parameter((num_experts, hidden_size, local), dtype, device)

    def weight_specs(self, name: str) -> Iterator[WeightSpec]:
        for e in range(self.down.shape[0]):
            yield from gated_mlp_specs(
                f"{name}.{e}",
                self.gate_up.data[e],
                self.down.data[e],
                self.intermediate_size,
                self.part,
            )

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """This rank's partial sum.

        Args:
            x: [tokens, hidden].
            weights: fp32 [tokens, top_k].
            ids: int64 [tokens, top_k], expert ids.

        Returns:
            [tokens, hidden] in x's dtype; the sum over k is in fp32.
        """
        tokens = x.shape[0]
        if tokens == 1 and not x.is_cuda:
            return self._one_token(x, weights, ids)
        if not x.is_cuda and x.dtype == torch.float32 and self._is_small(tokens):
            return self._all_experts(x, weights, ids)
        if tokens <= GATHER_TOKENS:
            return self._by_token(x, weights, ids)
        if tokens > MAX_GRAPH_TOKENS or not x.is_cuda:
            return self._by_expert(x, weights, ids)
        tiles = zip(*(t.split(GATHER_TOKENS) for t in (x, weights, ids)), strict=True)
        return torch.cat([self._by_token(*tile) for tile in tiles])

    def _one_token(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The CPU's decode step: reads the chosen experts in place."""
        out = [
            F.linear(silu_and_mul(F.linear(x, self.gate_up[expert])), self.down[expert])
            for expert in ids[0].tolist()
        ]
        return _combine(torch.stack(out, dim=1), weights)

    def _is_small(self, tokens: int) -> bool:
        return tokens * (self.gate_up.numel() + self.down.numel()) <= ALL_EXPERTS_WORK

    def _all_experts(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Every expert on every token; those that a token did not choose weigh nothing."""
        experts, hidden_size, _ = self.down.shape
        gate_up = F.linear(x, self.gate_up.view(-1, hidden_size))
        hidden = silu_and_mul(gate_up.view(x.shape[0], experts, -1))
        out = torch.bmm(hidden.transpose(0, 1), self.down.transpose(1, 2)).transpose(0, 1)
        return _combine(out, weights.new_zeros(x.shape[0], experts).scatter_(1, ids, weights))

    def _by_token(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        tokens, top_k = ids.shape
        flat = ids.flatten()
        rows = x.unsqueeze(1).expand(-1, top_k, -1).reshape(tokens * top_k, -1, 1)
        hidden = silu_and_mul(torch.bmm(self.gate_up.index_select(0, flat), rows).squeeze(-1))
        out = torch.bmm(self.down.index_select(0, flat), hidden.unsqueeze(-1))
        return _combine(out.view(tokens, top_k, -1), weights)

    def _by_expert(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        tokens, top_k = ids.shape
        order = ids.flatten().argsort(stable=True)
        out = x.new_empty(tokens * top_k, x.shape[1])
        start = 0
        for expert, count in enumerate(
            ids.flatten().bincount(minlength=self.down.shape[0]).tolist()
        ):
            if count:
                rows = order[start : start + count]
                hidden = silu_and_mul(F.linear(x[rows // top_k], self.gate_up[expert]))
                out[rows] = F.linear(hidden, self.down[expert])
                start += count
        return _combine(out.view(tokens, top_k, -1), weights)


def _combine(out: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """out [tokens, n, hidden], weights fp32 [tokens, n] -> their weighted sum, added in fp32."""
    return torch.bmm(weights.unsqueeze(1), out.float()).squeeze(1).to(out.dtype)
