"""A real HTTP server around the scripted LLM, in a thread of the test process."""

import asyncio
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest
import uvicorn
from helpers.fake_llm import MODEL, FakeLLM
from helpers.server_process import wait_for

from tensorrt_llm.serve.engine_host import EngineHost
from tensorrt_llm.serve.launcher import bind
from tensorrt_llm.serve.openai_server import OpenAIServer


@pytest.fixture(scope="session")
def served() -> Iterator[tuple[FakeLLM, str]]:
    """A server that is ready: its LLM and its base URL."""
    llm = FakeLLM()
    host = EngineHost(lambda: llm)
    api = OpenAIServer(host, MODEL)
    server = uvicorn.Server(uvicorn.Config(api.app, log_config=None, lifespan="off"))
    sock = bind("127.0.0.1", 0)

    async def main() -> None:
        life = asyncio.create_task(host.run())
        await server.serve(sockets=[sock])
        life.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    wait_for(lambda: server.started and host.phase == "ready")
    yield llm, f"http://127.0.0.1:{sock.getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=10)
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def clients(served: tuple[FakeLLM, str]) -> Iterator[tuple[httpx.Client, openai.OpenAI]]:
    """One of each for all tests, since setting up TLS takes a tenth of a second."""
    address = served[1]
    with (
        httpx.Client(base_url=address, timeout=10) as http,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield http, client


@pytest.fixture
def llm(served: tuple[FakeLLM, str]) -> FakeLLM:
    """The server's LLM with its default script and no memory of earlier tests."""
    served[0].reset()
    return served[0]


@pytest.fixture
def http(llm: FakeLLM, clients: tuple[httpx.Client, openai.OpenAI]) -> httpx.Client:
    return clients[0]


@pytest.fixture
def client(llm: FakeLLM, clients: tuple[httpx.Client, openai.OpenAI]) -> openai.OpenAI:
    return clients[1]
