"""What the server counts and times, as Prometheus reads it from GET /metrics."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from time import perf_counter

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tensorrt_llm._torch.pyexecutor.messages import EngineStats

FINISH_REASONS = ("stop", "length", "cancelled", "failed")

_TTFT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.5, 1)


class ServerMetrics:
    """All series of one server.

    Args:
        engine_stats: the engine's latest report; None before its first step.
    """

    def __init__(self, engine_stats: Callable[[], EngineStats | None]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine_stats))
        self.time_to_first_token = self._histogram(
            "time_to_first_token",
            "From the request's arrival to a choice's first token",
            _TTFT_BUCKETS,
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency", "Between a choice's tokens after its first one", _ITL_BUCKETS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.generation_tokens = self._counter("generation_tokens", "Tokens sent to clients")
        self.finished = self._counter(
            "requests_finished", "Sequences by how they ended", ["reason"]
        )
        for (
            reason
        ) in FINISH_REASONS:  # series exist from the start, so that rates see the first event
            self.finished.labels(reason)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(
            f"trtllm_{name}_seconds", text, buckets=tuple(buckets), registry=self._registry
        )

    def _counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"trtllm_{name}", text, labels, registry=self._registry)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)


class SequenceMeter:
    """Times one sequence; `arrival` is when its request came, on `perf_counter`'s clock."""

    def __init__(self, metrics: ServerMetrics, arrival: float) -> None:
        self._metrics = metrics
        self._last = arrival
        self._tokens = 0
        self._finished = False

    def observe(self, num_tokens: int, finish_reason: str | None) -> None:
        """Note that the sequence has `num_tokens` tokens by now and whether it has ended."""
        new = num_tokens - self._tokens
        if new > 0:
            self._observe_tokens(new)
            self._tokens = num_tokens
        if finish_reason is not None:
            self.finish("failed" if finish_reason == "error" else str(finish_reason))

    def _observe_tokens(self, new: int) -> None:
        now = perf_counter()
        if self._tokens == 0:
            self._metrics.time_to_first_token.observe(now - self._last)
        else:
            # Tokens of one step arrive together: each counts with its share of the step's time.
            for _ in range(new):
                self._metrics.inter_token_latency.observe((now - self._last) / new)
        self._metrics.generation_tokens.inc(new)
        self._last = now

    def finish(self, reason: str) -> None:
        """Count the end of the sequence, once."""
        if not self._finished:
            self._finished = True
            self._metrics.finished.labels(reason).inc()


class _EngineCollector(Collector):
    """Reads the engine's own report at scrape time."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        if stats is None:
            return
        yield GaugeMetricFamily("trtllm_requests_running", "In the batch", stats.num_running)
        yield GaugeMetricFamily("trtllm_requests_waiting", "Not yet admitted", stats.num_waiting)
        yield from self._pools(stats)
        yield CounterMetricFamily("trtllm_engine_steps", "Steps of the engine", value=stats.iter)
        yield from self._drafts(stats)
        yield from self._paths(stats)
        yield from self._launch(stats)
        yield CounterMetricFamily(
            "trtllm_nan_failures", "Sequences failed by NaN logits", value=stats.nan_failures
        )

    def _drafts(self, stats: EngineStats) -> Iterable[Metric]:
        """Only with speculation."""
        speculation = stats.speculation
        if speculation is None:
            return
        accepted = CounterMetricFamily(
            "trtllm_accepted_drafts", "Drafts accepted, by place in their run", labels=["position"]
        )
        for position, count in enumerate(speculation.accepted_drafts):
            accepted.add_metric([str(position)], count)
        yield accepted
        yield CounterMetricFamily(
            "trtllm_verify_steps",
            "Times a request's drafts were verified",
            value=speculation.verify_steps,
        )
        yield GaugeMetricFamily(
            "trtllm_acceptance_length",
            "Tokens per verified step",
            speculation.acceptance_length or 0.0,
        )

    def _paths(self, stats: EngineStats) -> Iterable[Metric]:
        """Only of a model with a fast path."""
        if not stats.generation_steps:
            return
        steps = CounterMetricFamily(
            "trtllm_generation_steps",
            "Steps without prompts, by the path that a part of the model took",
            labels=["part", "path"],
        )
        for part, counts in stats.generation_steps.items():
            for path, count in asdict(counts).items():
                steps.add_metric([part, path], count)
        yield steps

    def _launch(self, stats: EngineStats) -> Iterable[Metric]:
        """Only with `enable_iter_perf_stats`."""
        if stats.host_to_device_copies is None or stats.device_ops is None:
            return
        yield GaugeMetricFamily(
            "trtllm_step_host_to_device_copies",
            "Uploads of the last step",
            stats.host_to_device_copies,
        )
        yield GaugeMetricFamily(
            "trtllm_step_device_ops",
            "Other operators that the host launched for the last step, its graph aside",
            stats.device_ops,
        )

    def _pools(self, stats: EngineStats) -> Iterable[Metric]:
        used = GaugeMetricFamily("trtllm_kv_cache_used_blocks", "Blocks in use", labels=["pool"])
        total = GaugeMetricFamily("trtllm_kv_cache_blocks", "Blocks of the pool", labels=["pool"])
        usage = GaugeMetricFamily("trtllm_kv_cache_usage_ratio", "Used / total", labels=["pool"])
        for pool, in_use, size in (
            ("key", stats.kv_used_blocks, stats.kv_total_blocks),
            ("index_key", stats.index_used_blocks, stats.index_total_blocks),
        ):
            used.add_metric([pool], in_use)
            total.add_metric([pool], size)
            usage.add_metric([pool], in_use / size if size else 0.0)
        yield from (used, total, usage)
