"""Requests that the engine could not serve are refused with field, value and limit."""

from pathlib import Path
from typing import Any

import pytest

from tensorrt_llm._torch.pyexecutor.messages import EngineReady
from tensorrt_llm.llmapi import RequestError
from tensorrt_llm.llmapi.prompts import Prompt, RequestChecker
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.tokenizer import load_tokenizer

ENGINE = EngineReady(
    max_seq_len=20,
    max_num_tokens=16,
    max_batch_size=4,
    vocab_size=512,
    eos_token_ids=(502,),
    kv_total_blocks=16,
    tokens_per_block=32,
    weights_bytes=0,
    kv_cache_bytes=0,
)
DEFAULTS = SamplingParams()


@pytest.fixture(scope="module")
def checker(checkpoint: Path) -> RequestChecker:
    return RequestChecker(load_tokenizer(checkpoint), ENGINE, max_prompt_tokens=16)


@pytest.mark.parametrize("inputs", ["abc", {"prompt": "abc"}])
def test_text(checker: RequestChecker, inputs: Any) -> None:
    assert checker.tokenizer is not None
    ids = checker.tokenizer.encode("abc").ids
    assert checker.prompt_of(inputs, DEFAULTS) == Prompt("abc", ids)


@pytest.mark.parametrize("inputs", [[1, 2, 3], {"prompt_token_ids": [1, 2, 3]}])
def test_token_ids(checker: RequestChecker, inputs: Any) -> None:
    assert checker.prompt_of(inputs, DEFAULTS) == Prompt(None, [1, 2, 3])
    assert checker.prompt_of(inputs, SamplingParams(truncate_prompt_tokens=2)).token_ids == [2, 3]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1, 512], "prompt_token_ids has 512; a token id is at least 0 and below vocab_size 512"),
        ([-1], "prompt_token_ids has -1"),
        (
            [1] * 17,
            "the prompt has 17 tokens; it must have at most 16 (max_seq_len 20, max_num_tok",
        ),
        ([1, 2.0], "the prompt is [1, 2.0]; it must be a text or a list of token ids"),
        ([True], "the prompt is [True]; it must be"),
        (7, "the prompt is 7; it must be"),
        ({"prompt": [1]}, "prompt is [1]; it must be a text"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids is 'a'; it must be a list of token ids"),
        (
            {"prompt": "a", "image": "b"},
            "the prompt has keys ['prompt', 'image']; it must have one",
        ),
        ({}, "the prompt has keys []"),
    ],
)
def test_refused_prompts(checker: RequestChecker, inputs: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        checker.prompt_of(inputs, DEFAULTS)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("params", "max_tokens"),
    [(None, 17), (SamplingParams(max_tokens=None), 17), (SamplingParams(max_tokens=17), 17)],
)
def test_max_tokens_up_to_the_room(
    checker: RequestChecker, params: SamplingParams | None, max_tokens: int
) -> None:
    assert checker.params_for(Prompt(None, [1, 2, 3]), params).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"max_tokens": 18},
            "the prompt's 3 tokens and max_tokens 18 make 21; max_seq_len is 20",
        ),
        ({"max_tokens": None, "min_tokens": 18}, "min_tokens is 18; it must be at most max_tokens"),
        ({"stop_token_ids": [600]}, "stop_token_ids has 600; a token id is"),
        ({"logit_bias": {512: 1.0}}, "logit_bias has 512; a token id is"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias has '5'; a token id is"),
        ({"logprobs": 513}, "logprobs is 513; the vocabulary has 512 tokens"),
        ({"prompt_logprobs": 513}, "prompt_logprobs is 513; the vocabulary"),
    ],
)
def test_refused_params(checker: RequestChecker, params: dict[str, Any], message: str) -> None:
    fitting = {"max_tokens": 4} | params
    with pytest.raises(RequestError) as caught:
        checker.params_for(Prompt(None, [1, 2, 3]), SamplingParams(**fitting))
    assert str(caught.value).startswith(message)


def test_without_a_tokenizer() -> None:
    checker = RequestChecker(None, ENGINE, max_prompt_tokens=16)
    with pytest.raises(RequestError, match="the prompt is a text, but there is no tokenizer"):
        checker.prompt_of("a", DEFAULTS)
    with pytest.raises(RequestError, match="stop is 'x', but there is no tokenizer"):
        checker.params_for(Prompt(None, [1]), SamplingParams(stop="x", max_tokens=1))
