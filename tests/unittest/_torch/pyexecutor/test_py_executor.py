"""The step loop: who gets which tokens, how requests end, what is refused and what is reported."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers.byte_tokenizer import byte_tokenizer
from helpers.engine import run_ranks
from helpers.scripted_engine import (
    VOCAB,
    Engine,
    greedy_tokens,
    random_rule,
    serve_two_requests,
)

from tensorrt_llm import SamplingParams
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import Role
from tensorrt_llm._torch.pyexecutor.messages import (
    CancelRequest,
    EngineReady,
    EngineStats,
    FinishReason,
    LlmResponse,
    NewRequest,
    Shutdown,
)

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
CANCELLED, ERROR = FinishReason.CANCELLED, FinishReason.ERROR
PROMPT = [3, 1, 4, 1, 5]


def counting_rule(history: Sequence[int]) -> torch.Tensor:
    """The next token is the last one plus one."""
    logits = torch.zeros(VOCAB)
    logits[(history[-1] + 1) % VOCAB] = 5.0
    return logits


# --- ends -----------------------------------------------------------------------------------------


def test_length_by_max_tokens_and_by_max_seq_len() -> None:
    engine = Engine(max_seq_len=12)
    assert engine.generate(PROMPT, max_tokens=4).reason is LENGTH
    for max_tokens in (None, 7, 100):
        outcome = engine.generate(PROMPT, max_tokens=max_tokens)
        assert (outcome.reason, outcome.tokens) == (LENGTH, greedy_tokens(PROMPT, 7))


def test_eos_stop_id_and_precedence_over_length() -> None:
    engine = Engine(rule=counting_rule, eos=[9, 12])
    outcome = engine.generate([5], max_tokens=20)
    assert outcome.tokens == [6, 7, 8, 9] and outcome.reason is STOP
    assert outcome.last.stop_reason is None
    outcome = engine.generate([5], max_tokens=20, stop_token_ids=[7])
    assert (outcome.tokens, outcome.last.stop_reason) == ([6, 7], 7)
    assert engine.generate([5], max_tokens=4).reason is STOP, "the fourth token is eos"
    assert engine.generate([5], max_tokens=3).reason is LENGTH
    outcome = engine.generate([5], max_tokens=6, ignore_eos=True)
    assert (outcome.tokens, outcome.reason) == ([6, 7, 8, 9, 10, 11], LENGTH)


def test_min_tokens_keeps_eos_away() -> None:
    engine = Engine(rule=counting_rule, eos=[9])
    outcome = engine.generate([8], max_tokens=4, min_tokens=2)
    assert len(outcome.tokens) == 4 and outcome.tokens[0] != 9


def test_stop_string_through_the_tokenizer_file(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    engine = Engine(rule=counting_rule, stop_tokenizer=tmp_path)
    # Tokens 0, 1, 2 ... are "!", '"', "#", "$", "%", "&" ... in the byte alphabet.
    outcome = engine.generate([0], max_tokens=20, stop=["never", "$%"])
    assert outcome.tokens == [1, 2, 3, 4]
    assert (outcome.reason, outcome.last.stop_reason) == (STOP, "$%")


# --- sampling through the engine ------------------------------------------------------------------


def test_seeded_text_does_not_depend_on_the_batch() -> None:
    params = {"max_tokens": 8, "temperature": 1.2, "top_p": 0.9, "seed": 42}
    alone = Engine().generate(PROMPT, **params).tokens
    engine = Engine(max_num_tokens=6)
    engine.add([9, 9], max_tokens=12)
    engine.add([7, 2, 2], max_tokens=9, temperature=3.0, seed=1)
    engine.step()
    request = engine.add(PROMPT, **params)
    engine.add([8], max_tokens=3, temperature=0.3, seed=42, top_k=3)
    engine.finish()
    assert engine.outcomes[request].tokens == alone


def test_siblings_differ_and_seeds_repeat() -> None:
    engine = Engine()

    def generate(choice: int, seed: int) -> tuple[int, ...]:
        request = engine.add(PROMPT, choice, max_tokens=10, temperature=2.0, seed=seed)
        engine.finish()
        return tuple(engine.outcomes[request].tokens)

    pairs = list(itertools.product(range(4), range(3)))
    texts = [generate(*pair) for pair in pairs]
    assert len(set(texts)) == len(pairs)
    assert texts == [generate(*pair) for pair in pairs]


def test_logprobs_come_with_their_tokens() -> None:
    outcome = Engine().generate(PROMPT, max_tokens=5, logprobs=1, temperature=1.5, seed=5)
    assert len(outcome.logprobs) == len(outcome.tokens) == 5
    for i, (token, entry) in enumerate(zip(outcome.tokens, outcome.logprobs, strict=True)):
        expected = random_rule(PROMPT + outcome.tokens[:i]).log_softmax(-1)
        assert entry[token].logprob == pytest.approx(expected[token].item(), abs=1e-5)
        assert int(expected.argmax()) in entry


@pytest.mark.parametrize("max_num_tokens", [5, 64])
def test_prompt_logprobs_over_chunks(max_num_tokens: int) -> None:
    prompt = [(7 * i) % VOCAB for i in range(18)]
    engine = Engine(max_num_tokens=max_num_tokens)
    other = engine.add(PROMPT, max_tokens=4)
    request = engine.add(prompt, max_tokens=2, prompt_logprobs=0)
    engine.finish()
    entries = engine.outcomes[request].prompt_logprobs
    assert entries[0] is None and len(entries) == 18
    for i, entry in enumerate(entries[1:], start=1):
        expected = random_rule(prompt[:i]).log_softmax(-1)[prompt[i]].item()
        assert entry[prompt[i]].logprob == pytest.approx(expected, abs=1e-5)
    assert engine.outcomes[request].tokens == greedy_tokens(prompt, 2)
    assert engine.outcomes[other].tokens == greedy_tokens(PROMPT, 4)
    assert engine.outcomes[other].prompt_logprobs is None


# --- broken logits --------------------------------------------------------------------------------


def nan_after(poison: int) -> object:
    def rule(history: Sequence[int]) -> torch.Tensor:
        logits = random_rule(history)
        if poison in history:
            logits[3] = math.nan
        return logits

    return rule


def test_nan_fails_one_request_and_is_counted() -> None:
    engine = Engine(rule=nan_after(30))
    good = engine.add(PROMPT, max_tokens=6)
    bad = engine.add([2, 30, 2], max_tokens=6)
    engine.step()
    assert engine.outcomes[bad].reason is ERROR
    assert engine.outcomes[bad].last.error == f"logits of request {bad} contain NaN"
    assert engine.kv.num_used_blocks(Role.KEY) == 3, "only the other one's blocks are left"
    engine.finish()
    assert engine.outcomes[good].tokens == greedy_tokens(PROMPT, 6)
    assert engine.stats[-1].nan_failures == 1


def test_nan_among_prompt_logprobs() -> None:
    """It is in the first chunk's middle, while that chunk's last row would look fine."""

    def rule(history: Sequence[int]) -> torch.Tensor:
        return random_rule(history) + (math.nan if len(history) == 2 else 0.0)

    engine = Engine(rule=rule, max_num_tokens=8)
    good = engine.add([5], max_tokens=1)
    bad = engine.add(list(range(12)), max_tokens=2, prompt_logprobs=0)
    engine.finish()
    assert engine.outcomes[good].reason is LENGTH
    assert engine.outcomes[bad].last.error == (f"request {bad}: logits of the prompt contain NaN")
    assert len(engine.model.steps) == 1


# --- cancelling -----------------------------------------------------------------------------------


def test_cancel_in_every_state() -> None:
    engine = Engine(max_num_tokens=8, max_batch_size=2)
    generating = engine.add([1, 2], max_tokens=40)
    engine.step()
    in_context = engine.add(list(range(20)), max_tokens=5)
    waiting = engine.add([4], max_tokens=5)
    engine.step()
    assert engine.executor.scheduler.num_waiting == 1
    for request in (waiting, in_context, generating):
        before = engine.used_blocks
        engine.executor.cancel([request])
        assert engine.used_blocks < before or request == waiting
    assert engine.used_blocks == 0
    engine.step()
    for request in (waiting, in_context, generating):
        assert engine.outcomes[request].reason is CANCELLED
    assert engine.outcomes[waiting].tokens == engine.outcomes[in_context].tokens == []
    assert engine.generate(PROMPT, max_tokens=3).tokens == greedy_tokens(PROMPT, 3)


def test_cancel_frees_the_place_for_the_next() -> None:
    engine = Engine(max_batch_size=1)
    first = engine.add([1], max_tokens=50)
    second = engine.add(PROMPT, max_tokens=2)
    engine.step()
    engine.executor.cancel([first, first, 12345])  # twice, and one that never was
    engine.step()
    assert engine.outcomes[first].reason is CANCELLED
    assert engine.outcomes[second].num_responses == 1
    engine.finish()


def test_cancel_after_the_end_is_nothing() -> None:
    engine = Engine()
    request = engine.add(PROMPT, max_tokens=1)
    engine.finish()
    engine.executor.cancel([request])
    assert engine.step() == []


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 64, {}, "the prompt has 64 tokens, .* max_seq_len 64"),
        ([1] * 17, {}, "the prompt has 17 tokens, more than max_num_tokens 16"),
        ([1, VOCAB], {}, f"prompt has token id {VOCAB}; the vocabulary has {VOCAB} tokens"),
        ([1, -1], {}, "prompt has token id -1"),
        ([1], {"logit_bias": {99: 1.0}}, "logit_bias has token id 99"),
        ([1], {"stop_token_ids": [32]}, "stop_token_ids has token id 32"),
        ([1], {"temperature": 0.5}, "temperature 0.5 needs a seed"),
        ([1], {"stop": "x"}, "needs a tokenizer"),
    ],
)
def test_refused_with_a_reason_and_without_harm(
    prompt: list[int], params: dict, message: str
) -> None:
    engine = Engine(enable_chunked_prefill=False)
    good = engine.add(PROMPT, max_tokens=3)
    bad = [engine.add(prompt, **params) for _ in range(2)]
    engine.finish()
    for request in bad:
        outcome = engine.outcomes[request]
        assert (outcome.reason, outcome.num_responses) == (ERROR, 1)
        with pytest.raises(ValueError, match=message):
            raise ValueError(outcome.last.error)
    assert engine.outcomes[good].tokens == greedy_tokens(PROMPT, 3)


def test_an_id_in_use_is_a_fault_of_the_caller() -> None:
    engine = Engine()
    engine.add(PROMPT)
    with pytest.raises(RuntimeError, match="request id 0 is in use"):
        engine.executor.add_requests([NewRequest(0, PROMPT, SamplingParams())])


def test_eos_outside_of_the_vocabulary() -> None:
    with pytest.raises(ValueError, match=r"eos token ids \[32\] are outside the 32"):
        Engine(eos=[4, 32])


# --- reports --------------------------------------------------------------------------------------


def test_stats_count_everything() -> None:
    engine = Engine(iter_perf_stats=True, max_batch_size=1)
    engine.add(PROMPT, max_tokens=3)
    engine.add([1, 2], max_tokens=2)
    engine.finish()
    first, last = engine.stats[0], engine.stats[-1]
    assert [s.iter for s in engine.stats] == [1, 2, 3, 4, 5]
    assert (first.num_running, first.num_waiting) == (1, 1)
    assert (first.kv_used_blocks, first.kv_total_blocks) == (2, 64)
    assert (first.index_used_blocks, first.index_total_blocks) == (2, 64)
    assert (first.prompt_tokens, first.generated_tokens) == (5, 1)
    assert (last.prompt_tokens, last.generated_tokens) == (7, 5)
    assert (last.num_running, last.num_waiting, last.kv_used_blocks) == (0, 0, 0)
    assert all(s.iter_latency_ms > 0 for s in engine.stats)


def test_stats_are_throttled_but_idle_is_always_reported() -> None:
    engine = Engine(max_seq_len=2000)
    engine.generate([1], max_tokens=120)
    assert len(engine.stats) < 60
    assert engine.stats[-1].iter == 120 and engine.stats[-1].num_running == 0
    assert engine.step() == [], "once"
    request = engine.add([1], max_tokens=300)
    engine.step()
    engine.executor.cancel([request])
    assert [type(n) for n in engine.step()] == [LlmResponse, EngineStats]


def test_a_leaked_block_is_found_when_idle() -> None:
    engine = Engine()
    engine.kv.add_request(999)
    engine.kv.resize(999, 5)
    engine.add(PROMPT, max_tokens=1)
    with pytest.raises(RuntimeError, match=r"leaked: used .*2.* requests \[999\]"):
        engine.step()


def test_ready_message() -> None:
    engine = Engine(eos=[3, 4])
    assert engine.executor.ready_message() == EngineReady(
        max_seq_len=64,
        max_num_tokens=16,
        max_batch_size=4,
        vocab_size=VOCAB,
        eos_token_ids=(3, 4),
        kv_total_blocks=64,
        tokens_per_block=4,
        weights_bytes=0,
        kv_cache_bytes=engine.kv.total_bytes,
    )


# --- the loop -------------------------------------------------------------------------------------


class Wire:
    """A script of what `receive` returns, and everything that was sent."""

    def __init__(self, *batches: list) -> None:
        self.batches = list(batches)
        self.blocking: list[bool] = []
        self.sent: list = []

    def receive(self, block: bool) -> list:
        self.blocking.append(block)
        return self.batches.pop(0)

    def run(self, **changes: object) -> Engine:
        engine = Engine(receive=self.receive, send=self.sent.extend, **changes)
        engine.executor.run()
        return engine

    def responses(self, request_id: int) -> list[LlmResponse]:
        return [m for m in self.sent if getattr(m, "request_id", None) == request_id]


def message(request_id: int, max_tokens: int, **params: object) -> NewRequest:
    return NewRequest(request_id, PROMPT, SamplingParams(max_tokens=max_tokens, **params))


def test_loop_until_shutdown() -> None:
    wire = Wire([], [message(1, 2)], [], [], [message(2, 9), CancelRequest(2)], [Shutdown()])
    wire.run()
    assert wire.blocking == [True, True, False, True, True, True]
    tokens = [t for r in wire.responses(1) for t in r.token_ids]
    assert tokens == greedy_tokens(PROMPT, 2)
    assert [r.finish_reason for r in wire.responses(2)] == [CANCELLED]


def test_shutdown_does_not_wait_for_running_requests() -> None:
    wire = Wire([message(1, 50)], [], [Shutdown(), message(2, 1)])
    wire.run()
    assert len(wire.responses(1)) == 2 and not wire.responses(2)


def test_unknown_message() -> None:
    with pytest.raises(TypeError, match="unknown message to the engine: 'hello'"):
        Wire(["hello"]).run()


def test_an_exception_of_the_model_ends_the_loop() -> None:
    def rule(history: Sequence[int]) -> torch.Tensor:
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        Wire([message(1, 2)]).run(rule=rule)


def test_logits_of_a_wrong_shape() -> None:
    with pytest.raises(RuntimeError, match=r"logits \(1, 31\), expected \(1, 32\)"):
        Wire([message(1, 2, logprobs=0)]).run(rule=lambda history: torch.zeros(VOCAB - 1))


def test_two_ranks_take_the_same_steps() -> None:
    """Real processes: rank 1 never touches the wire and still does what rank 0 does."""
    first, second = run_ranks(2, serve_two_requests)
    assert first[:2] == second[:2]
    assert first[1] == greedy_tokens(PROMPT, 4)
    assert (first[2], second[2]) == (7, 0)
