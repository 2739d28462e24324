"""Mixture of experts: routing and the experts' SwiGLU blocks."""

from tensorrt_llm._torch.modules.fused_moe.fused_moe import FusedMoE
from tensorrt_llm._torch.modules.fused_moe.routing import DeepseekV3Gate

__all__ = ["DeepseekV3Gate", "FusedMoE"]
