"""trtllm-serve with `modeling_v2: require`: the target's decode step behind the real server."""

import re
import sys
from pathlib import Path

import openai
import pytest
from helpers.server_process import ServerProcess, free_port, series

TINY = Path(__file__).parents[2] / "examples" / "glm_tiny"
MODEL = "glm_tiny"
QUESTION = [{"role": "user", "content": "Count up from 7 to 31 by 4."}]
ANSWER = "7, 11, 15, 19, 23, 27, 31."

pytestmark = pytest.mark.timeout(180)


def start(*flags: str) -> ServerProcess:
    port = free_port()
    command = [str(Path(sys.executable).with_name("trtllm-serve")), str(TINY / "checkpoint")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served_model_name", MODEL]
    return ServerProcess([*command, *flags], port)


def ask(server: ServerProcess) -> str:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=60, temperature=0
        )
    return str(answer.choices[0].message.content)


def share_fast(server: ServerProcess, part: str) -> float:
    fast, builtin = (
        series(server.http, f'trtllm_generation_steps_total{{part="{part}",path="{path}"}}')
        for path in ("fast", "builtin")
    )
    assert fast + builtin >= 5
    return fast / (fast + builtin)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_answers_come_from_the_fast_step(tp_size: int) -> None:
    with start("--config", str(TINY / "modeling_v2.yaml"), "--tp_size", str(tp_size)) as server:
        server.wait_ready()
        assert ask(server) == ANSWER
        assert share_fast(server, "target") > 0.95
        assert share_fast(server, "draft") > 0.95


def test_a_model_without_a_target_is_refused_by_its_criterion(tmp_path: Path) -> None:
    config = (TINY / "checkpoint" / "config.json").read_text()
    other = tmp_path / "checkpoint"
    other.mkdir()
    for file in (TINY / "checkpoint").iterdir():
        (other / file.name).symlink_to(file)
    (other / "config.json").unlink()
    text = re.sub(r'"q_lora_rank": 64', '"q_lora_rank": 48', config)
    (other / "config.json").write_text(text)
    port = free_port()
    command = [str(Path(sys.executable).with_name("trtllm-serve")), str(other), "--port", str(port)]
    with ServerProcess([*command, "--config", str(TINY / "modeling_v2.yaml")], port) as server:
        assert server.process.wait(60) != 0
        assert "modeling_v2 is 'require', but shape (layers, hidden" in server.log()
