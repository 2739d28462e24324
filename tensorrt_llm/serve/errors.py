"""The one error that leaves the server, in OpenAI's JSON form."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

_TYPES = {400: "invalid_request_error", 404: "not_found_error", 405: "invalid_request_error"}


class ApiError(Exception):
    """An HTTP error answer.

    Args:
        status: HTTP status code.
        message: what is wrong, with the offending name and value.
        param: the request field at fault, if it is one.
        code: OpenAI's machine-readable code, if there is one.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        # A lone surrogate from a "\ud800" in the request cannot be sent back as UTF-8.
        self.message = message.encode("utf-8", "backslashreplace").decode()
        self.param = param and param.encode("utf-8", "backslashreplace").decode()
        self.status = status
        self.code = code
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer, also sent as the last event of a stream that fails."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def short(value: object, limit: int = 80) -> str:
    """`repr(value)` cut to `limit` characters, for messages."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the known name closest to `name`, or nothing."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
