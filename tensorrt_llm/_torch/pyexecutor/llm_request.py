"""One request inside the engine: its tokens, how far the cache has got, and what it still needs."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from tensorrt_llm._torch.pyexecutor.messages import (
    NewRequest,
    SpeculationStats,
    TokenLogprobs,
)
from tensorrt_llm._torch.pyexecutor.stop_criteria import StopCriteria
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.tokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    import torch

    from tensorrt_llm._torch.pyexecutor.sampler import LogitsEdits


class RequestState(Enum):
    """WAITING holds no blocks, CONTEXT has prompt left to compute, GENERATION gains tokens."""

    WAITING = auto()
    CONTEXT = auto()
    GENERATION = auto()
    FINISHED = auto()


@dataclass(frozen=True)
class RequestLimits:
    """What the engine can take.

    Args:
        max_seq_len: prompt plus generated tokens.
        max_prompt_tokens: longest prompt; below `max_seq_len` when prompts are not chunked.
        vocab_size: token ids are below it.
    """

    max_seq_len: int
    max_prompt_tokens: int
    vocab_size: int


class LlmRequest:
    """State of one sequence.

    Args:
        message: as it came in.
        max_seq_len: bound on prompt plus generated tokens.
        eos_token_ids: the model's.
        tokenizer: for stop strings.
        speculation: where counting begins; None without drafting.

    Attributes:
        tokens: prompt and generated tokens; `output_token_ids` the generated ones alone.
        num_computed_tokens: tokens whose keys are in the cache; advanced by the executor after each
            forward.
        chunk_len: tokens of this step, set by the scheduler.
        max_total_tokens: tokens at which the request ends at the latest.
        edits: the sampler's; what the request changes in its logits, made at the first use.
        draft_token_ids: what the last finished step drafted, for a step that samples on the host.
        draft_probs: per draft that was drawn, the distribution it was drawn from, int64 [vocab];
            empty if the drafts are the likeliest tokens.
        rows_in_flight: rows of steps that were launched and are not finished; the host counts them
            as cached until it knows better.
        tokens_in_flight: tokens that those steps will bring at least.
        prompt_logprobs: collected over the chunks until the first response takes them.
        speculation: how its drafts have fared.
    """

    __slots__ = (
        "choice",
        "chunk_len",
        "draft_probs",
        "draft_token_ids",
        "edits",
        "max_total_tokens",
        "num_computed_tokens",
        "output_token_ids",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "rows_in_flight",
        "sampling_params",
        "speculation",
        "state",
        "stop_criteria",
        "tokens",
        "tokens_in_flight",
    )

    def __init__(
        self,
        message: NewRequest,
        max_seq_len: int,
        eos_token_ids: Collection[int] = (),
        tokenizer: Tokenizer | None = None,
        speculation: SpeculationStats | None = None,
    ) -> None:
        params, prompt = message.sampling_params, message.prompt_token_ids
        self.request_id = message.request_id
        self.prompt_token_ids = prompt
        self.sampling_params = params
        self.choice = message.choice
        self.tokens = list(prompt)
        self.output_token_ids: list[int] = []
        self.state = RequestState.WAITING
        self.num_computed_tokens = 0
        self.chunk_len = 0
        self.draft_token_ids: list[int] = []
        self.draft_probs: list[torch.Tensor] = []
        self.rows_in_flight = self.tokens_in_flight = 0
        wanted = max_seq_len if params.max_tokens is None else len(prompt) + params.max_tokens
        self.max_total_tokens = min(wanted, max_seq_len)
        self.stop_criteria = StopCriteria(
            params,
            self.max_total_tokens - len(prompt),
            eos_token_ids,
            _detokenizer(message, tokenizer),
        )
        self.edits: LogitsEdits | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self.speculation = speculation

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_remaining_prompt_tokens(self) -> int:
        """Prompt tokens that are not in the cache yet."""
        return max(0, self.prompt_len - self.num_computed_tokens)

    @property
    def num_assumed_tokens(self) -> int:
        """Cached tokens if everything in flight is accepted."""
        return self.num_computed_tokens + self.rows_in_flight

    @property
    def ends_in_flight(self) -> bool:
        """Whether the steps in flight bring the last token for certain."""
        tokens = len(self.output_token_ids) + self.tokens_in_flight
        return tokens >= self.stop_criteria.max_new_tokens

    @property
    def samples_on_host(self) -> bool:
        """Whether its tokens need more than the largest logit: the step has to wait for the one
        before."""
        params = self.sampling_params
        return (
            not params.greedy
            or params.logprobs is not None
            or params.prompt_logprobs is not None
            or bool(params.logit_bias)
            or bool(params.min_tokens)
            or has_penalties(params)
        )

    @property
    def is_last_chunk(self) -> bool:
        """Whether this step's chunk ends the prompt, so that its last row gives a token."""
        return self.num_computed_tokens + self.chunk_len >= self.prompt_len

    def append(self, token_id: int) -> None:
        """Add a generated token."""
        self.tokens.append(token_id)
        self.output_token_ids.append(token_id)

    def take_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """The collected prompt logprobs, the first time; None afterwards and when not asked for."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken


def has_penalties(params: SamplingParams) -> bool:
    """Whether earlier tokens change the logits."""
    return (
        bool(params.presence_penalty)
        or bool(params.frequency_penalty)
        or (params.repetition_penalty or 1.0) != 1.0
    )


def check_message(message: NewRequest, limits: RequestLimits) -> None:
    """Raise ValueError, naming value and limit, for a request that this engine cannot serve."""
    prompt, params = message.prompt_token_ids, message.sampling_params
    if not prompt:
        raise ValueError("the prompt is empty; it needs at least one token")
    if len(prompt) >= limits.max_seq_len:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, which leaves no room for a new one "
            f"within max_seq_len {limits.max_seq_len}"
        )
    if len(prompt) > limits.max_prompt_tokens:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, more than max_num_tokens "
            f"{limits.max_prompt_tokens}, and enable_chunked_prefill is off"
        )
    _check_ids("prompt", prompt, limits.vocab_size)
    _check_ids("logit_bias", params.logit_bias or (), limits.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids or (), limits.vocab_size)
    if params.seed is None and not params.greedy:
        # Drawn here, it would differ from rank to rank.
        raise ValueError(
            f"temperature {params.temperature} needs a seed; whoever sends it draws one"
        )


def _check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    outside = [i for i in ids if not 0 <= i < vocab_size] if ids else []
    if outside:
        raise ValueError(
            f"{name} has token id {outside[0]}; the vocabulary has {vocab_size} tokens"
        )


def _detokenizer(message: NewRequest, tokenizer: Tokenizer | None) -> IncrementalDetokenizer | None:
    params = message.sampling_params
    if tokenizer is None or not params.stop_strings:
        return None
    return IncrementalDetokenizer(
        tokenizer,
        message.prompt_token_ids,
        params.skip_special_tokens,
        params.spaces_between_special_tokens,
    )
