"""Which path the steps took: told by the model and its worker, counted for steps without contexts.

The doubles are the real tiny model and worker, which tell their paths in turn after every forward.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from helpers.engine import executor_config, generate, make_engine, run_requests
from helpers.glm_tiny import CHECKPOINT

from tensorrt_llm._torch.pyexecutor.cuda_graph_runner import WARMUP_RUNS, CUDAGraphRunner
from tensorrt_llm._torch.pyexecutor.messages import NewRequest, PathCounts
from tensorrt_llm._torch.pyexecutor.model_engine import PyTorchModelEngine
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.pyexecutor.step import StepInputs, StepPaths
from tensorrt_llm.sampling_params import SamplingParams

PROMPT = list(range(5, 25))
MAX_TOKENS = 10
# The first token comes from the prompt's step.
GENERATION_STEPS = MAX_TOKENS - 1


class Paths:
    """Makes an engine's model, and its worker on request, tell their paths.

    Attributes:
        steps: [contexts, target's path, draft's path] of every step so far.
    """

    def __init__(self, engine: PyTorchModelEngine, *, drafts: bool) -> None:
        self.steps: list[list] = []
        self.target = itertools.cycle(["fast", "builtin"])
        self.draft = itertools.cycle(["builtin", "fast", "fast"] if drafts else [None])
        self._engine, self._forward = engine, engine.worker.forward
        engine.model.model.register_forward_hook(self._after_target)
        engine.worker.forward = self._draft

    def _after_target(self, model: torch.nn.Module, args: tuple, output: object) -> None:
        self._engine.model.model.path = next(self.target)
        self.steps.append([args[0].num_contexts, self._engine.model.decode_path])

    def _draft(self, *args: object) -> object:
        outputs = self._forward(*args)
        self._engine.worker.draft_path = next(self.draft)
        self.steps[-1].append(self._engine.worker.draft_path)
        return outputs

    def without_contexts(self) -> dict[str, PathCounts]:
        """As the engine shall count them."""
        told = [paths for contexts, *paths in self.steps if not contexts]
        counted = zip(("target", "draft"), map(Counter, zip(*told, strict=True)), strict=True)
        return {part: PathCounts(**count) for part, count in counted}


def engine(**overrides: object) -> PyExecutor:
    settings = {"max_num_tokens": 9, "max_batch_size": 2, "max_seq_len": 64, **overrides}
    return make_engine(executor_config(CHECKPOINT, **settings))


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("prompts", "context_steps"),
    # Chunks end with a block of 8: the long prompt takes three, in the pair beside a generation.
    [([PROMPT], 3), ([PROMPT[:4], PROMPT], 4)],
)
def test_steps_without_contexts_are_counted(plain, temperature, prompts, context_steps) -> None:
    executor = engine(disable_overlap_scheduler=plain)
    paths = Paths(executor.model_engine, drafts=False)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=temperature, seed=1)
    run_requests(executor, prompts, params)
    assert len(paths.steps) == context_steps + GENERATION_STEPS
    most, least = -(-GENERATION_STEPS // 2), GENERATION_STEPS // 2
    # The paths alternate from the first context step on.
    expected = PathCounts(least, most) if context_steps % 2 else PathCounts(most, least)
    assert executor.stats().generation_steps == {"target": expected}


@pytest.mark.parametrize("plain", [True, False])
def test_targets_and_drafts_are_counted_apart(plain) -> None:
    executor = engine(disable_overlap_scheduler=plain, max_draft_len=3)
    paths = Paths(executor.model_engine, drafts=True)
    generate(executor, [PROMPT, PROMPT[:4]], MAX_TOKENS)
    first = executor.stats().generation_steps
    assert first == paths.without_contexts()
    generate(executor, [PROMPT], MAX_TOKENS)
    second = executor.stats()
    assert second.generation_steps == paths.without_contexts() != first
    in_json = json.loads(json.dumps(asdict(second)))["generation_steps"]
    assert {
        part: PathCounts(**counts) for part, counts in in_json.items()
    } == paths.without_contexts()


@pytest.mark.parametrize("draft_len", [0, 3])
def test_the_built_in_model_tells_no_path(draft_len) -> None:
    executor = engine(max_draft_len=draft_len)
    generate(executor, [PROMPT], MAX_TOKENS)
    assert executor.stats().generation_steps == {}


def test_an_unknown_path_is_an_error() -> None:
    with pytest.raises(ValueError, match="'slow'; it must be 'fast' or 'builtin'"):
        PathCounts().taken("slow")


class RerunGraph:
    """In place of `torch.cuda.CUDAGraph`: a replay runs the captured step again."""

    def __init__(self, model_engine: PyTorchModelEngine) -> None:
        self._run = model_engine.run

    def pool(self) -> None:
        return None

    def keep(self, inputs: StepInputs, packed: torch.Tensor) -> None:
        self._inputs, self._packed = inputs, packed

    def replay(self) -> None:
        self._packed.copy_(self._run(self._inputs)[0])


def capture_on_the_cpu(model_engine: PyTorchModelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures graphs for one and for two requests."""
    ran: list[tuple[StepInputs, torch.Tensor]] = []
    run = model_engine.run

    def recorded(inputs: StepInputs) -> tuple[torch.Tensor, StepPaths]:
        packed, paths = run(inputs)
        ran.append((inputs, packed))
        return packed, paths

    @contextmanager
    def graph(graph: RerunGraph, pool: None) -> Iterator[None]:
        yield
        graph.keep(*ran[-1])

    stream = SimpleNamespace(wait_stream=lambda other: None)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda: stream)
        patch.setattr(torch.cuda, "current_stream", lambda: stream)
        patch.setattr(torch.cuda, "stream", nullcontext)
        patch.setattr(torch.cuda, "CUDAGraph", lambda: RerunGraph(model_engine))
        patch.setattr(torch.cuda, "graph", graph)
        patch.setattr(model_engine, "run", recorded)
        model_engine.graphs = CUDAGraphRunner(model_engine, (1, 2))
        model_engine.warmup(progress=False)


@pytest.mark.parametrize("plain", [True, False])
def test_a_replay_counts_the_paths_of_its_capture(plain, monkeypatch) -> None:
    """Warm-ups and captures tell paths that are not counted, as do the doubles at a replay, where
    a real graph runs no python."""
    executor = engine(disable_overlap_scheduler=plain)
    model_engine = executor.model_engine
    paths = Paths(model_engine, drafts=True)
    # Two graphs per batch size, the larger size first; the last of a graph's runs is its capture.
    per_graph = [[*["builtin"] * WARMUP_RUNS, path] for path in ("builtin", "fast")]
    captured = [path for runs in per_graph for path in 2 * runs]
    paths.target = itertools.chain(captured, itertools.repeat("builtin"))
    paths.draft = itertools.chain(map(other, captured), itertools.repeat("builtin"))
    capture_on_the_cpu(model_engine, monkeypatch)
    assert len(paths.steps) == len(captured) and executor.stats().generation_steps == {}

    # Both prompts fit into one step; then three steps of both, and six of the longer answer.
    lengths = (4, 10)
    executor.add_requests(
        NewRequest(i, PROMPT[:4], SamplingParams(max_tokens=n, ignore_eos=True))
        for i, n in enumerate(lengths)
    )
    while executor.has_work:
        executor.step()
    both, alone = lengths[0] - 1, lengths[1] - lengths[0]
    assert executor.stats().generation_steps == {
        "target": PathCounts(fast=alone, builtin=both),
        "draft": PathCounts(fast=both, builtin=alone),
    }


def other(path: str) -> str:
    return "fast" if path == "builtin" else "builtin"
