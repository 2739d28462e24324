"""From what the user passes to a checked prompt of token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from tokenizers import Tokenizer

from tensorrt_llm._torch.pyexecutor.messages import EngineReady
from tensorrt_llm.llmapi.errors import RequestError
from tensorrt_llm.sampling_params import SamplingParams

# A text, token ids, or a mapping with "prompt" or "prompt_token_ids".
PromptInput = str | list[int] | Mapping[str, Any]
# Several of them.
PromptInputs = list[str] | list[list[int]] | list[Mapping[str, Any]] | list[PromptInput]

_KEYS = ("prompt", "prompt_token_ids")


@dataclass(frozen=True)
class Prompt:
    """Args: text: as given, if it was one. token_ids: not empty."""

    text: str | None
    token_ids: list[int]


@dataclass(frozen=True)
class RequestChecker:
    """Turns inputs into prompts and refuses what the engine could not serve.

    Args:
        tokenizer: None when there is none.
        engine: the engine's limits.
        max_prompt_tokens: longest prompt; below `engine.max_seq_len` when prompts are not chunked.
    """

    tokenizer: Tokenizer | None
    engine: EngineReady
    max_prompt_tokens: int

    def prompt_of(self, inputs: PromptInput, params: SamplingParams) -> Prompt:
        """Encode, truncate and check a prompt.

        Raises:
            RequestError: of another type, empty, too long, or with tokens outside the vocabulary.
        """
        text, token_ids = self._parse(inputs, params)
        if params.truncate_prompt_tokens is not None:
            token_ids = token_ids[-params.truncate_prompt_tokens :]
        if not token_ids:
            raise RequestError("the prompt is empty; it must have at least one token")
        self._check_ids("prompt_token_ids", token_ids)
        if len(token_ids) > self.max_prompt_tokens:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; it must have at most "
                f"{self.max_prompt_tokens} (max_seq_len {self.engine.max_seq_len}, "
                f"max_num_tokens {self.engine.max_num_tokens})"
            )
        return Prompt(text, token_ids)

    def params_for(self, prompt: Prompt, params: SamplingParams | None) -> SamplingParams:
        """Parameters with `max_tokens` set. No parameters at all generate what there is room for.

        Raises:
            RequestError: a field that does not fit the prompt, the vocabulary or the tokenizer.
        """
        room = self.engine.max_seq_len - len(prompt.token_ids)
        if params is None:
            params = SamplingParams()
            return replace(params, max_tokens=min(params.max_tokens or room, room))
        if params.max_tokens is not None and params.max_tokens > room:
            raise RequestError(
                f"the prompt's {len(prompt.token_ids)} tokens and max_tokens {params.max_tokens} "
                f"make {len(prompt.token_ids) + params.max_tokens}; "
                f"max_seq_len is {self.engine.max_seq_len}"
            )
        self._check_params(params)
        try:
            return replace(params, max_tokens=params.max_tokens or room)
        except ValueError as error:  # min_tokens above the room
            raise RequestError(str(error)) from None

    def _parse(self, inputs: PromptInput, params: SamplingParams) -> tuple[str | None, list[int]]:
        value = _value_of(inputs) if isinstance(inputs, Mapping) else inputs
        if isinstance(value, str):
            if self.tokenizer is None:
                raise RequestError(
                    "the prompt is a text, but there is no tokenizer; give token ids"
                )
            encoding = self.tokenizer.encode(value, add_special_tokens=params.add_special_tokens)
            return value, encoding.ids
        if is_token_ids(value):
            return None, list(value)
        raise RequestError(f"the prompt is {value!r}; it must be a text or a list of token ids")

    def _check_params(self, params: SamplingParams) -> None:
        if params.stop_strings and self.tokenizer is None:
            raise RequestError(
                f"stop is {params.stop!r}, but there is no tokenizer to find it with"
            )
        self._check_ids("stop_token_ids", params.stop_token_ids or [])
        self._check_ids("logit_bias", list(params.logit_bias or {}))
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            if wanted is not None and wanted > self.engine.vocab_size:
                raise RequestError(
                    f"{name} is {wanted}; the vocabulary has {self.engine.vocab_size} tokens"
                )

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        size = self.engine.vocab_size
        wrong = [i for i in token_ids if type(i) is not int or not 0 <= i < size]
        if wrong:
            raise RequestError(
                f"{name} has {wrong[0]!r}; a token id is at least 0 and below vocab_size {size}"
            )


def is_token_ids(inputs: object) -> TypeGuard[list[int]]:
    """Whether this is a list of integers: one prompt, not several. (So is the empty list.)"""
    return isinstance(inputs, list) and all(type(item) is int for item in inputs)


def _value_of(inputs: Mapping[str, Any]) -> Any:
    unknown = [key for key in inputs if key not in _KEYS]
    if unknown or len(inputs) != 1:
        raise RequestError(f"the prompt has keys {list(inputs)}; it must have one of {list(_KEYS)}")
    ((key, value),) = inputs.items()
    if (key == "prompt") != isinstance(value, str):
        kind = "a text" if key == "prompt" else "a list of token ids"
        raise RequestError(f"{key} is {value!r}; it must be {kind}")
    return value
