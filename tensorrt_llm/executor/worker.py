"""A rank process: joins its group, builds the engine, runs the step loop, reports its own death."""

import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig
from tensorrt_llm._torch.pyexecutor.messages import EngineDead, EngineReady
from tensorrt_llm.executor.ipc import Receiver, Sender
from tensorrt_llm.logger import logger

# An idle rank 0 looks up this often, so that ranks which wait for its broadcast do not time out.
HEARTBEAT_S = 1.0
# Ranks meet in their first collective after loading; a slow disk must not look like a dead rank.
COLLECTIVE_TIMEOUT_S = 1800.0
_LINGER_S = 2.0

Receive = Callable[[bool], list[Any]]
Send = Callable[[Sequence[object]], None]


class Engine(Protocol):
    """What a rank runs: `PyExecutor`."""

    def ready_message(self) -> EngineReady: ...

    def run(self) -> None: ...


CreateEngine = Callable[[ExecutorConfig, Receive, Send], Engine]


@dataclass(frozen=True, kw_only=True)
class RankLaunch:
    """All that a rank is told.

    Args:
        config: the rank's own.
        init_method: where the ranks meet, `file:///path` or `tcp://host:port`.
        request_addr: rank 0 binds it and gets requests there.
        response_addr: the server process binds it; ranks send responses and their death there.
        ranks_on_host: ranks that share this host's cores.
        log_level: the server process's, a level of `logging`.
    """

    config: ExecutorConfig
    init_method: str
    request_addr: str
    response_addr: str
    ranks_on_host: int
    log_level: int


def main(create_engine: CreateEngine | None = None) -> None:
    """Entry of a rank that `SpawnedRanks` started: a pickled `RankLaunch` arrives on stdin.

    Never returns. stdin stays open as long as the server process lives, which is how a rank notices
    that it has been left alone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the server's to handle: it drains
    launch: RankLaunch = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_exit_with_parent, name="lifeline", daemon=True).start()
    death = worker_main(launch, create_engine)
    zmq.Context.instance().term()  # waits for what closed sockets still have to send
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a rank whose peers are dead may never get through torch's own teardown.
    os._exit(1 if death else 0)


def worker_main(launch: RankLaunch, create_engine: CreateEngine | None = None) -> EngineDead | None:
    """Be one rank until `Shutdown`.

    Args:
        launch: what to be.
        create_engine: makes the engine; None takes `create_py_executor`.

    Returns:
        None, or the failure that ended it, which has been sent to the server process as well.
    """
    logger.setLevel(launch.log_level)
    responses = Sender(launch.response_addr)
    try:
        _run_engine(launch, create_engine or _create_py_executor, responses)
        return None
    except Exception:
        death = EngineDead(launch.config.mapping.rank, traceback.format_exc())
        responses.send([death])
        return death
    finally:
        responses.close(_LINGER_S)


def _run_engine(launch: RankLaunch, create_engine: CreateEngine, responses: Sender) -> None:
    from tensorrt_llm._torch.distributed import (
        destroy_process_group,
        init_process_group,
        min_over_ranks,
    )

    config = launch.config
    requests = Receiver(launch.request_addr) if config.mapping.rank == 0 else None
    try:
        _set_device(config, launch.ranks_on_host)
        init_process_group(config.mapping, config.device, launch.init_method, COLLECTIVE_TIMEOUT_S)
        engine = create_engine(config, _receiver(requests), responses.send)
        min_over_ranks(1, config.mapping)  # nobody is ready before everybody is
        if config.mapping.rank == 0:
            responses.send([engine.ready_message()])
        engine.run()
        destroy_process_group()
    finally:
        if requests is not None:
            requests.close()


def _create_py_executor(config: ExecutorConfig, receive: Receive, send: Send) -> Engine:
    from tensorrt_llm._torch.pyexecutor.py_executor_creator import create_py_executor

    return create_py_executor(config, receive, send)


def _receiver(requests: Receiver | None) -> Receive:
    def receive(block: bool) -> list[Any]:
        if requests is None:
            raise RuntimeError("only rank 0 receives messages; it broadcasts them")
        return requests.receive(HEARTBEAT_S if block else 0.0)

    return receive


def _set_device(config: ExecutorConfig, ranks_on_host: int) -> None:
    """Take this rank's share of the CPU, and its GPU."""
    import torch

    torch.set_num_threads(config.num_threads or max(1, torch.get_num_threads() // ranks_on_host))
    if config.device == "cuda":
        torch.cuda.set_device(config.mapping.local_rank)


def _exit_with_parent() -> None:
    """End this process when the other end of stdin closes."""
    while os.read(0, 1):
        pass
    os._exit(1)
