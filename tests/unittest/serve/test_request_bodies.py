"""Hypothesis sends junk and near misses: always an answer, never a server error."""

import json
from typing import Any

import httpx
from helpers.fake_llm import MODEL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorrt_llm.serve.fields import RequestModel
from tensorrt_llm.serve.openai_protocol import ChatCompletionRequest, CompletionRequest

SETTINGS = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 0.5, 1e308, -1e308, 2**31, 2**63, 2**64, 10**400, True]),
    st.floats(),
    st.integers(),
)
TEXT = st.text(st.characters(codec=None), max_size=10)  # lone surrogates too
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
PROMPTS = st.one_of(
    TEXT,
    st.lists(st.integers(-2, 300), max_size=5),
    st.lists(TEXT | st.lists(st.integers(0, 300), max_size=3), max_size=3),
    JUNK,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]) | JUNK},
    optional={
        "content": TEXT | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT})),
        "name": JUNK,
        "tool_calls": JUNK,
    },
)
PLAUSIBLE = {  # values near the border of what is served
    "n": st.integers(-1, 3),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "stop_token_ids": st.lists(NUMBERS, max_size=3),
    "logit_bias": st.dictionaries(st.integers(-2, 300).map(str) | TEXT, NUMBERS, max_size=3),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "x"]), JUNK),
    "chat_template_kwargs": st.dictionaries(TEXT | st.sampled_from(["thinking", "m"]), JUNK),
}


def bodies(model: type[RequestModel], **required: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Bodies with the required fields and any of the others, each with a value near or far."""
    others = set(model.accounts()) - {"model", *required}
    optional = {name: PLAUSIBLE.get(name, NUMBERS) | JUNK for name in others}
    few = st.lists(st.sampled_from(sorted(others)), max_size=5, unique=True)
    return few.flatmap(
        lambda names: st.fixed_dictionaries(
            {"model": st.just(MODEL), **required, **{name: optional[name] for name in names}}
        )
    )


def check(http: httpx.Client, path: str, body: object) -> None:
    content = json.dumps(body).encode()  # NaN and Infinity included
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in response.text


@SETTINGS
@given(body=JUNK | bodies(CompletionRequest, prompt=PROMPTS))
def test_completion_bodies(http: httpx.Client, body: object) -> None:
    check(http, "/v1/completions", body)


@SETTINGS
@given(body=JUNK | bodies(ChatCompletionRequest, messages=st.lists(MESSAGE, max_size=3) | JUNK))
def test_chat_bodies(http: httpx.Client, body: object) -> None:
    check(http, "/v1/chat/completions", body)


@settings(SETTINGS, max_examples=30)
@given(content=st.binary(max_size=50), kind=st.sampled_from(["application/json", "text/plain", ""]))
def test_bodies_of_bytes(http: httpx.Client, content: bytes, kind: str) -> None:
    response = http.post("/v1/completions", content=content, headers={"content-type": kind})
    assert response.status_code in (400, 404)
    assert response.json()["error"]["message"]


def test_the_server_still_answers(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "hi"}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "grün €5"
