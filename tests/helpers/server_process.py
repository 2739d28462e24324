"""A server in a process of its own, watched over HTTP."""

import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import psutil

TESTS = Path(__file__).parents[1]


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Poll until `condition` holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def series(http: httpx.Client, name: str) -> float:
    """The value of one series in /metrics."""
    lines = http.get("/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"{name} ")))


def has_ended(process: psutil.Process) -> bool:
    """Also true of an orphan that nobody has reaped yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class ServerProcess:
    """Runs `command`, a server on 127.0.0.1:`port`; context manager that leaves nothing behind.

    Attributes:
        http: a client for it.
        seconds_to_ready: from its start to the first 200 of /health; set by `wait_ready`.
    """

    def __init__(self, command: Sequence[str], port: int) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self.seconds_to_ready: float | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by __exit__
        self._start = time.monotonic()
        self.process = subprocess.Popen(
            command, cwd=TESTS, stdout=self._log, stderr=subprocess.STDOUT
        )
        self.http = httpx.Client(base_url=self.address, timeout=30)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()
        self._log.close()

    def status(self) -> int | None:
        """Of /health; None while nobody listens."""
        try:
            return self.http.get("/health").status_code
        except httpx.TransportError:
            return None

    def wait_listening(self) -> None:
        wait_for(lambda: self.status() is not None or self._has_ended(), seconds=60)
        assert not self._has_ended(), self.log()

    def wait_ready(self) -> None:
        wait_for(lambda: self.status() == 200 or self._has_ended(), seconds=60)
        assert not self._has_ended(), self.log()
        self.seconds_to_ready = time.monotonic() - self._start

    def stop(self, stop: signal.Signals = signal.SIGINT) -> float:
        """Send a signal; seconds until the process had ended."""
        start = time.monotonic()
        self.process.send_signal(stop)
        self.process.wait(timeout=30)
        return time.monotonic() - start

    def log(self) -> str:
        """Everything it printed so far."""
        self._log.seek(0)
        return self._log.read()

    def _has_ended(self) -> bool:
        return self.process.poll() is not None
