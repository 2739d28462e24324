"""The server process's side of the engine: starts ranks, sends requests, hands out responses."""

import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, TypeVar

import zmq

from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig
from tensorrt_llm._torch.pyexecutor.messages import (
    CancelRequest,
    EngineDead,
    EngineReady,
    EngineStats,
    LlmResponse,
    NewRequest,
    Shutdown,
)
from tensorrt_llm.executor.errors import EngineDeadError
from tensorrt_llm.executor.ipc import Receiver, Sender
from tensorrt_llm.executor.ranks import (
    LaunchedRanks,
    Ranks,
    SpawnedRanks,
    python_command,
    ranks_are_launched,
)
from tensorrt_llm.logger import logger

T = TypeVar("T")
# Gets every response of a request, and the engine's death if that comes first. Runs on the reader
# thread.
Sink = Callable[[LlmResponse | EngineDeadError], None]

_GRACE_S = 2.0  # for ranks to leave by themselves
_INQUEST_S = 0.5  # for the other ranks to say what they died of
_MAX_STATS = 1000
_RUN_WORKER = "from tensorrt_llm.executor.worker import main; main()"


class GenerationExecutor:
    """The ranks of one engine. Any thread may use it.

    The constructor starts the ranks and returns; `wait_ready` waits until they can decode, so that
    the caller can do something useful meanwhile. Responses arrive on one reader thread.

    Args:
        config: rank 0's configuration; the others' differ by their rank.
        worker_command: the command of a spawned rank, for tests with another engine.

    Raises:
        ValueError: the launched ranks are not as many as the configuration needs.
    """

    def __init__(
        self, config: ExecutorConfig, *, worker_command: Sequence[str] | None = None
    ) -> None:
        self.latest_stats: EngineStats | None = None
        self._ready: Future[EngineReady] = Future()
        self._sinks: dict[int, Sink] = {}
        self._dead: EngineDeadError | None = None
        # Reentrant, as `abort` may run in garbage collection while this thread holds it.
        self._lock = threading.RLock()
        self._stats: deque[EngineStats] = deque(maxlen=_MAX_STATS)
        self._stats_news = threading.Condition()
        self._stats_listeners: list[Callable[[EngineStats], None]] = []
        self._death_listeners: list[Callable[[EngineDeadError], None]] = []

        self._closing = False
        self._directory = tempfile.TemporaryDirectory(prefix="trtllm-")
        self._ranks = self._start_ranks(config, worker_command or python_command(_RUN_WORKER))
        self._responses = Receiver(self._address("responses"))
        self._requests = Sender(self._address("requests"))
        self._wake, self._woken = socket.socketpair()
        self._reader = threading.Thread(target=self._read, name="engine-reader", daemon=True)
        self._reader.start()

    # --- for the caller ---------------------------------------------------------------------------

    def wait_ready(self, timeout_s: float | None = None) -> EngineReady:
        """What the engine is like, once it can decode.

        Raises:
            EngineDeadError: a rank failed to start; holds its traceback.
            TimeoutError: not ready in time.
        """
        try:
            return self._ready.result(timeout_s)
        except FutureTimeout:
            raise TimeoutError(f"the engine was not ready within {timeout_s} s") from None

    def submit(self, requests: Sequence[NewRequest], sink: Sink) -> None:
        """Start requests, which reach the engine together.

        Raises:
            EngineDeadError: the engine is dead or shut down.
        """
        with self._lock:
            if self._dead is not None:
                raise self._dead
            self._sinks.update((request.request_id, sink) for request in requests)
            self._requests.send(requests)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Cancel requests; each one's last response says so. Finished ones are left alone."""
        with self._lock:
            going = [CancelRequest(i) for i in request_ids if i in self._sinks]
            if going:
                self._requests.send(going)

    def is_healthy(self) -> bool:
        """Whether the engine is ready and no rank has died."""
        return self._dead is None and self._ready.done()

    def take_stats(self, timeout_s: float) -> list[EngineStats]:
        """The statistics since the last call (at most 1000); waits up to `timeout_s` for some."""
        with self._stats_news:
            self._stats_news.wait_for(lambda: self._stats, timeout_s)
            taken = list(self._stats)
            self._stats.clear()
        return taken

    def add_stats_listener(self, listener: Callable[[EngineStats], None]) -> None:
        """Call `listener` with every statistics report, on the reader thread."""
        self._stats_listeners.append(listener)

    def add_death_listener(self, listener: Callable[[EngineDeadError], None]) -> None:
        """Call `listener` once a rank has died, on the reader thread; or now if that is past."""
        with self._lock:
            self._death_listeners.append(listener)
            dead = self._dead
        if dead is not None and not self._closing:
            listener(dead)

    def shutdown(self) -> None:
        """End all ranks within about two seconds; pending requests get an `EngineDeadError`."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._requests.send([Shutdown()])
        if self.is_healthy() and not self._ranks.join(_GRACE_S):
            logger.warning("ranks did not leave within %.0f s and are killed", _GRACE_S)
        self._wake.close()
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._die(EngineDeadError("the engine was shut down"))
        self._ranks.kill()
        self._requests.close(linger_s=1.0)
        self._responses.close()
        self._woken.close()
        self._directory.cleanup()

    # --- starting ---------------------------------------------------------------------------------

    def _address(self, name: str) -> str:
        return f"ipc://{self._directory.name}/{name}"

    def _start_ranks(self, config: ExecutorConfig, command: Sequence[str]) -> Ranks:
        addresses = self._address("requests"), self._address("responses")
        if ranks_are_launched():
            return LaunchedRanks(config, *addresses)
        return SpawnedRanks(config, Path(self._directory.name), *addresses, command)

    # --- on the reader thread ---------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._serve()
        except Exception as error:  # nobody would ever hear of a response again
            logger.exception("the engine's reader failed")
            self._ranks.kill()
            self._die(EngineDeadError(f"the engine's reader failed: {error!r}"))

    def _serve(self) -> None:
        """Hand out what arrives, until a rank dies or `shutdown` wakes this thread."""
        poller = zmq.Poller()
        for source in (self._responses.socket, self._woken, *self._ranks.lifelines):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._woken.fileno() in ready:
                return
            deaths = self._dispatch(self._responses.receive())
            ended = [line for line in self._ranks.lifelines if line.fileno() in ready]
            if (ended or deaths) and not self._closing:
                return self._bury(self._inquest(deaths))
            for line in ended:
                poller.unregister(line)

    def _dispatch(self, messages: Sequence[Any]) -> list[EngineDead]:
        """Hand out messages, but for those about death."""
        deaths: list[EngineDead] = []
        for message in messages:
            match message:
                case LlmResponse():
                    self._hand_over(message)
                case EngineStats():
                    self._record(message)
                case EngineReady():
                    self._ready.set_result(message)
                case EngineDead():
                    deaths.append(message)
                case _:
                    raise TypeError(f"unknown message from the engine: {message!r}")
        return deaths

    def _hand_over(self, response: LlmResponse) -> None:
        with self._lock:
            take = self._sinks.get if response.finish_reason is None else self._sinks.pop
            sink = take(response.request_id, None)
        if sink is not None:
            sink(response)

    def _record(self, stats: EngineStats) -> None:
        self.latest_stats = stats
        with self._stats_news:
            self._stats.append(stats)
            self._stats_news.notify_all()
        self._call(self._stats_listeners, stats)

    def _inquest(self, deaths: list[EngineDead]) -> list[EngineDead]:
        """All deaths, first of the ranks that had no time to say why: they are the likely cause."""
        deadline = time.monotonic() + _INQUEST_S
        while not self._ranks.join(0.0) and time.monotonic() < deadline:
            deaths += self._dispatch(self._responses.receive(_INQUEST_S / 10))
        deaths += self._dispatch(self._responses.receive())
        reported = {death.rank for death in deaths}
        return [*(d for d in self._ranks.ended() if d.rank not in reported), *deaths]

    def _bury(self, deaths: list[EngineDead]) -> None:
        error = EngineDeadError.of(deaths)
        logger.error("%s", error)
        self._ranks.kill()
        self._die(error)
        self._call(self._death_listeners, error)

    def _die(self, error: EngineDeadError) -> None:
        """Fail everything that is pending, and everything to come."""
        with self._lock:
            if self._dead is not None:
                return
            self._dead = error
            sinks, self._sinks = set(self._sinks.values()), {}
        if not self._ready.done():
            self._ready.set_exception(error)
        for sink in sinks:
            sink(error)

    def _call(self, listeners: Sequence[Callable[[T], None]], news: T) -> None:
        for listener in list(listeners):
            try:
                listener(news)
            except Exception:  # a faulty listener must not stop everybody's responses
                logger.exception("a listener of the engine failed")
