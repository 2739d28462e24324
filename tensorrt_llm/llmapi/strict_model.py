"""Configuration that forgives nothing: no unknown key, no wrong type, nothing ignored."""

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from tensorrt_llm.llmapi.unsupported import Neutral


class StrictModel(BaseModel):
    """A pydantic model without coercion ("4" and True are no integers) that knows near misses.

    Attributes:
        neutral_values: keys of TensorRT-LLM's that are not fields here.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    neutral_values: ClassVar[Neutral] = {}

    @classmethod
    def create(cls, values: Mapping[str, Any]) -> Self:
        """From keyword arguments.

        Raises:
            ValueError: a line for each thing that is wrong: key, value and what would be right.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            raise ValueError("\n".join(map(_describe, error.errors()))) from None

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        problems = [p for key in values if (p := cls._problem_of(key, values[key]))]
        if problems:
            raise ValueError("\n".join(problems))
        return {key: value for key, value in values.items() if key in cls.model_fields}

    @classmethod
    def _problem_of(cls, key: str, value: Any) -> str | None:
        if key in cls.model_fields:
            return None
        if key not in cls.neutral_values:
            return f"unknown key {key!r}{_nearest(key, [*cls.model_fields, *cls.neutral_values])}"
        neutral = cls.neutral_values[key]
        if any(value == right and type(value) is type(right) for right in neutral):
            return None
        accepted = " or ".join(map(repr, neutral))
        return (
            f"TensorRT-LLM's {key!r} is not supported by this project yet: "
            f"it is {value!r}, and only {accepted} is accepted"
        )


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _describe(error: Any) -> str:
    """For example `kv_cache_config.max_tokens is '5'; input should be a valid integer`."""
    path = ".".join(map(str, error["loc"]))
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"{path} is missing"
    if error["type"] == "value_error":
        return "\n".join(f"{path}: {line}" if path else line for line in message.splitlines())
    return f"{path} is {error['input']!r}; {message[0].lower()}{message[1:]}"
