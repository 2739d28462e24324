"""What the README shows is what happens: its request gets its answer, its script prints it too."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.server_process import ServerProcess, free_port

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CHECKPOINT = "examples/glm_tiny/checkpoint"


def only(pattern: str) -> str:
    """The one place of the README that matches."""
    (found,) = re.findall(pattern, README, re.DOTALL)
    return str(found)


@pytest.fixture(scope="module")
def answer() -> dict[str, object]:
    shown: dict[str, object] = json.loads(only(r"```json\n(.*?)```"))
    return shown


def test_the_request_gets_the_answer(answer):
    port = free_port()
    body = json.loads(only(r"-d '(\{.*?\})'\n"))
    server = str(Path(sys.executable).parent / "trtllm-serve")
    # As `make serve` does it, but for the port and the directory.
    command = [server, str(ROOT / CHECKPOINT), "--served_model_name", body["model"]]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with ServerProcess(command, port) as running:
        running.wait_ready()
        response = running.http.post("/v1/chat/completions", json=body).json()
    unlike_on_every_call = ("id", "created")
    assert response.keys() == answer.keys()
    for key in response.keys() - set(unlike_on_every_call):
        assert response[key] == answer[key], key


def test_make_serve_serves_that_model(answer):
    variables = dict(re.findall(r"^(\w+) \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert (variables["MODEL"], variables["NAME"]) == (CHECKPOINT, answer["model"])
    assert f"http://{variables['HOST']}:{variables['PORT']}/" in README


def test_the_script_prints_the_answer(answer):
    script = only(r"```python\n(.*?)```")
    command = [sys.executable, "-c", script]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.strip() == answer["choices"][0]["message"]["content"]
