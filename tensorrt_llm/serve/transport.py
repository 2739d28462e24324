"""Between ASGI and the answers: event streams, clients that leave, errors as JSON."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from tensorrt_llm.executor.errors import EngineDeadError
from tensorrt_llm.logger import logger
from tensorrt_llm.serve.errors import ApiError
from tensorrt_llm.serve.fields import request_error

_CLIENT_CLOSED = 499  # nobody is there to read it; the number is nginx's


class EventStream(StreamingResponse):
    """Server-sent events from `chunks`, ended by `[DONE]`, after an error event if they fail.

    Args:
        chunks: JSON objects.
        close: called when the last event is sent or the client has left, whatever comes first.
    """

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], close: Callable[[], None]) -> None:
        super().__init__(
            _events(chunks), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    try:
        async for chunk in chunks:
            yield _event(chunk)
    except Exception as error:
        yield _event(api_error(error).body())
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def unless_disconnected(
    request: Request, work: Coroutine[Any, Any, dict[str, Any]]
) -> Response:
    """The result of `work` as JSON; `work` is cancelled when the client leaves before its end."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return Response(status_code=_CLIENT_CLOSED)
        return JSONResponse(task.result())
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def api_error(error: Exception) -> ApiError:
    """What a client is told about `error`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):  # its traceback is in the log already
        cause, *rest = str(error).splitlines()
        return ApiError(500, f"the engine has died: {' ... '.join([cause, *rest[-1:]])}")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {error}")


async def answer_error(request: Request, error: Exception) -> Response:
    """Any exception as OpenAI's error object."""
    answer = api_error(error)
    return JSONResponse(answer.body(), status_code=answer.status)


async def answer_invalid_body(request: Request, error: Exception) -> Response:
    """A body that is not JSON or does not fit its model: 400 naming the first field at fault."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    location = () if first["type"] == "json_invalid" else tuple(first["loc"][1:])
    return await answer_error(request, request_error(first, location))


async def answer_http_error(request: Request, error: Exception) -> Response:
    """An unknown path or method, in the same form as all other errors."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return await answer_error(request, ApiError(error.status_code, message))
