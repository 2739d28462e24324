"""trtllm-serve as people use it: the real process and model, the `openai` package, HTTP."""

import json
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest
from helpers.request_bodies import chats, check, completions
from helpers.server_process import ServerProcess, free_port, has_ended, series, wait_for
from hypothesis import HealthCheck, given, settings

CHECKPOINT = Path(__file__).parents[2] / "examples" / "glm_tiny" / "checkpoint"
MODEL = "glm_tiny"
MAX_SEQ_LEN = 512
POOLS = [f'trtllm_kv_cache_used_blocks{{pool="{pool}"}}' for pool in ("key", "index_key")]
USER = [{"role": "user", "content": "Count from 3 to 9"}]
LONG = {"model": MODEL, "prompt": "Count", "max_tokens": 400, "extra_body": {"ignore_eos": True}}
SETTINGS = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

# Everything here starts ranks, which takes seconds on a busy machine.
pytestmark = pytest.mark.timeout(180)


def start(*flags: str, checkpoint: Path = CHECKPOINT) -> ServerProcess:
    port = free_port()
    command = [str(Path(sys.executable).with_name("trtllm-serve")), str(checkpoint)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served_model_name", MODEL]
    return ServerProcess([*command, "--max_seq_len", str(MAX_SEQ_LEN), *flags], port)


def connect(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start() as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with connect(server) as client:
        yield client


def test_ready_in_ten_seconds(server: ServerProcess) -> None:
    assert server.seconds_to_ready is not None
    assert server.seconds_to_ready < 10


def test_completion_of_text_and_of_token_ids(client: openai.OpenAI) -> None:
    ids = [40, 50, 60, 70]
    answer = client.completions.create(model=MODEL, prompt=ids, max_tokens=12, temperature=0)
    again = client.completions.create(model=MODEL, prompt=ids, max_tokens=12, temperature=0)
    assert answer.choices[0].text == again.choices[0].text
    assert answer.usage.prompt_tokens == 4
    assert 1 <= answer.usage.completion_tokens <= 12
    texts = client.completions.create(model=MODEL, prompt=["Count", "Say"], max_tokens=3)
    assert [choice.index for choice in texts.choices] == [0, 1]


def test_chat_streams_what_it_answers(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": USER, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    *chunks, last = chunks
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == (
        whole.choices[0].message.content
    )
    ends = [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason]
    assert ends == [whole.choices[0].finish_reason]
    assert last.usage == whole.usage


def test_logprobs_and_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Count from", max_tokens=6, temperature=0, logprobs=3, echo=True
    )
    logprobs = answer.choices[0].logprobs
    count = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == count
    assert logprobs.token_logprobs[0] is None
    generated = slice(answer.usage.prompt_tokens, None)
    for token, logprob, top in zip(
        logprobs.tokens[generated],
        logprobs.token_logprobs[generated],
        logprobs.top_logprobs[generated],
        strict=True,
    ):
        assert logprob == top[token] == max(top.values()) <= 0  # greedy takes the most likely one
    assert answer.choices[0].text.startswith("Count from")


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=5, temperature=0, logprobs=True, top_logprobs=4
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        tops = [top.logprob for top in entry.top_logprobs]
        assert tops == sorted(tops, reverse=True)
        assert (entry.logprob, len(tops)) == (tops[0], 4)


def test_n_and_seed(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        answer = client.completions.create(
            model=MODEL,
            prompt="Count",
            n=3,
            seed=seed,
            temperature=2.0,
            extra_body={"ignore_eos": True},
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    first = texts(seed=1)
    assert len(set(first)) > 1
    assert texts(seed=1) == first
    assert texts(seed=2) != first


def test_stop_text_is_cut_off_in_streams_too(client: openai.OpenAI) -> None:
    whole = client.completions.create(**LONG | {"max_tokens": 40}, temperature=0).choices[0].text
    stop = whole[5:8]
    options = LONG | {"temperature": 0, "stop": stop}
    cut = client.completions.create(**options).choices[0]
    assert (cut.text, cut.finish_reason) == (whole.partition(stop)[0], "stop")
    chunks = list(client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": [40] * (MAX_SEQ_LEN + 1)}, [f"{MAX_SEQ_LEN + 1} tokens", str(MAX_SEQ_LEN)]),
        ({"prompt": [40] * 500, "max_tokens": 100}, ["500 tokens", "600", str(MAX_SEQ_LEN)]),
        ({"prompt": ""}, ["prompt", "empty"]),
        ({"max_tokens": 0}, ["max_tokens is 0"]),
        ({"prompt": [10**6]}, ["1000000", "vocab_size"]),
        ({"logit_bias": {"1000000": 1}}, ["logit_bias", "1000000"]),
    ],
)
def test_what_cannot_be_served_is_a_400(
    server: ServerProcess, change: dict[str, object], words: list[str]
) -> None:
    for _ in range(2):
        response = server.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "Count"} | change
        )
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert all(word in message for word in words), message


def test_twenty_clients_some_of_which_leave(server: ServerProcess, client: openai.OpenAI) -> None:
    cancelled = 'trtllm_requests_finished_total{reason="cancelled"}'
    before = series(server.http, cancelled)
    options = LONG | {"max_tokens": 60, "temperature": 0}
    alone = client.completions.create(**options).choices[0].text

    def stay(_: int) -> str:
        return client.completions.create(**options).choices[0].text

    def leave(_: int) -> str:
        with client.completions.create(**LONG, stream=True) as stream:
            return next(iter(stream)).choices[0].text

    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(leave if k % 3 == 0 else stay, k) for k in range(20)]
    assert [a.result() for k, a in enumerate(answers) if k % 3] == [alone] * 13
    wait_for(lambda: all(series(server.http, pool) == 0 for pool in POOLS))
    assert series(server.http, "trtllm_requests_running") == 0
    assert series(server.http, cancelled) == before + 7


@SETTINGS
@given(body=completions(MODEL))
def test_completion_bodies(server: ServerProcess, body: object) -> None:
    check(server.http, "/v1/completions", body)


@SETTINGS
@given(body=chats(MODEL))
def test_chat_bodies(server: ServerProcess, body: object) -> None:
    check(server.http, "/v1/chat/completions", body)


def test_nothing_is_left_in_the_cache(server: ServerProcess) -> None:
    wait_for(lambda: all(series(server.http, pool) == 0 for pool in POOLS))


def test_speculation_in_answers_metrics_and_log(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("speculative_config: {decoding_type: MTP, max_draft_len: 3}\n")
    with start("--config", str(config), "--tp_size", "2") as server, connect(server) as client:
        server.wait_ready()
        answer = client.chat.completions.create(model=MODEL, messages=USER, temperature=0, n=2)
        assert [choice.speculation for choice in answer.choices] == (
            [answer.choices[0].speculation] * 2  # greedy twins
        )
        length = answer.speculation["acceptance_length"]
        shares = answer.speculation["acceptance_per_position"]
        assert length == answer.choices[0].speculation["acceptance_length"] > 1
        assert length == pytest.approx(1 + sum(shares))
        wait_for(lambda: series(server.http, "trtllm_requests_running") == 0)
        assert series(server.http, "trtllm_acceptance_length") == length
        steps = answer.speculation["verify_steps"]
        assert series(server.http, "trtllm_verify_steps_total") == steps
        for position, share in enumerate(shares):
            name = f'trtllm_accepted_drafts_total{{position="{position}"}}'
            assert series(server.http, name) == pytest.approx(share * steps)
        *_, last = client.completions.create(**LONG | {"max_tokens": 9}, stream=True)
        assert last.choices[0].finish_reason == "length"
        assert last.choices[0].speculation["verify_steps"] >= 2
        wait_for(lambda: server.log().count("speculation: ") == 2)  # by one rank, for each request
        by_position = " ".join(f"{share:.2f}" for share in shares)
        assert f"acceptance length {length:.2f}, by position {by_position}" in server.log()


def last_event(server: ServerProcess, result: list[str]) -> threading.Thread:
    """Stream a long answer in a thread, which puts the last event before `[DONE]` into `result`."""

    def read() -> None:
        body = {"model": MODEL, "prompt": "Count", "max_tokens": 500, "ignore_eos": True}
        with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        result.append(lines[-2].removeprefix("data: "))

    thread = threading.Thread(target=read)
    thread.start()
    wait_for(lambda: series(server.http, "trtllm_generation_tokens_total") > 0)
    return thread


def test_ctrl_c_ends_the_server_and_its_ranks_in_two_seconds() -> None:
    with start() as server:
        server.wait_ready()
        ranks = psutil.Process(server.process.pid).children(recursive=True)
        events: list[str] = []
        thread = last_event(server, events)
        assert server.stop(signal.SIGINT) < 2
        assert server.process.returncode == 0
        thread.join()
        assert events
        wait_for(lambda: all(map(has_ended, ranks)))


def test_ctrl_c_while_loading() -> None:
    with start() as server:
        server.wait_listening()
        ranks = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop(signal.SIGINT) < 2
        assert server.process.returncode == 0
        wait_for(lambda: all(map(has_ended, ranks)))


def test_a_dead_rank_ends_the_server() -> None:
    with start("--tp_size", "2") as server:
        server.wait_ready()
        ranks = psutil.Process(server.process.pid).children()
        assert len(ranks) == 2
        events: list[str] = []
        thread = last_event(server, events)
        ranks[1].kill()
        thread.join()
        assert "died" in json.loads(events[0])["error"]["message"]
        assert server.process.wait(timeout=10) == 1
        assert "rank 1 died: killed by SIGKILL" in server.log()
        wait_for(lambda: all(map(has_ended, ranks)))


def test_a_checkpoint_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    with start(checkpoint=tmp_path / "nothing") as server:
        assert server.process.wait(timeout=10) == 1
        assert "nothing" in server.log()


def test_a_checkpoint_that_does_not_fit_its_config_ends_the_server(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(CHECKPOINT, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 1000}))
    with start(checkpoint=broken) as server:
        assert server.process.wait(timeout=30) == 1
        assert "rank 0 died" in server.log()
        assert "mlp.gate_proj.weight" in server.log()
