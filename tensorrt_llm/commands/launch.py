"""trtllm-llmapi-launch: a command whose `LLM` uses the ranks that mpirun or srun has started.

    mpirun -n 16 trtllm-llmapi-launch trtllm-serve MODEL --tp_size 16

Every rank runs this. Rank 0 starts the command once, as a process that knows nothing of MPI. When
an `LLM` in it asks for its engine, all ranks become that engine, until the `LLM` is shut down; then
they wait for the next one, or for the end of the command, whose exit code is the launcher's.
"""

import contextlib
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any, NoReturn

from tensorrt_llm._torch.pyexecutor.messages import EngineDead, Shutdown
from tensorrt_llm.executor.ipc import Sender
from tensorrt_llm.executor.ranks import (
    ENV_ADDRESS,
    ENV_KEY,
    ENV_PROXY,
    ENV_SIZE,
    StartEngine,
    config_of_rank,
)
from tensorrt_llm.executor.worker import RankLaunch, worker_main
from tensorrt_llm.logger import logger

# How many tasks the launcher started, by launcher: Open MPI, MPICH and its kin, Slurm.
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_MPI_PREFIXES = (
    *("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "MPI_", "I_MPI_", "HYDRA_", "MPICH_"),
    *("MV2_", "CRAY_"),
)
_Order = tuple[Connection, StartEngine]
_LAST_WORDS_S = 5.0  # for the command to report its dead engine before everything is killed


class World:
    """The ranks. One that was started alone needs no MPI.

    Raises:
        SystemExit: several were started, and mpi4py is missing or sees another number of them.
    """

    def __init__(self) -> None:
        self.rank, self.size, self.ranks_on_host = 0, 1, 1
        self._comm: Any = None
        started = started_tasks(os.environ)
        if started > 1:
            self._join(started)

    def broadcast(self, obj: Any) -> Any:
        """Rank 0's object, on every rank."""
        if self._comm is None:
            return obj
        barrier = self._comm.Ibarrier()
        while not barrier.Test():
            time.sleep(0.02)  # MPI itself would spin, and this may take hours
        return self._comm.bcast(obj)

    def abort(self, code: int) -> NoReturn:
        """End all ranks, wherever they are and whatever they do."""
        sys.stderr.flush()
        if self._comm is not None:
            self._comm.Abort(code)
        sys.exit(code)

    def _join(self, started: int) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise SystemExit(
                f"trtllm-llmapi-launch: {started} tasks were started, and they need mpi4py to find "
                f"each other: pip install mpi4py, built for the MPI in use ({error})"
            ) from None
        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        if self.size != started:
            raise SystemExit(
                f"trtllm-llmapi-launch: {started} tasks were started, but mpi4py sees {self.size}; "
                "is it built for the MPI of the launcher?"
            )
        self.ranks_on_host = self._comm.Split_type(MPI.COMM_TYPE_SHARED).Get_size()


class Leader:
    """Rank 0: runs the command, and is rank 0 of each engine that the command asks for."""

    def __init__(self, world: World, command: Sequence[str]) -> None:
        self._world = world
        self._orders: queue.Queue[_Order | None] = queue.Queue()  # None: the command has ended
        key = secrets.token_bytes(32)
        self._listener = Listener(("127.0.0.1", 0), authkey=key)
        address = "tcp://{}:{}".format(*self._listener.address)
        # Its own process group, so that it gets each signal once: through us.
        self._command = subprocess.Popen(
            command, env=environment_of_command(world.size, address, key), process_group=0
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: self._command.send_signal(number))
        for work in (self._accept, self._wait_for_command):
            threading.Thread(target=work, daemon=True).start()

    def run(self) -> int:
        """Serve engines until the command ends; its exit code, as a shell has it."""
        while (order := self._orders.get()) is not None:
            death = self._serve(*order)
            if death is not None:
                self._give_up(death)
        self._world.broadcast(None)
        return _shell_code(self._command.wait())

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
                self._orders.put((connection, connection.recv()))
            except (AuthenticationError, EOFError, OSError) as error:
                logger.warning("refused a connection to the launcher: %r", error)

    def _wait_for_command(self) -> None:
        self._command.wait()
        self._orders.put(None)

    def _serve(self, connection: Connection, start: StartEngine) -> EngineDead | None:
        launch = RankLaunch(
            config=start.config,
            init_method=f"tcp://{self._meeting_host()}:{_free_port()}",
            request_addr=start.request_addr,
            response_addr=start.response_addr,
            ranks_on_host=self._world.ranks_on_host,
            log_level=start.log_level,
        )
        threading.Thread(target=_end_with_peer, args=(connection, launch), daemon=True).start()
        self._world.broadcast(launch)
        death = worker_main(launch)
        with contextlib.suppress(OSError):
            connection.send(None)  # whatever it is, it says that this rank has left
        return death

    def _meeting_host(self) -> str:
        alone = self._world.ranks_on_host == self._world.size
        return "127.0.0.1" if alone else socket.gethostname()

    def _give_up(self, death: EngineDead) -> NoReturn:
        """After our own failure, which the command has been told."""
        print(f"rank 0 died: {death.traceback}", file=sys.stderr)
        try:
            code = _shell_code(self._command.wait(_LAST_WORDS_S)) or 1
        except subprocess.TimeoutExpired:
            self._command.kill()
            code = 1
        self._world.abort(code)


def main() -> NoReturn:
    """Entry of the console script."""
    command = sys.argv[1:]
    if not command:
        raise SystemExit("usage: trtllm-llmapi-launch COMMAND [ARGUMENT...]")
    world = World()
    sys.exit(lead(world, command) if world.rank == 0 else follow(world))


def lead(world: World, command: Sequence[str]) -> int:
    """Be rank 0; the exit code."""
    try:
        leader = Leader(world, command)
    except OSError as error:
        print(f"trtllm-llmapi-launch: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        world.broadcast(None)
        return 127
    return leader.run()


def follow(world: World) -> int:
    """Be another rank of each engine until rank 0 says that there are no more; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch: RankLaunch | None
    while (launch := world.broadcast(None)) is not None:
        config = config_of_rank(launch.config, world.rank)
        death = worker_main(replace(launch, config=config, ranks_on_host=world.ranks_on_host))
        if death is not None:
            print(f"rank {world.rank} died: {death.traceback}", file=sys.stderr)
            time.sleep(_LAST_WORDS_S)
            world.abort(1)
    return 0


def started_tasks(environ: Mapping[str, str]) -> int:
    """How many tasks mpirun or srun started beside this one, itself included."""
    for name in _SIZE_VARIABLES:
        if name in environ:
            return int(environ[name])
    return 1


def environment_of_command(world_size: int, address: str, key: bytes) -> dict[str, str]:
    """This environment without MPI's variables, and with the way to the launched ranks."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_MPI_PREFIXES)}
    return kept | {
        ENV_PROXY: "1",
        ENV_SIZE: str(world_size),
        ENV_ADDRESS: address,
        ENV_KEY: key.hex(),
    }


def _end_with_peer(connection: Connection, launch: RankLaunch) -> None:
    """End the engine when the process that asked for it has ended, whether it said so or not."""
    with connection, contextlib.suppress(OSError):
        connection.poll(None)
    sender = Sender(launch.request_addr)
    sender.send([Shutdown()])
    sender.close(linger_s=1.0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    main()
