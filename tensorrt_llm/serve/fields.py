"""How a request body is read: each field is served, refused by name, or known to have no effect.

A served field is a field of the pydantic model; every other name a client may send stands in the
model's `UNSERVED` table. A name in neither place is an error, so nothing is dropped silently.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from tensorrt_llm.serve.errors import ApiError, nearest, short


@dataclass(frozen=True)
class Served:
    """The field does what its description says."""

    description: str


@dataclass(frozen=True)
class Refused:
    """Any value but null and the `neutral` ones, which mean the same as absence, is a 400."""

    reason: str
    neutral: tuple[object, ...] = ()


@dataclass(frozen=True)
class Inert:
    """Accepted and without effect on the answer, for the reason given."""

    reason: str


Unserved = dict[str, Refused | Inert]
Account = Served | Refused | Inert


class RequestModel(BaseModel):
    """A JSON object of a request: exact types, no unknown names, null means absent."""

    model_config = ConfigDict(extra="forbid", strict=True)
    UNSERVED: ClassVar[Unserved] = {}

    @classmethod
    @cache
    def accounts(cls) -> dict[str, Account]:
        """Every name this object may hold and what becomes of it."""
        served = {name: Served(f.description or "") for name, f in cls.model_fields.items()}
        return {**served, **cls.UNSERVED}

    @model_validator(mode="before")
    @classmethod
    def _account_for_every_name(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data  # pydantic says what it should have been
        for name, value in data.items():
            cls._check_name(name, value)
        return {name: value for name, value in data.items() if name in cls.model_fields}

    @classmethod
    def _check_name(cls, name: str, value: object) -> None:
        account = cls.accounts().get(name)
        if account is None:
            raise _field_error(name, f"is not a field here{nearest(name, cls.accounts())}")
        if isinstance(account, Refused) and value is not None and value not in account.neutral:
            raise _field_error(name, f"is {short(value)}, which is not supported: {account.reason}")


def field_error(field: str, value: object, right: str) -> ValueError:
    """For validators of whole objects: which field is at fault and what would be right."""
    return _field_error(field, f"is {short(value)}; it must be {right}")


def _field_error(field: str, problem: str) -> PydanticCustomError:
    return PydanticCustomError("field", "{problem}", {"field": field, "problem": problem})


def request_error(error: Mapping[str, Any], location: tuple[int | str, ...]) -> ApiError:
    """The 400 for one entry of pydantic's `errors()`, found at `location` of the body."""
    if error["type"] == "field":
        location = (*location, error["ctx"]["field"])
    path = _path(location)
    return ApiError(400, f"{path or 'the body'} {_problem(error)}", param=path or None)


def _problem(error: Mapping[str, Any]) -> str:
    match error["type"]:
        case "field":
            return str(error["msg"])
        case "missing":
            return "is missing"
        case "json_invalid":
            return f"is not JSON: {error['ctx']['error']}"
        case "dict_type" | "model_type" | "model_attributes_type":
            return (
                f"is {short(error['input'])}; it must be a JSON object (sent as application/json)"
            )
    message = error["msg"].removeprefix("Value error, ")
    return f"is {short(error['input'])}; {message[0].lower()}{message[1:]}"


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in location]
    return "".join(steps).removeprefix(".")
