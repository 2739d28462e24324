"""Between the server process and the rank processes: requests in, responses out."""

from tensorrt_llm.executor.errors import EngineDeadError
from tensorrt_llm.executor.executor import GenerationExecutor

__all__ = ["EngineDeadError", "GenerationExecutor"]
