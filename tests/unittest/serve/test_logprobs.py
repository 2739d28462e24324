"""Tokens on their own: text where they are whole characters, bytes always."""

import json
import math

import pytest
from helpers.fake_llm import chat_tokenizer

from tensorrt_llm._torch.pyexecutor.messages import Logprob
from tensorrt_llm.serve.logprobs import TokenTexts, chat_logprobs, completion_logprobs


@pytest.mark.parametrize(
    "text", ["a", " ", "\n", "\x00", "ü", "€", "\N{REPLACEMENT CHARACTER}", "🙂"]
)
def test_bytes_of_tokens_make_up_the_text(text: str) -> None:
    tokenizer = chat_tokenizer()
    texts = TokenTexts(tokenizer)
    tokens = tokenizer.encode(text)
    assert b"".join(texts.bytes(token) for token in tokens) == text.encode()


def test_a_part_of_a_character_is_spelled_in_bytes() -> None:
    tokenizer = chat_tokenizer()
    assert [TokenTexts(tokenizer).text(t) for t in tokenizer.encode("ü")] == [
        "bytes:\\xc3",
        "bytes:\\xbc",
    ]


def test_a_probability_of_zero_is_still_json() -> None:
    texts = TokenTexts(chat_tokenizer())
    entry = {0: Logprob(-0.5, 1), 1: Logprob(-math.inf, 2)}
    legacy = completion_logprobs(texts, [1], [entry], offset=0)
    chat = chat_logprobs(texts, [1], [entry], top=2)
    assert legacy["token_logprobs"] == [-9999.0]
    assert chat["content"][0]["logprob"] == -9999.0
    json.dumps([legacy, chat], allow_nan=False)


def test_special_tokens_have_their_name() -> None:
    tokenizer = chat_tokenizer()
    assert TokenTexts(tokenizer).text(tokenizer.eos_token_id) == "<|end|>"
