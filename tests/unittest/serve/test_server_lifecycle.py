"""The server process from its first moment to its exit code; the model is scripted."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest
from helpers.fake_llm import MODEL
from helpers.server_process import TESTS, ServerProcess, free_port, series, wait_for

REQUEST = {"model": MODEL, "prompt": "hi", "max_tokens": 5000}


def command(port: int, behaviour: str) -> list[str]:
    return [sys.executable, "-m", "helpers.fake_server", str(port), behaviour]


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    port = free_port()
    with ServerProcess(command(port, request.param), port) as server:
        server.wait_listening()
        yield server


def stream(server: ServerProcess, into: list[str]) -> threading.Thread:
    """Read a stream in a thread; every event goes to `into`."""

    def read() -> None:
        body = REQUEST | {"stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            into.extend(line.removeprefix("data: ") for line in response.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


@pytest.mark.parametrize("server", ["loading"], indirect=True)
def test_while_loading_everything_answers_503_and_ctrl_c_works(server: ServerProcess) -> None:
    for response in (
        server.http.get("/health"),
        server.http.post("/v1/completions", json=REQUEST),
        server.http.post("/v1/chat/completions", content=b"junk"),
    ):
        assert response.status_code == 503
        assert "loading" in response.json()["error"]["message"]
    assert server.http.get("/v1/models").status_code == 200
    assert server.http.get("/metrics").status_code == 200
    assert server.stop() < 2
    assert server.process.returncode == 0


@pytest.mark.parametrize("server", ["failing"], indirect=True)
def test_a_failed_start_ends_the_process_with_its_message(server: ServerProcess) -> None:
    assert server.process.wait(timeout=10) == 1
    assert "lacks lm_head.weight" in server.log()


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("server", ["slow"], indirect=True)
def test_a_signal_gives_up_long_requests_and_exits_in_time(
    server: ServerProcess, stop: signal.Signals
) -> None:
    server.wait_ready()
    events: list[str] = []
    thread = stream(server, events)
    wait_for(lambda: series(server.http, "trtllm_generation_tokens_total") > 0)
    assert server.stop(stop) < 2
    assert server.process.returncode == 0
    thread.join()
    assert "shuts down" in json.loads(events[-2])["error"]["message"]
    assert events[-1] == "[DONE]"


@pytest.mark.parametrize("server", ["slow"], indirect=True)
def test_a_signal_lets_short_requests_finish(server: ServerProcess) -> None:
    server.wait_ready()
    responses: list[httpx.Response] = []
    body = REQUEST | {"max_tokens": 20}  # 0.4 s
    thread = threading.Thread(
        target=lambda: responses.append(server.http.post("/v1/completions", json=body))
    )
    thread.start()
    wait_for(lambda: series(server.http, "trtllm_prompt_tokens_total") > 0)
    server.stop()
    assert server.process.returncode == 0
    thread.join()
    assert responses[0].json()["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("server", ["dying"], indirect=True)
def test_a_dead_engine_ends_the_process_after_telling_everyone(server: ServerProcess) -> None:
    server.wait_ready()
    events: list[str] = []
    thread = stream(server, events)
    wait_for(lambda: server.status() == 503)
    refused = server.http.post("/v1/completions", json=REQUEST)
    assert (refused.status_code, "died" in refused.text) == (503, True)
    thread.join()
    assert "rank 1 died" in json.loads(events[-2])["error"]["message"]
    assert events[-1] == "[DONE]"
    assert server.process.wait(timeout=5) == 1
    assert "Traceback of rank 1" in server.log()


@pytest.mark.parametrize("server", ["slow"], indirect=True)
def test_a_taken_port_is_an_error_at_once(server: ServerProcess) -> None:
    port = server.http.base_url.port or 0
    second = subprocess.run(
        command(port, "slow"), cwd=TESTS, capture_output=True, text=True, timeout=30
    )
    assert second.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in second.stderr
