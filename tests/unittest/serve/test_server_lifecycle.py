"""The server process from its first moment to its exit code; the model is scripted."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import httpx
import pytest
from helpers.fake_llm import MODEL, wait_for

TESTS = Path(__file__).parents[2]
REQUEST = {"model": MODEL, "prompt": "hi", "max_tokens": 5000}


def command(port: int, behaviour: str) -> list[str]:
    return [sys.executable, "-m", "helpers.fake_server", str(port), behaviour]


class Server:
    """A process of fake_server.py."""

    def __init__(self, behaviour: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.process = subprocess.Popen(
            command(port, behaviour), cwd=TESTS, stdout=PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10)
        wait_for(self._answers, seconds=30)

    def status(self) -> int:
        return self.http.get("/health").status_code

    def end(self, timeout: float = 10) -> tuple[int, str]:
        """Exit code and everything the process printed."""
        output, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, output

    def _answers(self) -> bool:
        try:
            self.status()
        except httpx.TransportError:
            return False
        return True


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param)
    yield server
    server.http.close()
    server.process.kill()
    server.process.communicate()


def stream(server: Server, into: list[str]) -> threading.Thread:
    """Read a stream in a thread; every event goes to `into`."""

    def read() -> None:
        body = REQUEST | {"stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            into.extend(line.removeprefix("data: ") for line in response.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


@pytest.mark.parametrize("server", ["loading"], indirect=True)
def test_while_loading_everything_answers_503_and_ctrl_c_works(server: Server) -> None:
    for response in (
        server.http.get("/health"),
        server.http.post("/v1/completions", json=REQUEST),
        server.http.post("/v1/chat/completions", content=b"junk"),
    ):
        assert response.status_code == 503
        assert "loading" in response.json()["error"]["message"]
    assert server.http.get("/v1/models").status_code == 200
    assert server.http.get("/metrics").status_code == 200
    server.process.send_signal(signal.SIGINT)
    code, _ = server.end(timeout=2)
    assert code == 0


@pytest.mark.parametrize("server", ["failing"], indirect=True)
def test_a_failed_start_ends_the_process_with_its_message(server: Server) -> None:
    code, output = server.end()
    assert code == 1
    assert "lacks lm_head.weight" in output


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("server", ["slow"], indirect=True)
def test_a_signal_gives_up_long_requests_and_exits_in_time(
    server: Server, stop: signal.Signals
) -> None:
    wait_for(lambda: server.status() == 200)
    events: list[str] = []
    thread = stream(server, events)
    wait_for(lambda: "trtllm_generation_tokens_total 0.0" not in server.http.get("/metrics").text)
    start = time.monotonic()
    server.process.send_signal(stop)
    code, _ = server.end(timeout=5)
    assert time.monotonic() - start < 2
    assert code == 0
    thread.join()
    assert "shuts down" in json.loads(events[-2])["error"]["message"]
    assert events[-1] == "[DONE]"


@pytest.mark.parametrize("server", ["slow"], indirect=True)
def test_a_signal_lets_short_requests_finish(server: Server) -> None:
    wait_for(lambda: server.status() == 200)
    responses: list[httpx.Response] = []
    body = REQUEST | {"max_tokens": 20}  # 0.4 s
    thread = threading.Thread(
        target=lambda: responses.append(server.http.post("/v1/completions", json=body))
    )
    thread.start()
    wait_for(lambda: "trtllm_prompt_tokens_total 2.0" in server.http.get("/metrics").text)
    server.process.send_signal(signal.SIGINT)
    assert server.end(timeout=5)[0] == 0
    thread.join()
    assert responses[0].json()["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("server", ["dying"], indirect=True)
def test_a_dead_engine_ends_the_process_after_telling_everyone(server: Server) -> None:
    wait_for(lambda: server.status() == 200)
    events: list[str] = []
    thread = stream(server, events)
    wait_for(lambda: server.status() == 503)
    thread.join()
    assert "rank 1 died" in json.loads(events[-2])["error"]["message"]
    assert events[-1] == "[DONE]"
    refused = server.http.post("/v1/completions", json=REQUEST)
    assert (refused.status_code, "died" in refused.text) == (503, True)
    code, output = server.end(timeout=5)
    assert code == 1
    assert "Traceback of rank 1" in output


@pytest.mark.parametrize("server", ["slow"], indirect=True)
def test_a_taken_port_is_an_error_at_once(server: Server) -> None:
    port = server.http.base_url.port or 0
    second = subprocess.run(
        command(port, "slow"), cwd=TESTS, capture_output=True, text=True, timeout=30
    )
    assert second.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in second.stderr
