"""Sampling against independent formulas: transformers' filters, OpenAI's penalties, log_softmax."""

import math
from collections import Counter

import pytest
import torch
from helpers.reference_sampling import hf_probabilities
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from tensorrt_llm import SamplingParams
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest
from tensorrt_llm._torch.pyexecutor.messages import NewRequest
from tensorrt_llm._torch.pyexecutor.sampler import TorchSampler, uniform

VOCAB = 24


def make_request(
    prompt: list[int] | None = None, output: list[int] | None = None, choice: int = 0, **params
) -> LlmRequest:
    message = NewRequest(7, prompt or [1, 2, 3], SamplingParams(**params), choice)
    request = LlmRequest(message, max_seq_len=1000, eos_token_ids=(5,))
    for token in output or []:
        request.append(token)
    return request


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def sample(logits: torch.Tensor, *requests: LlmRequest) -> list[int]:
    result = TorchSampler().sample(logits, requests)
    assert [r.error for r in result] == [None] * len(requests)
    return [r.token_id for r in result]


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    logits = random_logits(0, rows=3)
    logits[1, 4] = logits[1, 9] = 50.0
    requests = [make_request(), make_request(temperature=0.0), make_request(temperature=2, top_k=1)]
    assert sample(logits, *requests) == [int(logits[0].argmax()), 4, int(logits[2].argmax())]


@settings(max_examples=150)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    index=st.integers(0, 5),
)
def test_draw_inverts_transformers_distribution(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, index: int
) -> None:
    logits = random_logits(seed % 1000)
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    request = make_request(output=[0] * index, seed=seed, **params)
    (token,) = sample(logits, request)
    if top_k == 1:
        assert token == int(logits.argmax())
        return
    probabilities = hf_probabilities(logits, **params)
    order = logits[0].argsort(descending=True, stable=True).tolist()
    ahead = sum(probabilities[t].item() for t in order[: order.index(token)])
    u = uniform(seed, 0, index)
    # 1e-6: transformers rounds the running sum, so it may cut a token of that weight differently.
    assert probabilities[token] > 0
    assert ahead - 1e-6 <= u <= ahead + probabilities[token].item() + 1e-6


def test_frequencies_follow_the_distribution() -> None:
    draws = 4000
    logits = random_logits(1, vocab=8)
    requests = [make_request(temperature=1.5, seed=s, top_k=5) for s in range(draws)]
    counts = Counter(sample(logits.expand(draws, -1), *requests))
    expected = hf_probabilities(logits, 1.5, 5, 1.0, 0.0) * draws
    chi2 = sum((counts[t] - e) ** 2 / e for t, e in enumerate(expected.tolist()) if e)
    assert sum(counts.values()) == draws and len(counts) == 5
    assert chi2 < 18.5  # 99.9 % of 4 degrees of freedom


def test_same_seed_same_token_in_any_batch() -> None:
    logits = random_logits(2, rows=40)
    requests = [
        make_request(temperature=0.5 + i % 3, seed=i, top_p=0.9 if i % 2 else None, top_k=i % 7)
        for i in range(40)
    ]
    requests[5] = make_request()
    together = sample(logits, *requests)
    alone = [sample(logits[i : i + 1], request)[0] for i, request in enumerate(requests)]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = sample(logits[order], *[requests[i] for i in order])
    assert together == alone
    assert shuffled == [together[i] for i in order]


def test_random_streams_differ_by_seed_choice_and_place() -> None:
    points = [(s, c, i) for s in range(-3, 4) for c in range(4) for i in range(6)]
    values = [uniform(*point) for point in points]
    assert len(set(values)) == len(points)
    assert all(0.0 <= v < 1.0 for v in values)
    assert values == [uniform(*point) for point in points]
    assert abs(sum(values) / len(values) - 0.5) < 0.1


def test_tiny_temperature_is_greedy_and_huge_is_uniform() -> None:
    logits = random_logits(3)
    assert sample(logits, make_request(temperature=1e-9, seed=0)) == [int(logits.argmax())]
    requests = [make_request(temperature=1e9, seed=s) for s in range(2000)]
    counts = Counter(sample(logits.expand(2000, -1), *requests))
    assert len(counts) == VOCAB and max(counts.values()) < 2 * 2000 / VOCAB


@settings(max_examples=80)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    repetition=st.floats(0.2, 3.0),
    presence=st.floats(-2.0, 2.0),
    frequency=st.floats(-2.0, 2.0),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4),
    seed=st.integers(0, 99),
)
def test_penalties_and_bias(
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    seed: int,
) -> None:
    logits = random_logits(seed)
    raw = logits.clone()
    request = make_request(
        prompt=prompt,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    sampler = TorchSampler()
    for step in range(len(output) + 1):
        scores = raw.clone()
        for token, value in bias.items():
            scores[0, token] += value
        history = torch.tensor([prompt + output[:step]])
        scores = hf.RepetitionPenaltyLogitsProcessor(repetition)(history, scores)[0].tolist()
        for token in range(VOCAB):
            count = output[:step].count(token)
            scores[token] -= count * frequency + (count > 0) * presence
        (sampled,) = sampler.sample(logits, [request])
        assert scores[sampled.token_id] >= max(scores) - 1e-4
        assert torch.equal(logits, raw), "the model's logits stay as they are"
        request.append(output[step] if step < len(output) else 0)


def test_neutral_penalties_change_nothing() -> None:
    logits = random_logits(4)
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    request = make_request(output=[1, 1, 2], logit_bias={}, **neutral)
    assert sample(logits, request) == [int(logits.argmax())]
    assert request.edits is None


def test_min_tokens_masks_eos_and_stop_ids_until_then() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 9], logits[0, 3] = 3.0, 2.0, 1.0  # 5 is eos
    request = make_request(min_tokens=2, stop_token_ids=[9])
    seen = []
    for _ in range(3):
        seen += sample(logits, request)
        request.append(seen[-1])
    assert seen == [3, 3, 5]
    ignoring = make_request(min_tokens=2, stop_token_ids=[9], ignore_eos=True)
    assert sample(logits, ignoring) == [5]


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(5, rows=4)
    requests = [
        make_request(logprobs=3),
        make_request(),
        make_request(logprobs=0, temperature=0.7, seed=3, top_k=2),
        make_request(logprobs=VOCAB + 5, logit_bias={11: 1000.0}),
    ]
    result = TorchSampler().sample(logits, requests)
    expected = logits.double().log_softmax(-1)
    assert result[1].logprobs is None
    assert result[3].token_id == 11
    for row, count in ((0, 3), (2, 0), (3, VOCAB)):
        entry, chosen = result[row].logprobs, result[row].token_id
        order = expected[row].argsort(descending=True).tolist()
        assert next(iter(entry)) == chosen
        assert set(entry) == {chosen, *order[:count]}
        for token, value in entry.items():
            assert value.rank == order.index(token) + 1
            assert value.logprob == pytest.approx(expected[row, token].item(), abs=1e-5)


def test_prompt_logprobs() -> None:
    logits = random_logits(6, rows=300)
    following = [(7 * i) % VOCAB for i in range(299)]
    entries = TorchSampler().prompt_logprobs(logits, following, 2)
    expected = logits.double().log_softmax(-1)
    assert len(entries) == 299
    for row, (entry, token) in enumerate(zip(entries, following, strict=True)):
        assert set(entry) == {token, *expected[row].topk(2).indices.tolist()}
        assert entry[token].logprob == pytest.approx(expected[row, token].item(), abs=1e-5)
        assert entry[token].rank == 1 + int((expected[row] > expected[row, token]).sum())
    assert TorchSampler().prompt_logprobs(logits[:1], [], 2) == []
    logits[200, 3] = math.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        TorchSampler().prompt_logprobs(logits, following, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "seed": 0, "top_p": 0.5},
        {"min_tokens": 3, "repetition_penalty": 1.3, "presence_penalty": 0.1},
        {"logprobs": 2},
    ],
)
def test_a_broken_row_fails_alone(value: float, params: dict) -> None:
    logits = random_logits(7, rows=3)
    logits[1, 5] = value  # where min_tokens puts its mask
    requests = [make_request(), make_request(**params), make_request()]
    first, broken, last = TorchSampler().sample(logits, requests)
    assert broken.error is not None
    assert first.error is None and last == (int(logits[2].argmax()), None, None)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "logits of request 7 contain NaN"),
        (math.inf, "logits of request 7 have inf as their largest value"),
    ],
)
def test_errors_say_what_is_wrong(value: float, message: str) -> None:
    logits = random_logits(7)
    logits[0, 2] = value
    assert TorchSampler().sample(logits, [make_request()])[0].error == message


def test_a_row_without_any_possible_token_fails() -> None:
    request = make_request(min_tokens=1, stop_token_ids=list(range(VOCAB)))
    (result,) = TorchSampler().sample(random_logits(8), [request])
    assert result.error == "logits of request 7 have -inf as their largest value"


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 13] = -1e30
    requests = [make_request(temperature=5.0, seed=s) for s in range(20)]
    assert set(sample(logits.expand(20, -1), *requests)) == {13}


@pytest.mark.gpu
def test_gpu_draws_what_the_cpu_draws() -> None:
    rows, vocab = 32, 154_880
    logits = random_logits(9, rows, vocab)

    def requests() -> list[LlmRequest]:
        drawing = {"top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "logit_bias": {5: 2.0}}
        return [
            make_request(temperature=0.2 + 0.1 * i, seed=i, top_k=50 * (i % 3), **drawing)
            for i in range(rows - 1)
        ] + [make_request(logprobs=5, min_tokens=2)]

    assert sample(logits.cuda(), *requests()) == sample(logits, *requests())
