"""The engine under test, `LLM`, and what the benchmark asks of any engine."""

import time
from dataclasses import dataclass
from typing import Protocol

from tensorrt_llm.commands.benchmark.memory import child_pids, peak_rss_bytes
from tensorrt_llm.commands.benchmark.timing import Arrival, RequestTiming
from tensorrt_llm.commands.benchmark.workload import BenchRequest
from tensorrt_llm.llmapi import LLM, LlmArgs, SamplingParams, SpeculationStats


class BenchError(RuntimeError):
    """A request failed, or the engine did."""


@dataclass(frozen=True)
class Run:
    """What an engine made of one request, when, and how its drafts fared if it drafts."""

    timing: RequestTiming
    token_ids: list[int]
    speculation: SpeculationStats | None = None


class Engine(Protocol):
    """Runs one request at a time: greedy, to the full output length whatever the tokens are."""

    def run(self, request: BenchRequest) -> Run:
        """Generate and wait. Raises BenchError when that fails."""
        ...

    def peak_rss_bytes(self) -> int | None:
        """The most that its largest process has held so far; None where that is unknown."""
        ...

    def close(self) -> None:
        """End its processes."""
        ...


class OwnEngine:
    """`LLM`, streaming; the clock runs where the user is, not in the ranks.

    Raises:
        ValueError: arguments that do not fit the checkpoint.
        EngineDeadError: a rank failed to start.
    """

    def __init__(self, args: LlmArgs) -> None:
        others = child_pids()
        self.llm = LLM.from_args(args)
        self._ranks = child_pids() - others

    def run(self, request: BenchRequest) -> Run:
        prompt, count = request.prompt_token_ids, request.output_tokens
        params = SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False)
        arrivals: list[Arrival] = []
        start = time.perf_counter()
        output = self.llm.generate_async(prompt, params, streaming=True)
        completion = output.outputs[0]
        for _ in output:
            now = time.perf_counter() - start
            arrivals.append(Arrival(now, len(completion.token_ids_diff)))
        if completion.finish_reason != "length":
            raise BenchError(f"a request ended with {completion.finish_reason}: {output.error}")
        return Run(
            RequestTiming(len(prompt), tuple(arrivals)),
            list(completion.token_ids),
            completion.speculation,
        )

    def peak_rss_bytes(self) -> int | None:
        """As above; ranks that were launched by MPI or Slurm are not this process's children."""
        return max(map(peak_rss_bytes, self._ranks), default=None)

    def close(self) -> None:
        self.llm.shutdown()
