"""How the server process gets its ranks: it spawns them, or finds them launched by MPI or Slurm."""

import dataclasses
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path
from typing import Protocol

from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig
from tensorrt_llm._torch.pyexecutor.messages import EngineDead
from tensorrt_llm.executor.worker import RankLaunch
from tensorrt_llm.logger import logger

# Set by trtllm-llmapi-launch for the user's command; the names are TensorRT-LLM's.
ENV_PROXY = "TLLM_SPAWN_PROXY_PROCESS"
ENV_SIZE = "tllm_mpi_size"
ENV_ADDRESS = "TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"
ENV_KEY = "TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY"


class Lifeline(Protocol):
    """A connection to another process, on which nothing comes but its end."""

    def fileno(self) -> int: ...


class Ranks(Protocol):
    """The rank processes of one engine, as the server process sees them."""

    @property
    def lifelines(self) -> Sequence[Lifeline]:
        """Become readable when a rank process has ended."""
        ...

    def ended(self) -> list[EngineDead]:
        """Ranks whose process has ended, and how."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait for all ranks to end; False when some have not."""
        ...

    def kill(self) -> None:
        """End all ranks now."""
        ...


@dataclass(frozen=True)
class StartEngine:
    """Asks launched ranks to be the engine of `config` (rank 0's); fields as in `RankLaunch`."""

    config: ExecutorConfig
    request_addr: str
    response_addr: str
    log_level: int


def python_command(code: str) -> list[str]:
    """A Python that runs `code` and imports from where this process imports.

    The interpreter starts anew: the user's main module is not imported a second time, so scripts
    need no `if __name__ == "__main__"`.
    """
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"]


class SpawnedRanks:
    """One process per rank on this host.

    Each one's stdin is one end of a socket pair. It carries the rank's `RankLaunch`, and afterwards
    each side sees there when the other one ends.

    Args:
        config: rank 0's.
        directory: private to this engine; the ranks meet in a file there.
        command: what to start for each rank; must call `worker.main`.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        directory: Path,
        request_addr: str,
        response_addr: str,
        command: Sequence[str],
    ) -> None:
        self.lifelines: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        world_size = config.mapping.world_size
        for rank in range(world_size):
            launch = RankLaunch(
                config=config_of_rank(config, rank),
                init_method=f"file://{directory}/rendezvous",
                request_addr=request_addr,
                response_addr=response_addr,
                ranks_on_host=world_size,
                log_level=logger.level,
            )
            self._start(command, launch)

    def ended(self) -> list[EngineDead]:
        codes = [process.poll() for process in self._processes]
        return [EngineDead(i, _describe_exit(c)) for i, c in enumerate(codes) if c is not None]

    def join(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        try:
            for process in self._processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process, lifeline in zip(self._processes, self.lifelines, strict=True):
            process.wait()
            lifeline.close()

    def _start(self, command: Sequence[str], launch: RankLaunch) -> None:
        ours, theirs = socket.socketpair()
        ours.sendall(pickle.dumps(launch))
        with theirs:
            # Its own process group: ctrl-C in the terminal reaches the server process only.
            self._processes.append(
                subprocess.Popen(command, stdin=theirs.fileno(), process_group=0)
            )
        self.lifelines.append(ours)


class LaunchedRanks:
    """Ranks that `trtllm-llmapi-launch` runs, on this host and others.

    The connection to the launcher's rank 0 carries a `StartEngine`, and afterwards each side sees
    there when the other one ends.

    Raises:
        ValueError: their number is not the configuration's world size.
    """

    def __init__(self, config: ExecutorConfig, request_addr: str, response_addr: str) -> None:
        launched = int(os.environ[ENV_SIZE])
        if launched != config.mapping.world_size:
            raise ValueError(
                f"trtllm-llmapi-launch runs {launched} ranks, but the configuration needs "
                f"{config.mapping.world_size} (tensor_parallel_size {config.mapping.tp_size})"
            )
        host, _, port = os.environ[ENV_ADDRESS].removeprefix("tcp://").partition(":")
        key = bytes.fromhex(os.environ[ENV_KEY])
        self._connection = Client((host, int(port)), authkey=key)
        self._connection.send(StartEngine(config, request_addr, response_addr, logger.level))
        self.lifelines = [self._connection]

    def ended(self) -> list[EngineDead]:
        return [EngineDead(0, "its process ended")] if self._connection.poll() else []

    def join(self, timeout_s: float) -> bool:
        return self._connection.poll(timeout_s)

    def kill(self) -> None:
        """Let the launcher know that this engine is not needed any more; it ends the ranks."""
        self._connection.close()


def ranks_are_launched() -> bool:
    """Whether this process is the command of a `trtllm-llmapi-launch`."""
    return os.environ.get(ENV_PROXY) == "1"


def config_of_rank(config: ExecutorConfig, rank: int) -> ExecutorConfig:
    return dataclasses.replace(config, mapping=dataclasses.replace(config.mapping, rank=rank))


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"
