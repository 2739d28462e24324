"""A compact TensorRT-LLM tree that serves GLM-5.2 to one user at the lowest latency."""

from typing import TYPE_CHECKING, Any

from tensorrt_llm._conflict import refuse_beside_nvidia
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.version import __version__

if TYPE_CHECKING:
    from tensorrt_llm.llmapi import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]

refuse_beside_nvidia()


def __getattr__(name: str) -> Any:
    """`tensorrt_llm.LLM` without importing the engine for people who only want a leaf module."""
    if name == "LLM":
        from tensorrt_llm.llmapi import LLM

        return LLM
    raise AttributeError(f"module 'tensorrt_llm' has no attribute {name!r}")
