"""One server process from its socket to its exit code."""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from tensorrt_llm.executor.errors import EngineDeadError
from tensorrt_llm.logger import logger
from tensorrt_llm.serve.engine_host import EngineHost, Phase
from tensorrt_llm.serve.openai_server import OpenAIServer

if TYPE_CHECKING:
    from tensorrt_llm.llmapi import LLM

_DRAIN_SECONDS = 1.0  # running requests may finish for so long once the server is told to stop
_EXIT_SECONDS = 1.9  # and then the process is gone, even if a rank does not leave
_LINGER_SECONDS = 0.5  # after the engine's death: time to answer 503 instead of closing the door


def bind(host: str, port: int) -> socket.socket:
    """A listening address, before anything slow begins; port 0 takes a free one.

    Raises:
        OSError: naming the address that cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # Of localhost's two addresses 127.0.0.1 is the one that people type.
        family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sock


def serve(
    load: "Callable[[], LLM]",
    sock: socket.socket,
    model_name: str,
    chat_template: str | None = None,
) -> int:
    """Serve until a signal (exit code 0), or until the engine fails to start or dies (1).

    Args:
        load: builds the LLM; called in a thread while the server already answers `/health`.
        sock: from `bind`.
        model_name: what clients call the model.
        chat_template: Jinja source in place of the tokenizer's template.
    """
    host = EngineHost(load)
    api = OpenAIServer(host, model_name, chat_template)
    server = _Server(uvicorn.Config(api.app, log_config=None, lifespan="off"), host, api)
    asyncio.run(_serve(host, server, sock))
    host.shutdown()
    server.call_off_last_resort()
    code = server.exit_code
    if host.loader is not None and host.loader.is_alive():
        # The loading thread cannot be interrupted. Its ranks end when they see this process gone.
        sys.stderr.flush()
        os._exit(code)
    return code


async def _serve(host: EngineHost, server: "_Server", sock: socket.socket) -> None:
    address, port = sock.getsockname()[:2]
    logger.info("listening on http://%s:%d, loading the model", address, port)
    life = asyncio.create_task(_live(host, server))
    await server.serve(sockets=[sock])
    life.cancel()


async def _live(host: EngineHost, server: "_Server") -> None:
    """End the server when the engine cannot start or has died, and say why."""
    try:
        await host.run()
        logger.error("%s, so the server ends", Phase.DEAD)
    except Exception as error:
        host.phase = Phase.DEAD
        _log_failed_start(error)
    if not server.should_exit:
        server.exit_code = 1
        await asyncio.sleep(_LINGER_SECONDS)
        server.should_exit = True


def _log_failed_start(error: Exception) -> None:
    if isinstance(error, EngineDeadError):
        logger.error("the engine did not start, for the reason above")
    else:  # a traceback only where the message alone would not tell the user what to change
        bug = not isinstance(error, ValueError | OSError)
        logger.error("the model cannot be served: %s", error, exc_info=bug)


class _Server(uvicorn.Server):
    """Uvicorn that drains for a bounded time and leaves the exit code to us."""

    def __init__(self, config: uvicorn.Config, host: EngineHost, api: OpenAIServer) -> None:
        super().__init__(config)
        self.exit_code = 0
        self._host = host
        self._api = api
        self._last_resort: threading.Timer | None = None

    def call_off_last_resort(self) -> None:
        """Everything has ended by itself: whoever called may live on."""
        if self._last_resort is not None:
            self._last_resort.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop accepting; unlike uvicorn's own, the signal is not raised again at the end."""
        logger.info("%s: stopping", signal.Signals(sig).name)
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._host.stop()
        self._last_resort = threading.Timer(_EXIT_SECONDS, os._exit, [self.exit_code])
        self._last_resort.daemon = True
        self._last_resort.start()
        asyncio.get_running_loop().call_later(_DRAIN_SECONDS, self._api.abort_all)
        await super().shutdown(sockets)
