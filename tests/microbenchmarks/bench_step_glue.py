"""A decode step with the trim and without it, on one GPU: the numbers of docs/step_glue.md.

    python tests/microbenchmarks/bench_step_glue.py [--steps 300] [--draft_len 7]

GLM-5.2's per-rank shapes (8 layers, random weights), batch 1, whole steps as CUDA graphs, the
overlapped loop. Both builds live in one process and take turns.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.engine import make_engine  # noqa: E402
from helpers.glm_oracle import random_prompt  # noqa: E402
from helpers.glm_slice import slice_checkpoint, slice_config  # noqa: E402

from tensorrt_llm._torch.pyexecutor.launch_counter import LaunchCounts  # noqa: E402
from tensorrt_llm._torch.pyexecutor.messages import NewRequest  # noqa: E402
from tensorrt_llm._torch.pyexecutor.step import StepHandle  # noqa: E402
from tensorrt_llm._torch.speculative.mtp_tail_trim import (  # noqa: E402
    ENV,
    mtp_tail_trim_enabled,
)
from tensorrt_llm.sampling_params import SamplingParams  # noqa: E402

WARMUP_STEPS, TURN, PROFILED_STEPS = 10, 25, 10
NAMES = {"1": "trimmed", "0": "untrimmed"}


@dataclass
class Build:
    """One engine with one endless request, and what its steps took."""

    gate: str
    prompt_len: int
    draft_len: int
    directory: Path
    host_us: list[float] = field(default_factory=list)
    ends: list[torch.cuda.Event] = field(default_factory=list)
    device_us: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        os.environ[ENV] = self.gate
        mtp_tail_trim_enabled.cache_clear()
        config = slice_config(
            self.directory,
            max_draft_len=self.draft_len,
            cuda_graph_batch_sizes=(1,),
            disable_overlap_scheduler=False,
        )
        self.engine = make_engine(config)
        self._launch, self.engine.model_engine.launch = self.engine.model_engine.launch, self.timed
        # Tokens of random weights are accepted at times; nobody runs out of room before the end.
        params = SamplingParams(max_tokens=4096 - self.prompt_len, ignore_eos=True)
        prompt = random_prompt(self.prompt_len, seed=1, vocab=9000)
        self.engine.add_requests([NewRequest(0, prompt, params)])
        self.run(WARMUP_STEPS)
        self.host_us.clear()
        self.device_us.clear()

    def timed(self, batch: object, choose: object) -> StepHandle:
        """`launch`, with the host's time in it and an event behind it."""
        start = time.perf_counter()
        handle = self._launch(batch, choose)
        self.host_us.append((time.perf_counter() - start) * 1e6)
        self.ends.append(torch.cuda.Event(enable_timing=True))
        self.ends[-1].record()
        return handle

    def run(self, steps: int) -> None:
        """Steps from an idle device on; a step's time is from the end of the one before to its
        own."""
        self.ends.clear()
        for _ in range(steps + 1):
            self.engine.step()
            assert self.engine.has_work, "the request has ended; ask for fewer steps"
        torch.cuda.synchronize()
        pairs = zip(self.ends, self.ends[1:], strict=False)
        self.device_us += [a.elapsed_time(b) * 1e3 for a, b in pairs]

    def launched(self) -> LaunchCounts:
        """Of one steady step; all are alike."""
        model_engine, config = self.engine.model_engine, self.engine.config
        model_engine.counts_launches = True
        self.engine.config = replace(config, iter_perf_stats=True)
        self.run(3)
        model_engine.counts_launches = False
        stats = self.engine.stats()
        assert stats.host_to_device_copies is not None and stats.device_ops is not None
        return LaunchCounts(stats.host_to_device_copies, stats.device_ops)

    def kernels(self) -> float:
        """Kernels and copies per step that the device ran, those of the graph included."""
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
            self.run(PROFILED_STEPS)
        ran = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        return len(ran) / (PROFILED_STEPS + 1)


def builds(args: argparse.Namespace, directory: Path) -> Iterator[Build]:
    for gate in NAMES:
        print(f"building the {NAMES[gate]} engine", file=sys.stderr)
        yield Build(gate, args.prompt_len, args.draft_len, directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--draft_len", type=int, default=7)
    parser.add_argument("--prompt_len", type=int, default=2500)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        pair = list(builds(args, slice_checkpoint(Path(directory))))
    for _ in range(0, args.steps, TURN):
        for build in pair:
            build.run(TURN)
    print(
        f"{torch.cuda.get_device_name()}, K = {args.draft_len}, prompt {args.prompt_len}, "
        f"medians of {args.steps} steps"
    )
    print("build      step us  host us  uploads  other ops  kernels and copies")
    for build in pair:
        counts = build.launched()
        print(
            f"{NAMES[build.gate]:9s} {statistics.median(build.device_us):8.1f} "
            f"{statistics.median(build.host_us):8.1f} {counts.host_to_device_copies:8d} "
            f"{counts.device_ops:10d} {build.kernels():19.1f}"
        )


if __name__ == "__main__":
    main()
