"""Decode steps as CUDA graphs: one per batch size, and per side of the short/long seam of the
indexer. A graph holds the whole step: target, acceptance and draft loop."""

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tqdm import tqdm

from tensorrt_llm._torch.modules.fused_moe.fused_moe import MAX_GRAPH_TOKENS
from tensorrt_llm._torch.pyexecutor.step import StepInputs, StepPaths

if TYPE_CHECKING:
    from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest
    from tensorrt_llm._torch.pyexecutor.model_engine import PyTorchModelEngine

WARMUP_RUNS = 2  # lets libraries choose and allocate before a capture forbids it


class CapturedStep(NamedTuple):
    """A graph, its results, and the paths that python took at the capture and not again."""

    graph: torch.cuda.CUDAGraph
    packed: torch.Tensor
    paths: StepPaths


class CUDAGraphRunner:
    """Captures the engine's step over its fixed buffers and replays it.

    A batch runs in the smallest captured size that holds it; the rows above it are padding, which
    writes nowhere and whose results are dropped. While no request can come to have more than
    `index_topk` tokens in a step, a graph without index scores serves ("short").

    Args:
        batch_sizes: requests per graph; none turns graphs off.

    Raises:
        ValueError: a size that is larger than a step may be or than the experts' capturable path
            serves.
    """

    def __init__(self, engine: "PyTorchModelEngine", batch_sizes: Sequence[int]) -> None:
        self.engine = engine
        self.batch_sizes = sorted(set(batch_sizes))
        most = MAX_GRAPH_TOKENS // engine.rows_per_generation
        largest = min(engine.attn_metadata.max_num_requests, most)
        if self.batch_sizes and self.batch_sizes[-1] > largest:
            raise ValueError(
                f"cuda graph batch size {self.batch_sizes[-1]} is above {largest}, "
                "the most that fits"
            )
        self.graphs: dict[tuple[int, bool], CapturedStep] = {}
        self.pool: Any = None  # memory that all graphs share, known after the first capture

    def fits(self, batch_size: int) -> bool:
        return bool(self.batch_sizes) and batch_size <= self.batch_sizes[-1]

    def capture_all(self, progress: bool) -> None:
        """Capture from the largest size down, so that the smaller ones reuse its memory."""
        for batch_size in tqdm(
            self.batch_sizes[::-1],
            desc="Capturing decode graphs",
            disable=not progress or not self.batch_sizes,
        ):
            for short in (True, False):
                self.graphs[batch_size, short] = self._capture(batch_size, short)

    def replay(self, requests: Sequence["LlmRequest"]) -> tuple[torch.Tensor, StepPaths]:
        """One step of these requests -> its packed results, valid until the next replay, and its
        paths."""
        batch_size = self.batch_sizes[bisect.bisect_left(self.batch_sizes, len(requests))]
        self._stage(requests, batch_size)
        metadata = self.engine.attn_metadata
        self.engine.prepare(static_width=True)
        step = self.graphs[batch_size, metadata.skip_indexer_for_gen_reqs]
        step.graph.replay()
        return step.packed[: len(requests)], step.paths

    def _stage(self, requests: Sequence["LlmRequest"], batch_size: int) -> None:
        self.engine.begin_sequences(num_contexts=0)
        for request in requests:
            self.engine.add_sequence(
                request, self.engine.rows_per_generation, request.num_assumed_tokens
            )
        for _ in range(batch_size - len(requests)):
            self.engine.add_padding()
        self.engine.finish_sequences()

    def _capture(self, batch_size: int, short: bool) -> CapturedStep:
        self._stage([], batch_size)
        self.engine.prepare(static_width=True, skip_indexer=short)
        nothing = torch.empty(0, dtype=torch.int64, device=self.engine.device)
        inputs = StepInputs(
            num_contexts=0,
            num_generations=batch_size,
            context_tokens=nothing,
            context_next_tokens=nothing,
            gather_ids=None,
            is_cuda_graph=True,
        )
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.inference_mode():
            for _ in range(WARMUP_RUNS):
                self.engine.run(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool), torch.inference_mode():
            packed, paths = self.engine.run(inputs)
        self.pool = self.pool or graph.pool()
        return CapturedStep(graph, packed, paths)
