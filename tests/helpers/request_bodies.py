"""Hypothesis strategies for request bodies: junk and near misses."""

import json
from typing import Any

import httpx
from hypothesis import strategies as st

from tensorrt_llm.serve.fields import RequestModel
from tensorrt_llm.serve.openai_protocol import ChatCompletionRequest, CompletionRequest

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
    "max_tokens": st.integers(-1, 20),
    "max_completion_tokens": st.integers(-1, 20),
    "min_tokens": st.integers(-1, 20),
    "logprobs": st.integers(-1, 21) | st.booleans(),
    "top_logprobs": st.integers(-1, 21),
    "temperature": st.floats(-0.1, 3),
    "top_p": st.floats(-0.1, 1.1),
    "min_p": st.floats(-0.1, 1.1),
    "top_k": st.integers(-1, 1000),
    "presence_penalty": st.floats(-2.1, 2.1),
    "frequency_penalty": st.floats(-2.1, 2.1),
    "repetition_penalty": st.floats(-0.1, 3) | NUMBERS,
    "stream": st.booleans(),
    "echo": st.booleans(),
    "ignore_eos": st.booleans(),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "stop_token_ids": st.lists(st.integers(-1, 600), max_size=3),
    "logit_bias": st.dictionaries(st.integers(-2, 600).map(str) | TEXT, NUMBERS, max_size=3),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "x"]), JUNK),
    "chat_template_kwargs": st.dictionaries(TEXT | st.sampled_from(["thinking", "m"]), JUNK),
}


def completions(model: str) -> st.SearchStrategy[Any]:
    """Bodies for /v1/completions."""
    return JUNK | _bodies(CompletionRequest, model=st.just(model), prompt=PROMPTS)


def chats(model: str) -> st.SearchStrategy[Any]:
    """Bodies for /v1/chat/completions."""
    messages = st.lists(MESSAGE, max_size=3) | JUNK
    return JUNK | _bodies(ChatCompletionRequest, model=st.just(model), messages=messages)


def check(http: httpx.Client, path: str, body: object) -> None:
    """Send a body: an answer, a well-formed refusal, never a server error."""
    content = json.dumps(body).encode()  # NaN and Infinity included
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
        assert '{"error"' not in response.text


def _bodies(
    endpoint: type[RequestModel], **required: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    """The required fields and a few others, most of them nearly right, one in eight junk."""
    others = sorted(set(endpoint.accounts()) - set(required))
    values = {
        name: st.integers(0, 7).flatmap(
            lambda k, name=name: JUNK if k == 0 else PLAUSIBLE.get(name, NUMBERS | JUNK)
        )
        for name in others
    }
    chosen = st.lists(st.sampled_from(others), max_size=5, unique=True)
    return chosen.flatmap(
        lambda names: st.fixed_dictionaries(required | {name: values[name] for name in names})
    )
