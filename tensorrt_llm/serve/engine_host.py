"""The life of the LLM inside the server process: loading, ready, then stopping or dead."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from enum import StrEnum
from typing import TYPE_CHECKING

from tensorrt_llm._torch.pyexecutor.messages import EngineStats
from tensorrt_llm.logger import logger
from tensorrt_llm.serve.errors import ApiError

if TYPE_CHECKING:
    from tensorrt_llm.llmapi import LLM

_WATCH_SECONDS = 0.1


class Phase(StrEnum):
    """Where the engine is in its life; only READY serves. The values are what clients are told."""

    LOADING = "the model is still loading"
    READY = "ready"
    STOPPING = "the server is shutting down"
    DEAD = "the engine has died"


class EngineHost:
    """Loads the LLM off the event loop, so that the server answers meanwhile, and watches it.

    Args:
        load: builds the LLM; it is ready when `load` returns.
    """

    def __init__(self, load: "Callable[[], LLM]") -> None:
        self.phase = Phase.LOADING
        self.loader: threading.Thread | None = None
        self._load = load
        self._llm: LLM | None = None

    async def run(self) -> None:
        """Load, then return when the engine has died.

        Raises:
            Exception: what `load` raised.
        """
        start = time.perf_counter()
        self._llm = await self._load_in_thread()
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY
            logger.info("ready after %.1f s", time.perf_counter() - start)
        while self._llm.is_healthy():
            await asyncio.sleep(_WATCH_SECONDS)
        if self.phase is Phase.READY:
            self.phase = Phase.DEAD

    def ready(self) -> "LLM":
        """The LLM; raises ApiError 503 saying why there is none to use."""
        if self.phase is not Phase.READY or self._llm is None:
            raise ApiError(503, self.phase.value)
        if not self._llm.is_healthy():  # has died since the watch last looked
            raise ApiError(503, Phase.DEAD.value)
        return self._llm

    def stats(self) -> EngineStats | None:
        """The engine's latest report, if it has made one."""
        return self._llm.latest_stats if self._llm else None

    def stop(self) -> None:
        """Refuse new requests from now on."""
        if self.phase is not Phase.DEAD:
            self.phase = Phase.STOPPING

    def shutdown(self) -> None:
        """End the rank processes."""
        if self._llm is not None:
            self._llm.shutdown()

    def _load_in_thread(self) -> "asyncio.Future[LLM]":
        """A daemon thread rather than the loop's pool, whose threads hold up the process's end."""
        result: Future[LLM] = Future()

        def work() -> None:
            try:
                result.set_result(self._load())
            except BaseException as error:
                result.set_exception(error)

        self.loader = threading.Thread(target=work, name="load", daemon=True)
        self.loader.start()
        return asyncio.wrap_future(result)
