"""What crosses the border of the engine: requests and cancellations in, responses and reports out.

Plain picklable dataclasses. Every accepted `NewRequest` gets responses whose last one, and only
that one, has a `finish_reason`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from tensorrt_llm.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended. ERROR carries a message in `LlmResponse.error`."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class NewRequest:
    """One sequence to generate (`n` is already expanded; `choice` tells siblings' random streams
    apart)."""

    request_id: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    choice: int = 0


@dataclass(frozen=True)
class CancelRequest:
    request_id: int


@dataclass(frozen=True)
class Shutdown:
    """Leave the step loop at once."""


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of a token and its rank (1 is the most likely)."""

    logprob: float
    rank: int


TokenLogprobs = dict[
    int, Logprob
]  # token id -> Logprob: the chosen token and the k most likely ones


@dataclass(frozen=True)
class SpeculationStats:
    """How drafts fared in verification. Every step that generates verifies one run of drafts per
    request.

    Args:
        verify_steps: runs that were verified.
        accepted_drafts: how often the first, second, ... draft of a run was accepted and handed
            out; one entry per draft of a run.
    """

    verify_steps: int
    accepted_drafts: tuple[int, ...]

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verify step, the target's own included; None before the first one."""
        if not self.verify_steps:
            return None
        return 1 + sum(self.accepted_drafts) / self.verify_steps

    @property
    def acceptance_per_position(self) -> tuple[float, ...] | None:
        """Share of the verify steps that accepted the first, second, ... draft; None before the
        first one."""
        if not self.verify_steps:
            return None
        return tuple(count / self.verify_steps for count in self.accepted_drafts)

    @classmethod
    def total(cls, parts: Iterable["SpeculationStats | None"]) -> "SpeculationStats | None":
        """Of everything in `parts`; None when there is nothing but None in them."""
        given = [part for part in parts if part is not None]
        if not given:
            return None
        by_position = zip(*(part.accepted_drafts for part in given), strict=True)
        return cls(sum(part.verify_steps for part in given), tuple(map(sum, by_position)))

    def verified(self, num_accepted: int) -> "SpeculationStats":
        """After one more run, of which the first `num_accepted` drafts were accepted."""
        accepted = enumerate(self.accepted_drafts)
        return SpeculationStats(
            self.verify_steps + 1, tuple(n + (place < num_accepted) for place, n in accepted)
        )

    def since(self, earlier: "SpeculationStats") -> "SpeculationStats":
        """What came after `earlier`."""
        pairs = zip(self.accepted_drafts, earlier.accepted_drafts, strict=True)
        return SpeculationStats(
            self.verify_steps - earlier.verify_steps, tuple(now - then for now, then in pairs)
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "acceptance_length": self.acceptance_length,
            "acceptance_per_position": self.acceptance_per_position,
            "verify_steps": self.verify_steps,
        }

    def acceptance_text(self) -> str:
        """For people."""
        if self.acceptance_per_position is None:
            return "nothing verified"
        shares = " ".join(f"{share:.2f}" for share in self.acceptance_per_position)
        return f"acceptance length {self.acceptance_length:.2f}, by position {shares}"


@dataclass(frozen=True)
class LlmResponse:
    """News of one request.

    Args:
        request_id: whose.
        token_ids: tokens generated since the last response, the stop token included if one ended
            it.
        logprobs: one entry per token when asked for, else empty.
        prompt_logprobs: with the first response when asked for; entry i is of prompt token i
            (first is None).
        finish_reason: None while the request goes on.
        stop_reason: the stop id or stop string that ended it; None for an eos id, a length or an
            error.
        error: what went wrong, for `FinishReason.ERROR`.
        speculation: with the last response, of the whole request; None without drafting and for a
            request that was refused.
    """

    request_id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    speculation: SpeculationStats | None = None


@dataclass(frozen=True)
class EngineReady:
    """First message of rank 0 after loading, allocation and warm-up; bytes are that rank's."""

    max_seq_len: int
    max_num_tokens: int
    max_batch_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_total_blocks: int
    tokens_per_block: int
    weights_bytes: int
    kv_cache_bytes: int


@dataclass(frozen=True)
class PathCounts:
    """Launched steps by the path that one part of them took."""

    fast: int = 0
    builtin: int = 0

    def taken(self, path: str) -> "PathCounts":
        """After one more step.

        Raises:
            ValueError: no such path.
        """
        if path not in ("fast", "builtin"):
            raise ValueError(f"a step's path is {path!r}; it must be 'fast' or 'builtin'")
        return replace(self, **{path: getattr(self, path) + 1})


@dataclass(frozen=True)
class EngineStats:
    """State of the engine after a step; counters are totals since start.

    Args:
        speculation: of all requests; None without drafting.
        generation_steps: launched steps without contexts, by part ("target", "draft"); only of
            parts that tell their path, see `StepPaths`.
        host_to_device_copies, device_ops: of the last step, see `LaunchCounts`; None unless
            `enable_iter_perf_stats` is on.
    """

    iter: int
    num_running: int
    num_waiting: int
    kv_used_blocks: int
    kv_total_blocks: int
    index_used_blocks: int
    index_total_blocks: int
    generated_tokens: int
    prompt_tokens: int
    nan_failures: int
    iter_latency_ms: float
    speculation: SpeculationStats | None = None
    host_to_device_copies: int | None = None
    device_ops: int | None = None
    generation_steps: dict[str, PathCounts] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineDead:
    """A rank died; no further message follows."""

    rank: int
    traceback: str
