"""Every request field is accounted for: served with proof, refused by name, or without effect."""

import re
from typing import Any, get_type_hints

import httpx
import pytest
from helpers.fake_llm import MODEL, FakeLLM
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as OpenAIChat
from openai.types.completion_create_params import CompletionCreateParamsBase as OpenAICompletion

from tensorrt_llm.serve.fields import Inert, Refused, RequestModel, Served
from tensorrt_llm.serve.openai_protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    Message,
    StreamOptions,
    TextPart,
)

PATHS: dict[type[RequestModel], str] = {
    CompletionRequest: "/v1/completions",
    ChatCompletionRequest: "/v1/chat/completions",
}
MINIMAL: dict[type[RequestModel], dict[str, Any]] = {
    CompletionRequest: {"model": MODEL, "prompt": "hi"},
    ChatCompletionRequest: {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
}
# TensorRT-LLM's extensions of OpenAI's schema.
EXTENSIONS = [
    "lora_request",
    "prompt_ignore_length",
    "use_beam_search",
    "top_k",
    "top_p_min",
    "min_p",
    "repetition_penalty",
    "length_penalty",
    "early_stopping",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "detokenize",
    "thinking_token_budget",
    "add_special_tokens",
    "response_format",
    "disaggregated_params",
    "conversation_params",
    "priority",
]
COMPLETION_EXTENSIONS = ["return_context_logits"]
CHAT_EXTENSIONS = [
    "prompt_token_ids",
    "prompt_token_ids_b64",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "documents",
]

# Served fields that are attributes of SamplingParams, with a value that is not the default.
PASSED_ON: dict[str, Any] = {
    "n": 2,
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 42,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "max_tokens": 3,
    "min_tokens": 2,
    "stop_token_ids": [7],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 1,
    "add_special_tokens": False,
}
# Served fields that become something else there: a value, the attribute, its value.
CONVERTED: dict[str, tuple[Any, str, Any]] = {
    "stop": ("a", "stop_strings", ["a"]),
    "logit_bias": ({"5": -2, "17": 0.5}, "logit_bias", {5: -2.0, 17: 0.5}),
    "max_completion_tokens": (3, "max_tokens", 3),
}
SAMPLED = {name: (value, name, value) for name, value in PASSED_ON.items()} | CONVERTED
# Served fields: what else must be in the request, and a value that must change the answer.
SHOWN: dict[str, tuple[dict[str, Any], Any]] = {
    "model": ({}, "other"),
    "prompt": ({"echo": True}, "ho"),
    "messages": ({}, [{"role": "user", "content": "good morning"}]),
    "stream": ({}, True),
    "stream_options": ({"stream": True}, {"include_usage": True}),
    "echo": ({}, True),
    "logprobs": ({}, 1),
    "top_logprobs": ({"logprobs": True}, 2),
    "best_of": ({"n": 2}, 3),
    "detokenize": ({}, False),
    "add_generation_prompt": ({}, False),
    "chat_template_kwargs": ({}, {"thinking": "yes"}),
}
SHOWN_IN_CHAT = SHOWN | {"logprobs": ({}, True)}
ENDPOINTS = [CompletionRequest, ChatCompletionRequest]
ANY = {"some": "value"}  # of no type that a neutral value has


def fields(kind: type) -> list[tuple[type[RequestModel], str]]:
    return [
        (model, name)
        for model in ENDPOINTS
        for name, account in model.accounts().items()
        if isinstance(account, kind)
    ]


def answer(http: httpx.Client, endpoint: type[RequestModel], **change: Any) -> tuple[int, str]:
    """Status and body, without what differs from answer to answer."""
    response = http.post(PATHS[endpoint], json=MINIMAL[endpoint] | change)
    return response.status_code, re.sub(r'"(id":"[\w-]+|created":\d+)', "", response.text)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (CompletionRequest, [*get_type_hints(OpenAICompletion), *EXTENSIONS]),
        (CompletionRequest, ["stream", *COMPLETION_EXTENSIONS]),
        (ChatCompletionRequest, [*get_type_hints(OpenAIChat), *EXTENSIONS]),
        (ChatCompletionRequest, ["stream", *CHAT_EXTENSIONS]),
    ],
)
def test_no_field_of_the_schemas_is_unaccounted(
    model: type[RequestModel], names: list[str]
) -> None:
    assert set(names) <= set(model.accounts())


@pytest.mark.parametrize("model", [*ENDPOINTS, Message, TextPart, StreamOptions])
def test_every_account_says_something(model: type[RequestModel]) -> None:
    for name, account in model.accounts().items():
        text = account.description if isinstance(account, Served) else account.reason
        assert text, name
    assert not set(model.UNSERVED) & set(model.model_fields)


def test_every_served_field_has_a_proof() -> None:
    assert {name for _, name in fields(Served)} == set(SAMPLED) | set(SHOWN)


@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model, name in fields(Served) if name in SAMPLED]
)
def test_a_served_field_reaches_the_engine(
    http: httpx.Client, llm: FakeLLM, model: type[RequestModel], name: str
) -> None:
    value, attribute, expected = SAMPLED[name]
    answer(http, model)
    status, _ = answer(http, model, **{name: value})
    assert status == 200
    (_, plain), (_, changed) = llm.calls
    assert getattr(changed, attribute) == expected
    assert getattr(plain, attribute) != expected


@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model, name in fields(Served) if name in SHOWN]
)
def test_a_served_field_changes_the_answer(
    http: httpx.Client, llm: FakeLLM, model: type[RequestModel], name: str
) -> None:
    base, value = (SHOWN_IN_CHAT if model is ChatCompletionRequest else SHOWN)[name]
    assert answer(http, model, **base) == answer(http, model, **base)
    assert answer(http, model, **base) != answer(http, model, **base, **{name: value})


def test_max_completion_tokens_wins(http: httpx.Client, llm: FakeLLM) -> None:
    answer(http, ChatCompletionRequest, max_tokens=9, max_completion_tokens=3)
    assert llm.calls[0][1].max_tokens == 3


def test_defaults_are_openais(http: httpx.Client, llm: FakeLLM) -> None:
    answer(http, CompletionRequest)
    answer(http, ChatCompletionRequest)
    (_, completion), (_, chat) = llm.calls
    assert (completion.temperature, chat.temperature) == (1.0, 1.0)
    assert (completion.max_tokens, chat.max_tokens) == (16, None)


@pytest.mark.parametrize(("model", "name"), fields(Refused))
def test_a_refused_field_is_a_400_that_names_it(
    http: httpx.Client, llm: FakeLLM, model: type[RequestModel], name: str
) -> None:
    response = http.post(PATHS[model], json=MINIMAL[model] | {name: ANY})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    account = model.accounts()[name]
    assert isinstance(account, Refused)
    assert account.reason in response.json()["error"]["message"]
    assert not llm.calls
    for neutral in (None, *account.neutral):
        assert answer(http, model, **{name: neutral})[0] == 200


@pytest.mark.parametrize(("model", "name"), fields(Inert))
def test_an_inert_field_changes_nothing(
    http: httpx.Client, llm: FakeLLM, model: type[RequestModel], name: str
) -> None:
    assert answer(http, model) == answer(http, model, **{name: ANY})
    assert llm.calls[0] == llm.calls[1]
