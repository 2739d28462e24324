"""The router: sigmoid scores, a correction bias that only chooses, normalised weights
(noaux_tc)."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from tensorrt_llm._torch.modules.linear import empty_parameter
from tensorrt_llm._torch.modules.weight_spec import WeightSpec


class DeepseekV3Gate(nn.Module):
    """Choose `top_k` experts per token.

    All of it is fp32, also when the config lacks `moe_router_dtype`: the correction bias lies near
    7 with differences that bf16 would erase, which reroutes almost every token.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        routed_scaling_factor: float,
        norm_topk_prob: bool,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.top_k, self.scale, self.normalise = top_k, routed_scaling_factor, norm_topk_prob
        self.weight = empty_parameter((num_experts, hidden_size), torch.float32, device)
        self.e_score_correction_bias = empty_parameter((num_experts,), torch.float32, device)

    def weight_specs(self, name: str) -> Iterator[WeightSpec]:
        yield WeightSpec(f"{name}.weight", tuple(self.weight.shape), self.weight.data)
        bias = self.e_score_correction_bias
        yield WeightSpec(
            f"{name}.e_score_correction_bias",
            tuple(bias.shape),
            bias.data,
            exact_fp32=True,
            init="router_bias",
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden] -> (weights fp32 [tokens, top_k], expert ids int64 [tokens,
        top_k])."""
        scores = F.linear(x.float(), self.weight).sigmoid()
        ids = (scores + self.e_score_correction_bias).topk(self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, ids)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, ids
