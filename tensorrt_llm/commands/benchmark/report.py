"""The benchmark's result: as JSON for programs, as a table for people."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tensorrt_llm.commands.benchmark.memory import MemoryReport
from tensorrt_llm.commands.benchmark.timing import LatencySummary, RequestTiming, Speedup
from tensorrt_llm.commands.output import table
from tensorrt_llm.llmapi import SpeculationStats


@dataclass(frozen=True)
class EngineReport:
    """One engine: its numbers, the requests behind them, the most memory that a process of it took,
    and how its drafts fared if it drafts."""

    summary: LatencySummary
    timings: Sequence[RequestTiming]
    peak_rss_bytes: int | None
    speculation: SpeculationStats | None = None

    def as_dict(self) -> dict[str, Any]:
        """The summary's fields, `peak_rss_bytes`, `speculation`, and `per_request` in the order of
        the requests."""
        return {
            **asdict(self.summary),
            "peak_rss_bytes": self.peak_rss_bytes,
            "speculation": None if self.speculation is None else self.speculation.as_dict(),
            "per_request": [_request_dict(timing) for timing in self.timings],
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that the benchmark found.

    Args:
        settings: what was run, on what.
        engines: by name, ours first.
        memory: ours against its bound; None on CUDA, where resident memory says little.
        speedup, same_outputs: against the peer; None without one.
    """

    settings: Mapping[str, Any]
    engines: Mapping[str, EngineReport]
    memory: MemoryReport | None
    speedup: Speedup | None
    same_outputs: int | None

    def as_dict(self) -> dict[str, Any]:
        """What `--output_json` writes: `settings`, one entry per engine, and the comparisons."""
        return {
            "settings": dict(self.settings),
            **{name: engine.as_dict() for name, engine in self.engines.items()},
            "memory": None if self.memory is None else self.memory.as_dict(),
            "speedup": None if self.speedup is None else asdict(self.speedup),
            "same_outputs": self.same_outputs,
        }

    def as_text(self) -> str:
        """A table of the engines side by side, then what follows from it."""
        reports = list(self.engines.values())
        rows = [["", *self.engines]]
        rows += [[label, *(show(report) for report in reports)] for label, show in _ROWS]
        rows += _context_rows([report.summary for report in reports])
        return "\n".join([table(rows), *self._conclusions()])

    def _conclusions(self) -> list[str]:
        lines = [""]
        lines += [
            f"Speculation of {name}: {report.speculation.acceptance_text()}"
            for name, report in self.engines.items()
            if report.speculation is not None
        ]
        if self.memory is not None:
            lines.append(_memory_line(self.memory))
        if self.speedup is not None:
            lines.append(
                f"Faster than the peer by: {self.speedup.decode:.2f}x tok/s/user, "
                f"{self.speedup.latency:.2f}x whole request, {self.speedup.ttft:.2f}x first token"
            )
            total = next(iter(self.engines.values())).summary.requests
            lines.append(f"Same tokens as the peer: {self.same_outputs} of {total} requests")
        return lines


def _ms(of: Callable[[LatencySummary], float]) -> Callable[[EngineReport], str]:
    return lambda report: f"{of(report.summary):.2f}"


_ROWS: tuple[tuple[str, Callable[[EngineReport], str]], ...] = (
    ("time to first token, ms", _ms(lambda s: s.ttft_ms)),
    ("inter-token p50, ms", _ms(lambda s: s.itl_ms_p50)),
    ("inter-token p90, ms", _ms(lambda s: s.itl_ms_p90)),
    ("time per output token, ms", _ms(lambda s: s.tpot_ms)),
    ("whole request, ms", _ms(lambda s: s.latency_ms)),
    ("tok/s/user", lambda r: f"{r.summary.tokens_per_second_per_user:.1f}"),
    ("tokens per step", lambda r: f"{r.summary.tokens_per_step:.2f}"),
    (
        "peak memory (RSS), MB",
        lambda r: "-" if r.peak_rss_bytes is None else f"{r.peak_rss_bytes / 1e6:.0f}",
    ),
)


def _context_rows(summaries: Sequence[LatencySummary]) -> list[list[str]]:
    """Time per token by context, and how it grows from the first to the last one."""
    by_context = [{bucket.context: bucket for bucket in s.context_buckets} for s in summaries]
    rows = [
        [
            f"~{context} tokens of context: p10 / p50, ms",
            *(f"{of[context].itl_ms_p10:.2f} / {of[context].itl_ms_p50:.2f}" for of in by_context),
        ]
        for context in sorted(set.intersection(*map(set, by_context)))
    ]
    growths = [s.context_growth for s in summaries]
    cells = ["-" if growth is None else f"{growth:+.1%}" for growth in growths]
    return [*rows, ["growth from first to last, p10", *cells]]


def _memory_line(memory: MemoryReport) -> str:
    relation = "within" if memory.within_bound else "ABOVE"
    return (
        f"Peak memory {memory.peak_rss_bytes / 1e6:.0f} MB is {relation} the bound of "
        f"{memory.bound_bytes / 1e6:.0f} MB = {memory.HEADROOM} x (weights "
        f"{memory.weights_bytes / 1e6:.1f} MB + cache {memory.kv_cache_bytes / 1e6:.1f} MB + "
        f"libraries {memory.LIBRARIES_BYTES / 1e6:.0f} MB)"
    )


def _request_dict(timing: RequestTiming) -> dict[str, Any]:
    return {
        "prompt_tokens": timing.prompt_tokens,
        "output_tokens": timing.output_tokens,
        "ttft_ms": timing.ttft_s * 1e3,
        "latency_ms": timing.latency_s * 1e3,
    }
