"""Endpoints over real HTTP with the `openai` package; the model is scripted."""

import itertools
import json

import httpx
import openai
import pytest
from helpers.fake_llm import MAX_SEQ_LEN, MODEL, FakeLLM, engine_stats
from helpers.server_process import series, wait_for

from tensorrt_llm._torch.pyexecutor.messages import PathCounts, SpeculationStats
from tensorrt_llm.version import __version__

CANCELLED = 'trtllm_requests_finished_total{reason="cancelled"}'
FAILED = 'trtllm_requests_finished_total{reason="failed"}'
USER = [{"role": "user", "content": "hi"}]


def events(response: httpx.Response) -> list[str]:
    """The payloads of a whole event stream."""
    return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hi")
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.index) == ("grün €5", "stop", 0)
    assert answer.object == "text_completion"
    # 7 letters, two of them of 2 and 3 bytes, and the end token
    assert answer.usage.to_dict() == {
        "prompt_tokens": 2,
        "completion_tokens": 11,
        "total_tokens": 13,
    }


def test_completion_stops_at_max_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hi", max_tokens=2)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("gr", "length")


def test_completion_stream_keeps_characters_whole(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="hi", stream=True))
    assert [c.choices[0].text for c in chunks] == ["g", "r", "ü", "n", " ", "€", "5", ""]
    assert [c.choices[0].finish_reason for c in chunks] == [None] * 7 + ["stop"]
    assert len({c.id for c in chunks}) == 1


def test_prompts_in_all_four_forms(client: openai.OpenAI, llm: FakeLLM) -> None:
    for prompt, count in (("ab", 1), ([65, 66], 1), (["ab", "c"], 2), ([[65], [66, 67]], 2)):
        answer = client.completions.create(model=MODEL, prompt=prompt, n=2)
        assert [c.index for c in answer.choices] == list(range(2 * count))
        assert [c.text for c in answer.choices] == ["grün €5", "grün €5?"] * count
    assert [inputs for inputs, _ in llm.calls] == ["ab", [65, 66], "ab", "c", [65], [66, 67]]


def test_stream_of_several_prompts_and_choices_tells_them_apart(client: openai.OpenAI) -> None:
    texts: dict[int, str] = {}
    ends: list[int] = []
    for chunk in client.completions.create(model=MODEL, prompt=["a", "b"], n=2, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        if choice.finish_reason:
            ends.append(choice.index)
    assert texts == {0: "grün €5", 1: "grün €5?", 2: "grün €5", 3: "grün €5?"}
    assert sorted(ends) == [0, 1, 2, 3]


def test_echo_with_logprobs(client: openai.OpenAI, llm: FakeLLM) -> None:
    llm.script = "€"
    answer = client.completions.create(model=MODEL, prompt="hi", echo=True, logprobs=2)
    choice = answer.choices[0]
    assert choice.text == "hi€"
    logprobs = choice.logprobs
    assert logprobs.tokens == ["h", "i", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "<|end|>"]
    assert logprobs.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5, -0.5]
    assert logprobs.text_offset[:3] == [0, 1, 2]
    assert logprobs.top_logprobs[0] is None
    assert len(logprobs.top_logprobs[1]) == 3  # the chosen token and the two most likely


def test_echo_of_token_ids_in_a_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt=[65, 66], echo=True, logprobs=0, stream=True
    )
    chunks = [chunk.choices[0] for chunk in stream]
    whole = client.completions.create(model=MODEL, prompt=[65, 66], echo=True, logprobs=0)
    assert "".join(c.text for c in chunks) == whole.choices[0].text
    streamed = [token for c in chunks for token in c.logprobs.tokens]
    offsets = [offset for c in chunks for offset in c.logprobs.text_offset]
    assert streamed == whole.choices[0].logprobs.tokens
    assert offsets == whole.choices[0].logprobs.text_offset


def test_chat(client: openai.OpenAI, llm: FakeLLM) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
    )
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == "grün €5"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    prompt, params = llm.calls[0]
    assert prompt == "<|system|>be brief<|user|>hi<|assistant|>"
    assert (params.max_tokens, params.add_special_tokens) == (None, False)


def test_chat_stream_with_usage(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": USER, "stream": True, "n": 2}
    body["stream_options"] = {"include_usage": True}
    response = http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response)
    assert done == "[DONE]"
    *chunks, last = [json.loads(chunk) for chunk in chunks]
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 23, "completion_tokens": 23, "total_tokens": 46}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert [c["choices"][0]["delta"]["role"] for c in chunks[:2]] == ["assistant"] * 2
    for index, text in ((0, "grün €5"), (1, "grün €5?")):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == text
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]


def test_chat_stream_of_the_openai_package(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=USER, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == "grün €5"


def test_chat_logprobs(client: openai.OpenAI, llm: FakeLLM) -> None:
    llm.script = "ü"
    options = {"model": MODEL, "messages": USER, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    assert [entry.bytes for entry in whole] == [[0xC3], [0xBC], list(b"<|end|>")]
    assert [entry.logprob for entry in whole] == [-0.5] * 3
    assert [top.logprob for top in whole[0].top_logprobs] == [-1.0, -2.0]
    stream = client.chat.completions.create(**options, stream=True)
    streamed = [e for c in stream if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert streamed == whole


def test_token_ids_instead_of_text(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "hi", "detokenize": False, "max_tokens": 3}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], len(choice["token_ids"])) == ("", 3)
    streamed = events(http.post("/v1/completions", json=body | {"stream": True}))[:-1]
    ids = [t for chunk in streamed for t in json.loads(chunk)["choices"][0]["token_ids"]]
    assert ids == choice["token_ids"]


SPECULATION = {
    "acceptance_length": 2.5,
    "acceptance_per_position": [0.75, 0.5, 0.25],
    "verify_steps": 4,
}


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_answers_say_how_drafts_fared(http: httpx.Client, llm: FakeLLM, path: str) -> None:
    llm.speculation = SpeculationStats(4, (3, 2, 1))
    body = {"model": MODEL, "n": 2} | ({"messages": USER} if "chat" in path else {"prompt": "hi"})
    whole = http.post(f"/v1/{path}", json=body).json()
    assert [choice["avg_decoded_tokens_per_iter"] for choice in whole["choices"]] == [1.0, 1.0]
    assert [choice["speculation"] for choice in whole["choices"]] == [SPECULATION] * 2
    total = SPECULATION | {"verify_steps": 8}
    assert whole["speculation"] == total
    for options in (None, {"include_usage": True}):
        response = http.post(f"/v1/{path}", json=body | {"stream": True, "stream_options": options})
        chunks = [json.loads(event) for event in events(response)[:-1]]
        if options:
            last = chunks.pop()
            assert (last["choices"], last["speculation"]) == ([], total)
        assert not any("speculation" in chunk for chunk in chunks)
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            ended = choice["finish_reason"] is not None
            assert choice.get("speculation") == (SPECULATION if ended else None)
            assert choice.get("avg_decoded_tokens_per_iter") == (1.0 if ended else None)


def test_the_openai_package_reads_how_drafts_fared(client: openai.OpenAI, llm: FakeLLM) -> None:
    llm.speculation = SpeculationStats(4, (3, 2, 1))
    completions, chat = client.completions.create, client.chat.completions.create
    for answer in (
        completions(model=MODEL, prompt="hi"),
        chat(model=MODEL, messages=USER),
        list(completions(model=MODEL, prompt="hi", stream=True))[-1],
        list(chat(model=MODEL, messages=USER, stream=True))[-1],
    ):
        assert answer.choices[0].speculation == SPECULATION


def test_answers_without_drafts_and_without_a_verified_one(
    http: httpx.Client, llm: FakeLLM
) -> None:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
    answer = http.post("/v1/completions", json=body).json()
    assert "speculation" not in answer and "speculation" not in answer["choices"][0]
    llm.speculation = SpeculationStats(0, (0, 0))
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["speculation"] == {
        "acceptance_length": None,
        "acceptance_per_position": None,
        "verify_steps": 0,
    }


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "tensorrt_llm"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'other' does not exist") as info:
        client.chat.completions.create(model="other", messages=USER)
    assert info.value.code == "model_not_found"


def test_version_and_health(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": __version__}
    assert http.get("/health").status_code == 200


def test_the_openapi_document_has_the_request_fields(http: httpx.Client) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert {"CompletionRequest", "ChatCompletionRequest", "Message"} <= set(schemas)
    assert "temperature" in schemas["ChatCompletionRequest"]["properties"]


@pytest.mark.parametrize(
    ("path", "change", "names"),
    [
        ("completions", {"max_tokens": 0}, ["max_tokens is 0"]),
        ("completions", {"prompt": ""}, ["prompt", "empty"]),
        ("completions", {"prompt": []}, ["prompt", "empty"]),
        ("completions", {"prompt": [[65], []]}, ["prompt", "empty"]),
        ("completions", {"prompt": [65, 9999]}, ["token id", "259"]),
        ("completions", {"prompt": "x" * 100}, ["100", str(MAX_SEQ_LEN)]),
        ("completions", {"prompt": ["x", "y" * 100]}, ["100", str(MAX_SEQ_LEN)]),
        ("completions", {"prompt": ["x"] * 1025}, ["prompt", "1024"]),
        ("completions", {"prompt": "\ud800"}, ["prompt"]),
        ("completions", {"temperature": -1}, ["temperature is -1"]),
        ("completions", {"temperature": "hot"}, ["temperature is 'hot'"]),
        ("completions", {"temprature": 1}, ["temprature", "did you mean 'temperature'"]),
        ("completions", {"suffix": "!"}, ["suffix is '!'", "not supported"]),
        ("completions", {"best_of": 2}, ["best_of is 2", "n (1)"]),
        ("completions", {"logprobs": 21}, ["logprobs is 21"]),
        ("completions", {"stop": ""}, ["stop"]),
        ("completions", {"logit_bias": {"x": 1}}, ["logit_bias", "'x'"]),
        ("completions", {"logit_bias": {"5": 1e308}}, ["logit_bias", "[5] is 1e+308", "100"]),
        ("completions", {"repetition_penalty": 1e-300}, ["repetition_penalty is 1e-300", "0.01"]),
        ("completions", {"stream_options": {}}, ["stream_options", "stream"]),
        ("completions", {"echo": True, "detokenize": False}, ["echo", "detokenize"]),
        ("chat/completions", {"messages": []}, ["messages is []"]),
        ("chat/completions", {"max_tokens": 0}, ["max_tokens is 0"]),
        ("chat/completions", {"max_completion_tokens": 0}, ["max_completion_tokens is 0"]),
        ("chat/completions", {"top_logprobs": 2}, ["top_logprobs is 2", "logprobs"]),
        ("chat/completions", {"tools": [{}]}, ["tools is [{}]", "not supported"]),
        ("chat/completions", {"messages": [{"role": "user"}]}, ["messages[0].content is None"]),
        ("chat/completions", {"messages": [{"role": "tool"}]}, ["messages[0].role is 'tool'"]),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}]},
            ["messages[0].content[0].image_url is 'u'"],
        ),
        ("chat/completions", {"chat_template_kwargs": {"thnking": 1}}, ["thnking", "no variable"]),
        ("chat/completions", {"chat_template_kwargs": {"tokenize": True}}, ["tokenize"]),
        ("chat/completions", {"chat_template_kwargs": {"thinking": {}}}, ["template", "accept"]),
    ],
)
def test_bad_values_are_400s_that_name_them(
    http: httpx.Client, path: str, change: dict[str, object], names: list[str]
) -> None:
    base = {"prompt": "hi"} if path == "completions" else {"messages": USER}
    body = json.dumps({"model": MODEL, **base, **change})
    for _ in range(2):  # nothing of the first one lingers
        response = http.post(
            f"/v1/{path}", content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert all(name in error["message"] for name in names), error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_bodies_that_are_no_json_object(http: httpx.Client, body: bytes) -> None:
    response = http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_unknown_paths_and_methods_have_openai_errors(http: httpx.Client) -> None:
    assert "/v1/nothing" in http.get("/v1/nothing").json()["error"]["message"]
    assert http.get("/v1/completions").status_code == 405


def test_a_prompt_that_does_not_fit_gives_up_its_siblings(http: httpx.Client, llm: FakeLLM) -> None:
    http.post("/v1/completions", json={"model": MODEL, "prompt": ["ok", "x" * 100]})
    assert [output.aborted for output in llm.outputs] == [True]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(
    http: httpx.Client, llm: FakeLLM, stream: bool
) -> None:
    before = series(http, CANCELLED)
    llm.delay = 0.02
    llm.script = "x" * 1000
    body = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 1000, "stream": stream}
    if stream:
        with http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=body, timeout=0.2)
    wait_for(lambda: llm.running == 0, seconds=1)
    assert [output.aborted for output in llm.outputs] == [True, True]
    assert series(http, CANCELLED) == before + 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_request_ends_with_its_error(
    http: httpx.Client, llm: FakeLLM, stream: bool
) -> None:
    before = series(http, FAILED)
    llm.error = "NaN logits"
    response = http.post(
        "/v1/completions", json={"model": MODEL, "prompt": ["a", "b"], "stream": stream}
    )
    if stream:
        error, done = events(response)
        assert "NaN logits" in json.loads(error)["error"]["message"]
        assert done == "[DONE]"
    else:
        assert response.status_code == 500
        assert "NaN logits" in response.json()["error"]["message"]
    assert series(http, FAILED) == before + 2
    llm.error = None
    assert http.post("/v1/completions", json={"model": MODEL, "prompt": "a"}).status_code == 200


def test_metrics_of_the_engine(http: httpx.Client, llm: FakeLLM) -> None:
    assert "trtllm_kv_cache_used_blocks" not in http.get("/metrics").text  # no step yet
    llm.latest_stats = engine_stats(num_running=2, kv_used_blocks=4)
    assert series(http, "trtllm_requests_running") == 2
    assert series(http, "trtllm_requests_waiting") == 0
    assert series(http, 'trtllm_kv_cache_used_blocks{pool="key"}') == 4
    assert series(http, 'trtllm_kv_cache_blocks{pool="index_key"}') == 20
    assert series(http, 'trtllm_kv_cache_usage_ratio{pool="key"}') == 0.4


def test_metrics_of_drafts(http: httpx.Client, llm: FakeLLM) -> None:
    llm.latest_stats = engine_stats()
    assert "trtllm_verify_steps" not in http.get("/metrics").text  # nobody drafts
    llm.latest_stats = engine_stats(speculation=SpeculationStats(10, (9, 6, 0)))
    assert series(http, "trtllm_verify_steps_total") == 10
    assert series(http, 'trtllm_accepted_drafts_total{position="1"}') == 6
    assert series(http, "trtllm_acceptance_length") == 2.5


def test_metrics_of_paths(http: httpx.Client, llm: FakeLLM) -> None:
    llm.latest_stats = engine_stats()
    assert "trtllm_generation_steps" not in http.get("/metrics").text  # nobody tells a path
    steps = {"target": PathCounts(fast=5, builtin=2), "draft": PathCounts(builtin=7)}
    llm.latest_stats = engine_stats(generation_steps=steps)
    text = http.get("/metrics").text
    counts = {("target", "fast"): 5, ("target", "builtin"): 2, ("draft", "builtin"): 7}
    for part, path in itertools.product(("target", "draft"), ("fast", "builtin")):
        name = f'trtllm_generation_steps_total{{part="{part}",path="{path}"}}'
        assert f"{name} {counts.get((part, path), 0)}.0\n" in text


def test_metrics_of_requests(http: httpx.Client) -> None:
    gains = {
        "trtllm_prompt_tokens_total": 2,
        "trtllm_generation_tokens_total": 6,
        "trtllm_time_to_first_token_seconds_count": 2,
        "trtllm_inter_token_latency_seconds_count": 4,
        'trtllm_requests_finished_total{reason="length"}': 2,
        'trtllm_requests_finished_total{reason="stop"}': 0,
    }
    before = {name: series(http, name) for name in gains}
    http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 3, "n": 2})
    assert {name: series(http, name) - before[name] for name in gains} == gains
