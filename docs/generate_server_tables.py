"""Writes the tables of docs/server.md from the code: `python docs/generate_server_tables.py`.

The text between `<!-- NAME -->` and `<!-- end -->` belongs to this script, and a test compares it
with the code.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from fastapi.routing import APIRoute

from tensorrt_llm.commands.serve import serve
from tensorrt_llm.serve.engine_host import EngineHost
from tensorrt_llm.serve.fields import Inert, Refused, RequestModel, Served
from tensorrt_llm.serve.openai_protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    Message,
    StreamOptions,
    TextPart,
)
from tensorrt_llm.serve.openai_server import OpenAIServer

DOCUMENT = Path(__file__).parent / "server.md"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines
    )


def endpoints() -> str:
    def nothing() -> None:
        raise AssertionError("the model is not needed to list the endpoints")

    rows = [
        (f"`{method} {route.path}`", (route.endpoint.__doc__ or "").strip().rstrip("."))
        for route in OpenAIServer(EngineHost(nothing), "model").app.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods)
    ]
    return table(["endpoint", "answer"], rows)


def flags() -> str:
    options = [option for option in serve.params if isinstance(option, click.Option)]
    return table(["flag", "default", "meaning"], [_flag(option) for option in options])


def _flag(option: click.Option) -> tuple[str, str, str]:
    """A default that click does not know stands in the help text, as `[default: ...]`."""
    text, _, told = (option.help or "").partition("  [default: ")
    names = ", ".join(f"`{name}`" for name in option.opts)
    return names, told.rstrip("]") or f"`{option.default}`", text


def served(model: type[RequestModel]) -> str:
    accounts = model.accounts().items()
    return table(
        ["served", "meaning"],
        [(f"`{name}`", one.description) for name, one in accounts if isinstance(one, Served)],
    )


def unserved(model: type[RequestModel]) -> str:
    refused = [
        (f"`{name}`", _values(one), one.reason)
        for name, one in model.accounts().items()
        if isinstance(one, Refused)
    ]
    inert = [
        (f"`{name}`", "anything; no effect", one.reason)
        for name, one in model.accounts().items()
        if isinstance(one, Inert)
    ]
    return table(["not served", "accepted values", "why"], refused + inert)


def _values(refused: Refused) -> str:
    return ", ".join(["null", *(f"`{json.dumps(value)}`" for value in refused.neutral)])


def tables() -> dict[str, str]:
    """Every table of the document by its name."""
    result = {"endpoints": endpoints(), "flags": flags()}
    for model in (CompletionRequest, ChatCompletionRequest, Message, TextPart, StreamOptions):
        result[model.__name__] = f"{served(model)}\n\n{unserved(model)}"
    return result


def filled(text: str) -> str:
    """`text` with every table brought up to date.

    Raises:
        ValueError: a table has no place in the text.
    """
    for name, content in tables().items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(
            pattern, lambda m, c=content: f"{m[1]}{c}\n{m[2]}", text, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(
                f"the document has {count} places for the table {name!r}; it must be 1"
            )
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text()))
