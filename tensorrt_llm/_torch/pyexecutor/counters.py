"""What the step loop of one rank counts."""

from dataclasses import dataclass, field

from tensorrt_llm._torch.pyexecutor.launch_counter import LaunchCounts
from tensorrt_llm._torch.pyexecutor.messages import PathCounts, SpeculationStats
from tensorrt_llm._torch.pyexecutor.step import StepPaths


@dataclass
class Counters:
    """Totals since start, and of the last step its duration and what its launch took."""

    iterations: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    nan_failures: int = 0
    latency_ms: float = 0.0
    launch: LaunchCounts | None = None
    reported_at: float = 0.0  # perf_counter seconds
    speculation: SpeculationStats | None = None
    generation_steps: dict[str, PathCounts] = field(default_factory=dict)

    def count_paths(self, paths: StepPaths | None) -> None:
        """Count a launched step for each part that tells its path; None for a step with contexts.

        Raises:
            ValueError: a path that does not exist.
        """
        for part, path in paths._asdict().items() if paths else ():
            if path is not None:
                before = self.generation_steps.get(part, PathCounts())
                self.generation_steps[part] = before.taken(path)
