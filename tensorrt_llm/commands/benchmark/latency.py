"""The latency benchmark: one request at a time, each on every engine before the next one."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from tensorrt_llm.commands.benchmark.engine import Engine, OwnEngine, Run
from tensorrt_llm.commands.benchmark.memory import MemoryReport
from tensorrt_llm.commands.benchmark.peer import TransformersPeer
from tensorrt_llm.commands.benchmark.report import EngineReport, Report
from tensorrt_llm.commands.benchmark.timing import RequestTiming, speedup, summarize
from tensorrt_llm.commands.benchmark.workload import BenchRequest
from tensorrt_llm.commands.output import environment
from tensorrt_llm.llmapi import LlmArgs, SpeculationStats

OURS = "tensorrt_llm"


def run_latency(
    args: LlmArgs,
    requests: Sequence[BenchRequest],
    *,
    warmup: int,
    peer: str | None,
    settings: Mapping[str, Any],
) -> Report:
    """Start the engines, measure, end them.

    Args:
        args: of our engine.
        requests: what to measure.
        warmup: requests run before that.
        peer: measure this too, see `_start_peer`.
        settings: the caller's part of the report's settings.

    Raises:
        BenchError: a request failed, or the peer did.
        ValueError, EngineDeadError: our engine does not start, or has no drafts to go without.
    """
    with contextlib.ExitStack() as stack:
        engines: dict[str, Engine] = {}
        if peer:  # before our engine, which on a GPU takes what memory there is
            engines[peer] = _enter(stack, _start_peer(peer, args))
        ours = OwnEngine(args)
        engines = {OURS: _enter(stack, ours), **engines}
        runs = measure(engines, requests, warmup)
        reports = {name: _engine_report(engines[name], runs[name]) for name in engines}
        memory = _memory(ours, reports[OURS])
    config = args.executor_config()
    peers = runs[peer] if peer else None
    return Report(
        settings={
            **settings,
            "device": config.device,
            "dtype": config.dtype,
            "num_threads": config.num_threads,
            "llm_args": args.model_dump(mode="json", exclude_unset=True),
            **environment(),
        },
        engines=reports,
        memory=memory,
        speedup=speedup(_timings(runs[OURS]), _timings(peers)) if peers else None,
        same_outputs=same_outputs(runs[OURS], peers) if peers else None,
    )


def measure(
    engines: Mapping[str, Engine],
    requests: Sequence[BenchRequest],
    warmup: int,
    progress: bool = True,
) -> dict[str, list[Run]]:
    """Run all requests on all engines, interleaved: a slow spell of the machine hits all of them.

    Args:
        engines: by name, in the order in which each request visits them.
        requests: what to run.
        warmup: requests run before and not measured: the first ones, over again if need be.
        progress: show a bar.

    Raises:
        BenchError: a request failed.
    """
    warm = [requests[i % len(requests)] for i in range(warmup)]
    bar = tqdm([*warm, *requests], "requests", disable=not progress)
    runs = [{name: engine.run(request) for name, engine in engines.items()} for request in bar]
    return {name: [row[name] for row in runs[warmup:]] for name in engines}


def same_outputs(ours: Sequence[Run], peers: Sequence[Run]) -> int:
    """Requests for which both engines generated the same tokens, all of them."""
    pairs = zip(ours, peers, strict=True)
    return sum(our.token_ids == peer.token_ids for our, peer in pairs)


def _enter(stack: contextlib.ExitStack, engine: Engine) -> Engine:
    stack.callback(engine.close)
    return engine


def _start_peer(peer: str, args: LlmArgs) -> Engine:
    """transformers: its `generate` with the same model, device and dtype, and all ranks' threads.
    no-drafts: our own engine, with everything but the drafts."""
    if peer == "no-drafts":
        if args.speculative_config is None:
            raise ValueError("the peer no-drafts needs a speculative_config to go without")
        return OwnEngine(args.model_copy(update={"speculative_config": None}))
    config = args.executor_config()
    threads = config.num_threads and config.num_threads * config.mapping.world_size
    return TransformersPeer(config.model, config.device, config.dtype, threads)


def _engine_report(engine: Engine, runs: Sequence[Run]) -> EngineReport:
    timings = _timings(runs)
    speculation = SpeculationStats.total(run.speculation for run in runs)
    return EngineReport(summarize(timings), timings, engine.peak_rss_bytes(), speculation)


def _memory(engine: OwnEngine, report: EngineReport) -> MemoryReport | None:
    """Ours against the bound, where the weights are in the memory that was measured."""
    on_cpu = engine.llm.args.executor_config().device == "cpu"
    if report.peak_rss_bytes is None or not on_cpu:
        return None
    return MemoryReport(
        weights_bytes=engine.llm.weights_bytes,
        kv_cache_bytes=engine.llm.kv_cache_bytes,
        peak_rss_bytes=report.peak_rss_bytes,
    )


def _timings(runs: Sequence[Run]) -> list[RequestTiming]:
    return [run.timing for run in runs]
