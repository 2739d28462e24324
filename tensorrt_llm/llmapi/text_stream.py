"""The text of one completion as it grows, with stop strings cut off."""

from collections.abc import Sequence

from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.tokenizer import IncrementalDetokenizer


class TextStream:
    """Text that can be shown to the user after each token.

    The engine decides where a request stops. Here the stop is cut off, and text that may turn out
    to be the beginning of a stop string is held back until that is settled. A character of which
    only the first bytes were generated is not shown, also not at the end.

    Args:
        detokenizer: fresh, after the prompt.
        params: of the request.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, params: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._include_stop = params.include_stop_str_in_output
        self._stops = [] if self._include_stop else params.stop_strings
        self._held = ""

    def append(self, token_ids: Sequence[int]) -> str:
        """What may be shown after these tokens, none of which ends the request."""
        shown = []
        for token_id in token_ids:
            text = self._held + self._detokenizer.append(token_id)
            end = len(text) - self._undecided(text)
            shown.append(text[:end])
            self._held = text[end:]
        return "".join(shown)

    def finish(self, token_ids: Sequence[int]) -> str:
        """The rest, when these tokens end the request by its length, or it ends otherwise."""
        return self._release("".join(map(self._detokenizer.append, token_ids)))

    def stop(self, token_ids: Sequence[int], stop_reason: int | str | None) -> str:
        """The rest, when the last of these tokens ends the request by a stop.

        Args:
            stop_reason: the stop string that the last token completes; otherwise that token itself
                is the stop: one of `stop_token_ids`, or an eos id (None).
        """
        if self._include_stop:
            return self.finish(token_ids)
        shown = self.append(token_ids[:-1])
        if not isinstance(stop_reason, str):
            return shown + self._release("")
        text = self._held + self._detokenizer.append(token_ids[-1])
        return shown + text.partition(stop_reason)[0]

    def _release(self, text: str) -> str:
        held, self._held = self._held, ""
        return held + text

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        longest = max(map(len, self._stops), default=0) - 1
        for size in range(min(longest, len(text)), 0, -1):
            end = text[-size:]
            if any(len(stop) > size and stop.startswith(end) for stop in self._stops):
                return size
        return 0
