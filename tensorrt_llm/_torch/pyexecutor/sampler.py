"""From logits to tokens, on the logits' device, with one transfer to the host per step.

Order per row: logit_bias, repetition / presence / frequency penalty, min_tokens mask; then greedy
rows take the largest logit and the others temperature, top-k, top-p, min-p and a draw.

A row whose draft was drawn itself (rejection sampling) gets the draft or a draw from what is left
of the row's distribution, see `accept_or_redraw`. All draws are exact integer arithmetic and do not
depend on the rest of the batch. Neither do the random numbers, which are hashes of seed, choice and
the token's place in the output.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tensorrt_llm._torch.custom_ops.sampling import NUM_FILTERS, draw_tokens, probabilities
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest, has_penalties
from tensorrt_llm._torch.pyexecutor.messages import Logprob, TokenLogprobs
from tensorrt_llm._torch.speculative.rejection_sampling import accept_or_redraw

_LOGPROB_ROWS = 128  # rows of a prompt that are normalised at a time; bounds the scratch memory


class SampledToken(NamedTuple):
    """One row's result; with an `error` its `token_id` means nothing."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class TorchSampler:
    """Samples one token per row; keeps no state but what it hangs onto the requests."""

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        requests: Sequence[LlmRequest],
        drafted: Sequence[Sequence[int]] | None = None,
    ) -> list[SampledToken]:
        """Next token of each request.

        Args:
            logits: fp32 [rows, vocab], not modified.
            requests: one per row.
            drafted: per row, the drafts that come after the request's tokens and before this row;
                the row is sampled as if they were part of the output. None: no drafts. The
                row's own draft is the request's next one.

        Returns:
            One entry per row. A row whose largest logit is not finite (NaN counts as largest) has
            an error.
        """
        drafted = drafted if drafted is not None else [()] * len(requests)
        edited = _edit(logits, requests, drafted)
        best, ids = edited.max(dim=-1)
        drawn: list[int] = []
        verified: list[int] = []
        for i, request in enumerate(requests):
            if not request.sampling_params.greedy:
                draft_was_drawn = len(drafted[i]) < len(request.draft_probs)
                (verified if draft_was_drawn else drawn).append(i)
        if drawn:
            ids[drawn] = _draw(edited, requests, drafted, drawn)
        if verified:
            ids[verified] = _verify(edited, requests, drafted, verified)
        # Ids are below 2**53, so one float64 transfer brings them and the largest logits.
        host_best, host_ids = torch.stack((best, ids.double())).tolist()
        if all(map(math.isfinite, host_best)) and not _any_logprobs(requests):
            return [SampledToken(int(i)) for i in host_ids]
        logprobs = _sampled_logprobs(logits, ids, requests)
        return [
            SampledToken(int(token), logprobs.get(i), logits_error(host_best[i], requests[i]))
            for i, token in enumerate(host_ids)
        ]

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: torch.Tensor, next_tokens: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        """What each position made of the prompt token that follows it.

        Args:
            logits: fp32 [at least len(next_tokens), vocab], one row per position.
            next_tokens: the token after each position.
            num_top: most likely tokens to list beside it.

        Raises:
            FloatingPointError: a row contains NaN.
        """
        chosen = torch.tensor(next_tokens, dtype=torch.int64, device=logits.device)
        result: list[TokenLogprobs] = []
        for start in range(0, len(next_tokens), _LOGPROB_ROWS):
            ids = chosen[start : start + _LOGPROB_ROWS]
            result += _logprobs(logits[start : start + len(ids)], ids, [num_top] * len(ids))
        if any(math.isnan(p.logprob) for entry in result for p in entry.values()):
            raise FloatingPointError("logits of the prompt contain NaN")
        return result


class LogitsEdits:
    """What one request changes in its logits row before sampling, with its tensors kept on the
    device.

    Every edit lets NaN through, so that one look at the largest logit afterwards sees it.
    """

    def __init__(self, request: LlmRequest, vocab_size: int, device: torch.device) -> None:
        params = request.sampling_params
        self._params = params
        self._bias = _optional_pairs(params.logit_bias, device)
        self._stop_ids = torch.tensor(sorted(request.stop_criteria.stop_ids), device=device).long()
        self._num_counted = 0
        if has_penalties(params):
            self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
            self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._in_prompt[torch.tensor(request.prompt_token_ids, device=device)] = True

    @staticmethod
    def wanted(request: LlmRequest, num_drafted: int) -> bool:
        """Whether the request changes the row after so many drafts at all."""
        params = request.sampling_params
        return (
            len(request.output_token_ids) + num_drafted < params.min_tokens
            or bool(params.logit_bias)
            or has_penalties(params)
        )

    def apply(self, row: torch.Tensor, request: LlmRequest, drafted: Sequence[int]) -> None:
        """Edit the row after `drafted`, fp32 [vocab], in place."""
        if self._bias is not None:
            ids, values = self._bias
            row[ids] += values
        if has_penalties(self._params):
            self._count(request.output_token_ids)
            self._add(drafted, 1)
            self._penalise(row)
            self._add(drafted, -1)
        if len(request.output_token_ids) + len(drafted) < self._params.min_tokens:
            row[self._stop_ids] += -math.inf

    def _count(self, output_token_ids: list[int]) -> None:
        """Bring the counts up to date with the output."""
        self._add(output_token_ids[self._num_counted :], 1)
        self._num_counted = len(output_token_ids)

    def _add(self, tokens: Sequence[int], times: int) -> None:
        for token in tokens:
            self._counts[token] += times

    def _penalise(self, row: torch.Tensor) -> None:
        """Repetition counts prompt and output, as in transformers; the others only the output."""
        params, generated = self._params, self._counts > 0
        if repetition := params.repetition_penalty:
            weaker = torch.where(row > 0, row / repetition, row * repetition)
            row.copy_(torch.where(generated | self._in_prompt, weaker, row))
        if presence := params.presence_penalty:
            row -= presence * generated
        if frequency := params.frequency_penalty:
            row -= frequency * self._counts


def _optional_pairs(
    bias: dict[int, float] | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not bias:
        return None
    ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
    return ids, torch.tensor(list(bias.values()), dtype=torch.float32, device=device)


def _edit(
    logits: torch.Tensor, requests: Sequence[LlmRequest], drafted: Sequence[Sequence[int]]
) -> torch.Tensor:
    """The logits themselves if no request changes them, else an edited copy."""
    rows = [i for i, r in enumerate(requests) if LogitsEdits.wanted(r, len(drafted[i]))]
    if not rows:
        return logits
    edited = logits.clone()
    for i in rows:
        request = requests[i]
        if request.edits is None:
            request.edits = LogitsEdits(request, logits.shape[1], logits.device)
        request.edits.apply(edited[i], request, drafted[i])
    return edited


def logits_error(best: float, request: LlmRequest) -> str | None:
    """What is wrong with a row whose largest logit is `best`; None if it is finite."""
    if math.isfinite(best):
        return None
    what = "contain NaN" if math.isnan(best) else f"have {best} as their largest value"
    return f"logits of request {request.request_id} {what}"


def _draw(
    edited: torch.Tensor,
    requests: Sequence[LlmRequest],
    drafted: Sequence[Sequence[int]],
    rows: list[int],
) -> torch.Tensor:
    """Tokens of `rows` by temperature, filters and a draw: int64 [len(rows)]."""
    table = [
        (*filters_of(requests[i], edited.shape[1]), _target_uniform(requests[i], len(drafted[i])))
        for i in rows
    ]
    columns = torch.tensor(table, dtype=torch.float64).to(edited.device)
    return draw_tokens(edited[rows], columns[:, :NUM_FILTERS], columns[:, NUM_FILTERS])


def _verify(
    edited: torch.Tensor,
    requests: Sequence[LlmRequest],
    drafted: Sequence[Sequence[int]],
    rows: list[int],
) -> torch.Tensor:
    """Tokens of `rows` whose drafts were drawn: the draft or another one, int64 [len(rows)]."""
    table: list[tuple[float, ...]] = []
    for i in rows:
        request, place = requests[i], len(drafted[i])
        draft = request.draft_token_ids[place]
        uniforms = (_accept_uniform(request, place), _target_uniform(request, place))
        table.append((*filters_of(request, edited.shape[1]), draft, *uniforms))
    columns = torch.tensor(table, dtype=torch.float64).to(edited.device)
    drafts, accepting, redrawing = columns[:, NUM_FILTERS:].unbind(1)
    target_probs = probabilities(edited[rows], columns[:, :NUM_FILTERS])
    draft_probs = torch.stack([requests[i].draft_probs[len(drafted[i])] for i in rows])
    return accept_or_redraw(target_probs, draft_probs, drafts.long(), accepting, redrawing)


def filters_of(request: LlmRequest, vocab_size: int) -> tuple[float, float, float, float]:
    """Temperature, top-k, top-p, min-p of a request that is not greedy; neutral if not set."""
    params = request.sampling_params
    assert params.temperature is not None
    return (
        params.temperature,
        params.top_k or vocab_size,
        params.top_p or 1.0,
        params.min_p or 0.0,
    )


def draft_uniform(request: LlmRequest, place: int) -> float:
    """For drawing the next step's draft at `place`. The output is longer in each step, so that its
    length and the place name one draft."""
    params, start = request.sampling_params, len(request.output_token_ids)
    return uniform(params.seed, request.choice, start, place, stream=b"draft")


def _accept_uniform(request: LlmRequest, num_drafted: int) -> float:
    """For accepting the draft after so many others."""
    index = len(request.output_token_ids) + num_drafted
    return uniform(request.sampling_params.seed, request.choice, index, stream=b"accept")


def _target_uniform(request: LlmRequest, num_drafted: int) -> float:
    """For drawing a token from the target, or from what rejecting its draft leaves."""
    index = len(request.output_token_ids) + num_drafted
    return uniform(request.sampling_params.seed, request.choice, index)


def uniform(seed: int | None, choice: int, *place: int, stream: bytes = b"") -> float:
    """A number in [0, 1) that depends on nothing but its arguments.

    Args:
        seed: the request's, signed 64-bit.
        choice: which of `n` siblings.
        place: of the token in the output.
        stream: at most 16 bytes; numbers of different streams are independent.

    Raises:
        ValueError: no seed.
    """
    if seed is None:
        raise ValueError("sampling needs a seed")
    message = struct.pack(f"<{2 + len(place)}q", seed, choice, *place)
    digest = hashlib.blake2b(message, digest_size=8, person=stream).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _any_logprobs(requests: Sequence[LlmRequest]) -> bool:
    return any(r.sampling_params.logprobs is not None for r in requests)


def _sampled_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, requests: Sequence[LlmRequest]
) -> dict[int, TokenLogprobs]:
    """Row -> logprobs, for the rows that want them."""
    wanted = {
        i: r.sampling_params.logprobs
        for i, r in enumerate(requests)
        if r.sampling_params.logprobs is not None
    }
    if not wanted:
        return {}
    rows = list(wanted)
    entries = _logprobs(logits[rows], ids[rows], list(wanted.values()))
    return dict(zip(rows, entries, strict=True))


def _logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """The chosen token, first, and the `num_top` most likely ones of each row of raw logits."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = chosen.unsqueeze(1)
    own = logprobs.gather(1, chosen)
    rank = (logprobs > own).sum(dim=-1, keepdim=True) + 1
    top, top_ids = logprobs.topk(min(max(num_top), logits.shape[1]), dim=-1)
    head = torch.cat((chosen.double(), own.double(), rank.double()), dim=1).tolist()
    tail = torch.stack((top_ids.double(), top.double()), dim=2).tolist()
    return [_entry(h, t[:k]) for h, t, k in zip(head, tail, num_top, strict=True)]


def _entry(chosen: list[float], top: list[list[float]]) -> TokenLogprobs:
    """`chosen` is [id, logprob, rank]; `top` has [id, logprob] in order."""
    entry = {int(chosen[0]): Logprob(chosen[1], int(chosen[2]))}
    for rank, (token, logprob) in enumerate(top, start=1):
        entry.setdefault(int(token), Logprob(logprob, rank))
    return entry
