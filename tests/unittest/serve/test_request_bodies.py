"""Hypothesis sends junk and near misses: always an answer, never a server error."""

import httpx
from helpers.fake_llm import MODEL
from helpers.request_bodies import chats, check, completions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SETTINGS = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@SETTINGS
@given(body=completions(MODEL))
def test_completion_bodies(http: httpx.Client, body: object) -> None:
    check(http, "/v1/completions", body)


@SETTINGS
@given(body=chats(MODEL))
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
