"""When a request has generated enough: eos and stop ids, stop strings, and its length."""

from collections.abc import Collection
from typing import NamedTuple

from tensorrt_llm._torch.pyexecutor.messages import FinishReason
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.tokenizer import IncrementalDetokenizer


class Finish(NamedTuple):
    """How a request ended; `stop_reason` as in `LlmResponse`."""

    reason: FinishReason
    stop_reason: int | str | None = None


_LENGTH = Finish(FinishReason.LENGTH)
_EOS = Finish(FinishReason.STOP)


class StopCriteria:
    """Judges each generated token of one request.

    On one token a stop goes before the length; among stops eos goes before stop ids, these before
    strings, and the string that begins first before the others.

    Args:
        params: stop fields and `min_tokens`.
        max_new_tokens: tokens after which the request ends with LENGTH.
        eos_token_ids: the model's; `params.ignore_eos` drops them.
        detokenizer: makes the text that stop strings are looked for in; needed only when there are
            any.

    Raises:
        ValueError: stop strings without a detokenizer.
    """

    def __init__(
        self,
        params: SamplingParams,
        max_new_tokens: int,
        eos_token_ids: Collection[int] = (),
        detokenizer: IncrementalDetokenizer | None = None,
    ) -> None:
        self.max_new_tokens = max_new_tokens
        self.min_tokens = params.min_tokens
        self._eos_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self.stop_ids = self._eos_ids | frozenset(params.stop_token_ids or ())
        self._matcher: StopStringMatcher | None = None
        if params.stop_strings:
            if detokenizer is None:
                raise ValueError(
                    f"stop {params.stop_strings} needs a tokenizer, and the engine has none"
                )
            self._matcher = StopStringMatcher(params.stop_strings, detokenizer)

    def check(self, token_id: int, num_output_tokens: int) -> Finish | None:
        """Judge one token, in order.

        Args:
            token_id: the token just generated.
            num_output_tokens: tokens generated so far, this one included.

        Returns:
            How the request ends with this token, or None if it goes on.
        """
        # The matcher reads every token, also those that may not stop yet: a stop string can begin
        # in them.
        matched = self._matcher.append(token_id) if self._matcher else None
        if num_output_tokens >= self.min_tokens:
            if token_id in self.stop_ids:
                return _EOS if token_id in self._eos_ids else Finish(FinishReason.STOP, token_id)
            if matched is not None:
                return Finish(FinishReason.STOP, matched)
        return _LENGTH if num_output_tokens >= self.max_new_tokens else None


class StopStringMatcher:
    """Finds stop strings in a text that arrives token by token.

    Args:
        strings: not empty, none of them empty.
        detokenizer: gives the text that each token completes.
    """

    def __init__(self, strings: list[str], detokenizer: IncrementalDetokenizer) -> None:
        self._strings = strings
        self._detokenizer = detokenizer
        self._overlap = max(map(len, strings)) - 1
        self._tail = ""  # the end of the older text, where a match may have begun

    def append(self, token_id: int) -> str | None:
        """The stop string that this token completes; of several the one that begins first."""
        text = self._tail + self._detokenizer.append(token_id)
        found = [(text.find(s, self._first_start(s)), i) for i, s in enumerate(self._strings)]
        matches = [hit for hit in found if hit[0] >= 0]
        self._tail = text[-self._overlap :] if self._overlap else ""
        return self._strings[min(matches)[1]] if matches else None

    def _first_start(self, string: str) -> int:
        """Earliest start of a match that ends in the new text; others were judged before."""
        return max(0, len(self._tail) - len(string) + 1)
