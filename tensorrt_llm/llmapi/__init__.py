"""The LLM API: `LLM` and what goes in and out of it."""

from tensorrt_llm._torch.pyexecutor.messages import FinishReason, Logprob, SpeculationStats
from tensorrt_llm.executor import EngineDeadError
from tensorrt_llm.llmapi.config_file import llm_args_from_cli_and_yaml
from tensorrt_llm.llmapi.errors import RequestError
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.llm_args import CudaGraphConfig, KvCacheConfig, LlmArgs
from tensorrt_llm.llmapi.request_output import CompletionOutput, RequestOutput
from tensorrt_llm.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "CudaGraphConfig",
    "EngineDeadError",
    "FinishReason",
    "KvCacheConfig",
    "LlmArgs",
    "Logprob",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SpeculationStats",
    "llm_args_from_cli_and_yaml",
]
