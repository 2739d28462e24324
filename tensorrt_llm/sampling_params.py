"""How one request picks its tokens and when it ends: the fields of TensorRT-LLM's `SamplingParams`
served here."""

import math
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling and stop parameters of one request.

    Args:
        max_tokens: most tokens to generate; None means up to the engine's `max_seq_len`.
        min_tokens: no eos, stop id or stop string ends the request before this many tokens.
        n: independent completions of the same prompt.
        temperature: 0 is greedy; None is greedy as well, as in TensorRT-LLM.
        top_k: keep the k most likely tokens; None or 0 keeps all.
        top_p: smallest set of tokens whose probability reaches p; None or 1 keeps all.
        min_p: drop tokens below min_p times the most likely one's probability.
        seed: same seed and prompt, same tokens, whatever else is in the batch. None draws one.
        repetition_penalty: > 1 makes tokens of prompt and output less likely (divides / multiplies
            the logit).
        presence_penalty: subtracted once from the logit of each token already generated.
        frequency_penalty: subtracted once per occurrence among the generated tokens.
        logit_bias: token id -> value added to its logit before anything else.
        stop: strings that end the output; cut off unless `include_stop_str_in_output`.
        stop_token_ids: ids that end the output, beside the model's eos ids.
        ignore_eos: the model's eos ids do not end the output; `stop_token_ids` still do.
        logprobs: None for none; k >= 0 gives the log probabilities of the sampled token and of the
            k most likely ones (raw distribution, before temperature and filters).
        prompt_logprobs: as `logprobs`, for the prompt's tokens (the first one has none).
        detokenize, skip_special_tokens, spaces_between_special_tokens, add_special_tokens: text
            side.
        truncate_prompt_tokens: keep only the last so many prompt tokens.

    Raises:
        ValueError: naming the field, its value and what would be right.
    """

    max_tokens: int | None = 32
    min_tokens: int = 0
    n: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    _stop_list: list[str] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        self._stop_list = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self._check_counts()
        self._check_probabilities()
        self._check_stops()

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return self._stop_list

    @property
    def greedy(self) -> bool:
        return not self.temperature or self.top_k == 1

    def _check_counts(self) -> None:
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            "max_tokens",
            self.max_tokens,
            "at least 1",
        )
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"at most max_tokens ({self.max_tokens})",
        )
        _require(self.n >= 1, "n", self.n, "at least 1")
        _require(
            self.logprobs is None or self.logprobs >= 0, "logprobs", self.logprobs, "at least 0"
        )
        _require(
            self.prompt_logprobs is None or self.prompt_logprobs >= 0,
            "prompt_logprobs",
            self.prompt_logprobs,
            "at least 0",
        )
        _require(
            self.truncate_prompt_tokens is None or self.truncate_prompt_tokens >= 1,
            "truncate_prompt_tokens",
            self.truncate_prompt_tokens,
            "at least 1",
        )

    def _check_probabilities(self) -> None:
        _require(
            _within(self.temperature, 0.0, math.inf),
            "temperature",
            self.temperature,
            "finite and at least 0",
        )
        _require(
            self.top_k is None or self.top_k >= 0, "top_k", self.top_k, "at least 0 (0 keeps all)"
        )
        _require(
            self.top_p is None or 0.0 < self.top_p <= 1.0,
            "top_p",
            self.top_p,
            "above 0 and at most 1",
        )
        _require(_within(self.min_p, 0.0, 1.0), "min_p", self.min_p, "from 0 to 1")
        _require(
            self.repetition_penalty is None
            or (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0),
            "repetition_penalty",
            self.repetition_penalty,
            "finite and above 0",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require(
                _within(getattr(self, name), -2.0, 2.0), name, getattr(self, name), "from -2 to 2"
            )
        for token, bias in (self.logit_bias or {}).items():
            _require(math.isfinite(bias), f"logit_bias[{token}]", bias, "finite")
        _require(
            self.seed is None or -(2**63) <= self.seed < 2**63,
            "seed",
            self.seed,
            "a signed 64-bit integer",
        )

    def _check_stops(self) -> None:
        _require(all(self._stop_list), "stop", self.stop, "without empty strings")
        _require(
            all(t >= 0 for t in self.stop_token_ids or []),
            "stop_token_ids",
            self.stop_token_ids,
            "token ids",
        )


def _within(value: float | None, low: float, high: float) -> bool:
    return value is None or (math.isfinite(value) and low <= value <= high)


def _require(ok: bool, name: str, value: object, right: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}; it must be {right}")
