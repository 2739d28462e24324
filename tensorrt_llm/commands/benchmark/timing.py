"""From the arrival times of one user's tokens to the numbers that describe latency."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

BUCKET_TOKENS = 64
_MAX_BUCKETS = 16
_MIN_BUCKET_STEPS = 8  # the median of fewer says little


@dataclass(frozen=True)
class Arrival:
    """A response with new tokens: seconds since the request was sent, and how many tokens."""

    seconds: float
    tokens: int


@dataclass(frozen=True)
class Step:
    """A decode step: tokens in the context before it, tokens it gave, seconds it took."""

    context: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class RequestTiming:
    """One request's tokens as they came.

    Args:
        prompt_tokens: length of the prompt.
        arrivals: in their order, at least one; the first one is the prompt's own token.

    Raises:
        ValueError: nothing arrived.
    """

    prompt_tokens: int
    arrivals: tuple[Arrival, ...]

    def __post_init__(self) -> None:
        if not self.arrivals:
            raise ValueError("a request without a token has no latency")

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to its first token."""
        return self.arrivals[0].seconds

    @property
    def latency_s(self) -> float:
        """Seconds from sending the request to its last token."""
        return self.arrivals[-1].seconds

    @property
    def output_tokens(self) -> int:
        return sum(arrival.tokens for arrival in self.arrivals)

    @property
    def steps(self) -> list[Step]:
        """The decode steps; the step that read the prompt is none."""
        steps, context = [], self.prompt_tokens
        for before, after in pairwise(self.arrivals):
            context += before.tokens
            steps.append(Step(context, after.tokens, after.seconds - before.seconds))
        return steps


@dataclass(frozen=True)
class ContextBucket:
    """Time per token while the context was about `context` tokens long.

    The 10th percentile is there for comparisons on a machine with other work: that only ever adds
    time, and a tenth of the steps gets through without it.
    """

    context: int
    itl_ms_p10: float
    itl_ms_p50: float


@dataclass(frozen=True, kw_only=True)
class LatencySummary:
    """One engine's numbers over all requests: medians, but for the 90th percentile and the mean
    tokens per step.

    Args:
        requests: how many were measured.
        output_tokens: of all of them.
        ttft_ms: time to the first token.
        itl_ms_p50, itl_ms_p90: inter-token latency. A step that gives several tokens counts once
            for each, with its time divided among them.
        tpot_ms: time per token after the first one, averaged over a request.
        latency_ms: whole request.
        tokens_per_second_per_user: what one user sees while decoding, 1000 / `tpot_ms`.
        tokens_per_step: 1 without speculation.
        context_buckets: time per token by length of the context, short ones first; see
            `bucket_width`.
        context_growth: time per token in the last bucket over that in the first one, minus 1; of
            the 10th percentiles. None for one bucket.
    """

    requests: int
    output_tokens: int
    ttft_ms: float
    itl_ms_p50: float
    itl_ms_p90: float
    tpot_ms: float
    latency_ms: float
    tokens_per_second_per_user: float
    tokens_per_step: float
    context_buckets: list[ContextBucket]
    context_growth: float | None


def summarize(timings: Sequence[RequestTiming]) -> LatencySummary:
    """The numbers of requests that ran one after another.

    Raises:
        ValueError: there are none, or one has no decode step.
    """
    if not timings or not all(timing.steps for timing in timings):
        raise ValueError("a summary needs requests with at least two responses each")
    steps = [step for timing in timings for step in timing.steps]
    buckets = context_buckets(steps)
    tpot_ms = median(map(_tpot_ms, timings))
    itl_ms_p50, itl_ms_p90 = _itl_ms(steps, 50, 90)
    return LatencySummary(
        requests=len(timings),
        output_tokens=sum(timing.output_tokens for timing in timings),
        ttft_ms=median(timing.ttft_s * 1e3 for timing in timings),
        itl_ms_p50=itl_ms_p50,
        itl_ms_p90=itl_ms_p90,
        tpot_ms=tpot_ms,
        latency_ms=median(timing.latency_s * 1e3 for timing in timings),
        tokens_per_second_per_user=1e3 / tpot_ms,
        tokens_per_step=sum(step.tokens for step in steps) / len(steps),
        context_buckets=buckets,
        context_growth=_growth(buckets),
    )


@dataclass(frozen=True)
class Speedup:
    """How many times faster we are than the peer, above 1 is faster: medians over pairs of
    interleaved runs of the same prompt. `decode` is tok/s/user, `latency` the whole request."""

    ttft: float
    decode: float
    latency: float


def speedup(ours: Sequence[RequestTiming], peers: Sequence[RequestTiming]) -> Speedup:
    """Compare request by request; both sequences ran the same prompts in the same order."""
    pairs = list(zip(ours, peers, strict=True))

    def ratio(of: Callable[[RequestTiming], float]) -> float:
        return median(of(peer) / of(our) for our, peer in pairs)

    return Speedup(ratio(lambda t: t.ttft_s), ratio(_tpot_ms), ratio(lambda t: t.latency_s))


def context_buckets(steps: Sequence[Step]) -> list[ContextBucket]:
    """Time per token around every multiple of the bucket width where there are enough steps."""
    grouped: dict[int, list[Step]] = defaultdict(list)
    width = bucket_width(step.context for step in steps)
    for step in steps:
        grouped[nearest_multiple(step.context, width)].append(step)
    return [
        ContextBucket(context, *_itl_ms(group, 10, 50))
        for context, group in sorted(grouped.items())
        if len(group) >= _MIN_BUCKET_STEPS
    ]


def bucket_width(contexts: Iterable[int]) -> int:
    """64 tokens, doubled until at most 16 buckets cover the longest context."""
    width, longest = BUCKET_TOKENS, max(contexts)
    while longest > width * _MAX_BUCKETS:
        width *= 2
    return width


def nearest_multiple(value: int, unit: int) -> int:
    """The multiple of `unit` that is nearest to `value`: 32 to 95 become 64 for 64."""
    return (value + unit // 2) // unit * unit


def median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def _tpot_ms(timing: RequestTiming) -> float:
    steps = timing.steps
    return (timing.latency_s - timing.ttft_s) * 1e3 / sum(step.tokens for step in steps)


def _itl_ms(steps: Iterable[Step], *percentiles: float) -> list[float]:
    """Percentiles of the time per token; each token counts."""
    times = [step.seconds * 1e3 / step.tokens for step in steps for _ in range(step.tokens)]
    return [float(value) for value in np.percentile(times, percentiles)]


def _growth(buckets: Sequence[ContextBucket]) -> float | None:
    return buckets[-1].itl_ms_p10 / buckets[0].itl_ms_p10 - 1 if len(buckets) > 1 else None
