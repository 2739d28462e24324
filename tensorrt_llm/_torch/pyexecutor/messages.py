"""What crosses the border of the engine: requests and cancellations in, responses and reports out.

Plain picklable dataclasses. Every accepted `NewRequest` gets responses whose last one, and only
that one, has a `finish_reason`.
"""

from dataclasses import dataclass, field
from enum import StrEnum

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
    """

    request_id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


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
class EngineStats:
    """State of the engine after a step; counters are totals since start.

    Args:
        verify_steps: drafts were verified so many times, counted per request.
        accepted_drafts: how often the first, second, ... draft was accepted; empty without
            drafting.
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
    verify_steps: int = 0
    accepted_drafts: tuple[int, ...] = ()
    host_to_device_copies: int | None = None
    device_ops: int | None = None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verified step, the target's own included; None before the first one."""
        if not self.verify_steps:
            return None
        return 1 + sum(self.accepted_drafts) / self.verify_steps


@dataclass(frozen=True)
class EngineDead:
    """A rank died; no further message follows."""

    rank: int
    traceback: str
