"""The engine under test, `LLM`, and what the benchmark needs of any engine."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tensorrt_llm import LLM
from tensorrt_llm.commands.benchmark.memory import child_pids, peak_of
from tensorrt_llm.commands.benchmark.timing import Arrival, RequestTiming
from tensorrt_llm.commands.benchmark.workload import BenchRequest
from tensorrt_llm.sampling_params import SamplingParams


@dataclass(frozen=True)
class Run:
    """What an engine made of one request, and when."""

    timing: RequestTiming
    token_ids: list[int]


class Engine(Protocol):
    """Runs one request at a time: greedy, the full output length, eos ignored."""

    def run(self, request: BenchRequest) -> Run: ...

    def peak_rss_bytes(self) -> int:
        """The most that its largest process has had in memory."""
        ...


class OwnEngine:
    """`LLM` with streaming, as its user sees it: the clock runs in the user's process.

    Args:
        llm_args: arguments of `LLM`.

    Raises:
        ValueError: an argument that `LLM` refuses.
        EngineDeadError: a rank failed to start.
    """

    def __init__(self, llm_args: Mapping[str, Any]) -> None:
        others = child_pids()
        self.llm = LLM(**llm_args)
        self._ranks = child_pids() - others

    def run(self, request: BenchRequest) -> Run:
        return asyncio.run(self._stream(request))

    def peak_rss_bytes(self) -> int:
        return peak_of(self._ranks)

    def close(self) -> None:
        self.llm.shutdown()

    async def _stream(self, request: BenchRequest) -> Run:
        params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True, detokenize=False)
        arrivals: list[Arrival] = []
        prompt, received, start = request.prompt_token_ids, 0, time.perf_counter()
        output = self.llm.generate_async(prompt, params, streaming=True)
        async for _ in output:
            now, length = time.perf_counter(), output.outputs[0].length
            if length > received:
                arrivals.append(Arrival(now - start, length - received))
                received = length
        if output.error is not None:
            raise RuntimeError(f"the request failed: {output.error}")
        return Run(RequestTiming(len(prompt), tuple(arrivals)), list(output.outputs[0].token_ids))
