"""Drawn drafts change how many steps an answer takes, but not the distribution of its tokens."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.engine import executor_config, make_engine, run_ranks
from helpers.glm_tiny import CHECKPOINT, prompts
from helpers.scripted_engine import Outcome
from helpers.statistics import check_frequencies
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorrt_llm._torch.custom_ops.sampling import draw, probabilities
from tensorrt_llm._torch.host_staging import HostStaging
from tensorrt_llm._torch.pyexecutor.host_choice import HostChoice
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest
from tensorrt_llm._torch.pyexecutor.messages import LlmResponse, NewRequest
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.pyexecutor.sampler import SampledToken, TorchSampler, uniform
from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests
from tensorrt_llm._torch.speculative.forced_acceptance import ENV
from tensorrt_llm._torch.speculative.interface import SpecMetadata, SpecWorkerBase
from tensorrt_llm._torch.speculative.rejection_sampling import accept_or_redraw
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.sampling_params import SamplingParams

CPU = torch.device("cpu")
STREAMS = (b"draft", b"accept", b"")

# --- one token ------------------------------------------------------------------------------------

NEUTRAL = (1.0, 100.0, 1.0, 0.0)
PAIRS = {
    "equal": ([0.5, 0.25, 0.15, 0.1], [0.5, 0.25, 0.15, 0.1], NEUTRAL),
    "disjoint": ([0.7, 0.3, 0.0, 0.0], [0.0, 0.0, 0.4, 0.6], NEUTRAL),
    "overlapping": ([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], NEUTRAL),
    "sure target": ([0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25], NEUTRAL),
    "sure draft": ([0.25, 0.25, 0.25, 0.25], [0.01, 0.97, 0.01, 0.01], NEUTRAL),
    "top-k": ([0.4, 0.3, 0.2, 0.1], [0.3, 0.1, 0.4, 0.2], (1.0, 2.0, 1.0, 0.0)),
    "top-p": ([0.4, 0.3, 0.2, 0.1], [0.05, 0.1, 0.25, 0.6], (1.0, 100.0, 0.65, 0.0)),
    "min-p": ([0.4, 0.3, 0.2, 0.1], [0.1, 0.3, 0.2, 0.4], (1.0, 100.0, 1.0, 0.6)),
    "temperature": ([0.64, 0.16, 0.16, 0.04], [0.04, 0.16, 0.16, 0.64], (2.0, 100.0, 1.0, 0.0)),
}
KEPT = {  # of target and draft, by hand
    "top-k": ([4 / 7, 3 / 7, 0.0, 0.0], [3 / 7, 0.0, 4 / 7, 0.0]),
    "top-p": ([4 / 7, 3 / 7, 0.0, 0.0], [0.0, 0.0, 25 / 85, 60 / 85]),
    "min-p": ([4 / 7, 3 / 7, 0.0, 0.0], [0.0, 3 / 7, 0.0, 4 / 7]),
    "temperature": ([4 / 9, 2 / 9, 2 / 9, 1 / 9], [1 / 9, 2 / 9, 2 / 9, 4 / 9]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_token_follows_the_target_and_acceptance_the_overlap(name) -> None:
    target, draft, filters = PAIRS[name]
    count = 20_000
    columns = torch.tensor([filters], dtype=torch.float64).expand(count, -1)
    p, q = (
        probabilities(torch.tensor([x]).log().expand(count, -1), columns) for x in (target, draft)
    )
    streams = [[uniform(seed, 0, 0, stream=stream) for seed in range(count)] for stream in STREAMS]
    drafting, accepting, redrawing = torch.tensor(streams, dtype=torch.float64)
    drafts = draw(q, drafting)
    tokens = accept_or_redraw(p, q, drafts, accepting, redrawing)
    target, draft = KEPT.get(name, (target, draft))
    check_frequencies(drafts.tolist(), {i: x for i, x in enumerate(draft) if x})
    check_frequencies(tokens.tolist(), {i: x for i, x in enumerate(target) if x})
    overlap = min(1.0, sum(map(min, target, draft)))
    check_frequencies((tokens == drafts).tolist(), {True: overlap, False: 1 - overlap})


@settings(max_examples=100)
@given(
    seed=st.integers(0, 9999),
    flatness=st.floats(0.1, 10.0),
    accepting=st.floats(0.0, 1.0, exclude_max=True),
    redrawing=st.floats(0.0, 1.0, exclude_max=True),
)
def test_each_row_keeps_its_draft_or_gets_what_the_draft_model_missed(
    seed, flatness, accepting, redrawing
) -> None:
    rows, vocab = 8, 50
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, rows, vocab, generator=generator)
    columns = torch.tensor([[flatness, 20.0, 0.95, 0.0]], dtype=torch.float64).expand(rows, -1)
    p, q = probabilities(logits[0], columns), probabilities(logits[1], columns)
    drafts = draw(q, torch.rand(rows, generator=generator, dtype=torch.float64))
    uniforms = torch.tensor([[accepting], [redrawing]], dtype=torch.float64).expand(-1, rows)
    tokens = accept_or_redraw(p, q, drafts, *uniforms).tolist()
    for row, (token, d) in enumerate(zip(tokens, drafts.tolist(), strict=True)):
        ratio = int(p[row, d]) / int(q[row, d])
        if not math.isclose(accepting, ratio, rel_tol=2**-50):
            assert (token == d) == (accepting < ratio)
        assert token == d or p[row, token] > q[row, token]


# --- several tokens of a small model --------------------------------------------------------------

SYMBOLS = 4
EOS = 3
EDITS = {"logit_bias": {1: 0.7}, "presence_penalty": 0.8, "min_tokens": 2}


class Toy:
    """Two tables of logits by the last token: the target's and the draft model's.

    Runs requests through the host's choice, the acceptance and the draws of a draft loop, all of
    them together.
    """

    def __init__(self, draft_len: int, **params: Any) -> None:
        self.draft_len, self.params = draft_len, params
        generator = torch.Generator().manual_seed(3)
        self.target, self.draft = torch.randn(2, SYMBOLS, SYMBOLS, generator=generator)
        self.worker = SpecWorkerBase(draft_len, Mapping())
        self.draft_uniforms: list[float] = []
        self.rows: list[tuple[int, SampledToken]] = []  # the token before, and what was chosen

    def generate(self, count: int, length: int) -> list[tuple[int, ...]]:
        """The first `length` tokens for so many seeds."""
        requests = [self._request(seed) for seed in range(count)]
        self._step(requests, [])
        while unfinished := [r for r in requests if len(r.output_token_ids) < length]:
            self._step([], unfinished)
        return [tuple(r.output_token_ids[:length]) for r in requests]

    def _request(self, seed: int) -> LlmRequest:
        params = SamplingParams(seed=seed, **self.params)
        request = LlmRequest(NewRequest(seed, [0], params), max_seq_len=99, eos_token_ids=[EOS])
        request.chunk_len = 1
        return request

    def _step(self, contexts: list[LlmRequest], generations: list[LlmRequest]) -> None:
        requests, batch = contexts + generations, ScheduledRequests(contexts, generations)
        choice = HostChoice(TorchSampler(), batch, 1 + self.draft_len, SYMBOLS, True)
        sampling = choice.stage_draft_sampling(HostStaging(), CPU)
        assert sampling is not None
        self.draft_uniforms += sampling.uniforms.flatten().tolist()
        before = [token for r in requests for token in (r.tokens[-1], *r.draft_token_ids)]
        tokens = choice(self.target[before])
        chosen = [token for r in requests for token in choice.tokens[r.request_id]]
        self.rows += zip(before, chosen, strict=True)
        accepted, counts = self.worker.accept_draft_tokens(tokens, self._metadata(batch))
        last = accepted.gather(1, counts.unsqueeze(1) - 1).squeeze(1)
        drafts = [last]
        for _ in range(self.draft_len):
            drafts.append(self.worker.draft_tokens(self.draft[drafts[-1]], sampling))
        results = torch.cat([counts.unsqueeze(1), accepted, *(d[:, None] for d in drafts[1:])], 1)
        for request, (count, *tokens) in zip(requests, results.tolist(), strict=True):
            for token in tokens[:count]:
                request.append(token)
            request.draft_token_ids = tokens[1 + self.draft_len :]
            request.draft_probs = choice.draft_probs(request)

    def _metadata(self, batch: ScheduledRequests) -> SpecMetadata:
        drafts = [r.draft_token_ids for r in batch.generation_requests]
        nothing = torch.empty(0, dtype=torch.int64)
        return SpecMetadata(
            max_draft_len=self.draft_len,
            num_contexts=len(batch.context_requests),
            num_generations=len(batch.generation_requests),
            draft_tokens=torch.tensor(drafts, dtype=torch.int64).view(-1, self.draft_len),
            context_next_tokens=nothing,
            slot_ids=nothing,
        )

    def probabilities(self, length: int) -> dict[tuple[int, ...], float]:
        """Of every sequence, by the formulas of the edits."""
        return {
            tokens: math.prod(self._next(tokens[:i])[t] for i, t in enumerate(tokens))
            for tokens in itertools.product(range(SYMBOLS), repeat=length)
        }

    def _next(self, history: tuple[int, ...]) -> list[float]:
        logits = self.target[(0, *history)[-1]].double()
        for token, bias in self.params.get("logit_bias", {}).items():
            logits[token] += bias
        logits[sorted(set(history))] -= self.params.get("presence_penalty", 0.0)
        if len(history) < self.params.get("min_tokens", 0):
            logits[EOS] = -math.inf
        return (logits / self.params["temperature"]).softmax(-1).tolist()


@pytest.mark.parametrize(("draft_len", "params"), [(1, {}), (3, {}), (3, EDITS)])
def test_sequences_follow_the_target(draft_len, params) -> None:
    """The edits see the drafts before a row as output, and know nothing of the draft model."""
    toy, length = Toy(draft_len, temperature=1.3, **params), 3
    possible = {tokens: p for tokens, p in toy.probabilities(length).items() if p}
    check_frequencies(toy.generate(2000, length), possible)


def test_log_probabilities_are_those_of_the_raw_target() -> None:
    """Of tokens whose drafts were accepted, of those that replace a draft, and of the others."""
    toy = Toy(2, temperature=1.3, logprobs=0, **EDITS)
    toy.generate(20, 6)
    raw = toy.target.log_softmax(-1)
    for before, sampled in toy.rows:
        assert sampled.logprobs is not None
        entry = sampled.logprobs[sampled.token_id]
        assert entry.logprob == raw[before, sampled.token_id].item()


def test_every_draft_has_its_own_random_number() -> None:
    """Also in the step after one whose drafts were rejected."""
    toy = Toy(3, temperature=1.3)
    toy.generate(20, 12)
    numbers = [uniform(s, 0, i, stream=t) for s in range(20) for i in range(16) for t in STREAMS]
    assert len({*toy.draft_uniforms, *numbers}) == len(toy.draft_uniforms) + len(numbers)


# --- the engine -----------------------------------------------------------------------------------

FLAT = {"temperature": 3.0, "top_k": 6}  # the shipped checkpoint is sure of its answers
NEW_TOKENS = 12


def engine(**overrides: Any) -> PyExecutor:
    settings = {"max_seq_len": 256, "max_draft_len": 3, "use_rejection_sampling": True}
    return make_engine(executor_config(CHECKPOINT, **{**settings, **overrides}))


def sampled(seed: int, **overrides: Any) -> SamplingParams:
    settings = {"max_tokens": NEW_TOKENS, "seed": seed, "ignore_eos": True, **FLAT}
    return SamplingParams(**{**settings, **overrides})


def greedy() -> SamplingParams:
    return SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)


def answer(
    executor: PyExecutor, asked: Sequence[tuple[list[int], SamplingParams]]
) -> list[list[int]]:
    """Tokens of all requests together."""
    return [outcome.tokens for outcome in respond(executor, asked)]


def respond(
    executor: PyExecutor, asked: Sequence[tuple[list[int], SamplingParams]]
) -> list[Outcome]:
    outcomes = [Outcome() for _ in asked]
    executor.add_requests([NewRequest(i, *request) for i, request in enumerate(asked)])
    while executor.has_work:
        for news in executor.step():
            if isinstance(news, LlmResponse):
                assert news.error is None, news.error
                outcomes[news.request_id].add(news)
    return outcomes


ASKED = [(prompt, sampled(seed)) for seed, prompt in enumerate(prompts(6))]


def together(**overrides: Any) -> list[list[int]]:
    """With prompts in chunks, among which requests wait for a place."""
    return answer(engine(max_batch_size=4, max_num_tokens=40, **overrides), ASKED)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return together()


def test_the_same_seed_gives_the_same_tokens_alone_and_in_both_loops(expected) -> None:
    executor = engine()
    assert [answer(executor, [request])[0] for request in ASKED] == expected
    assert together(disable_overlap_scheduler=False) == expected
    assert [answer(executor, [request])[0] for request in ASKED] == expected


@pytest.mark.parametrize("draft_len", [1, 2, 4, 5, 6, 7])
def test_any_number_of_drafts(draft_len) -> None:
    """Alone and together; the first token, which no draft precedes, is what it is without any."""
    executor = engine(max_draft_len=draft_len, disable_overlap_scheduler=False)
    tokens = answer(executor, ASKED[:4])
    assert answer(executor, ASKED[2:3]) == tokens[2:3]
    assert [len(t) for t in tokens] == [NEW_TOKENS] * 4
    first = answer(engine(max_draft_len=0, use_rejection_sampling=False), ASKED[:4])
    assert [t[0] for t in tokens] == [t[0] for t in first]


def tokens_of_rank(mapping: Mapping, device: str) -> list[list[int]]:
    return together(mapping=mapping, device=device)


def test_two_ranks_give_the_tokens_of_one(expected) -> None:
    assert run_ranks(2, tokens_of_rank, "cpu") == [expected] * 2


@pytest.mark.parametrize("plain", [True, False])
def test_greedy_requests_do_not_notice(plain) -> None:
    """Neither alone nor beside requests that sample."""
    asked = [(prompt, greedy()) for prompt in prompts(4)]
    without = answer(engine(use_rejection_sampling=False), asked)
    executor = engine(disable_overlap_scheduler=plain)
    assert answer(executor, asked) == without
    mixed = [*asked[:2], ASKED[2], *asked[2:], ASKED[4]]
    tokens = answer(executor, mixed)
    assert tokens[:2] + tokens[3:5] == without


def test_first_tokens_follow_the_model_without_drafts() -> None:
    """One token of the prompt's step, two that come from verified drafts; 27 sequences."""
    top_k, temperature, count = 3, 4.0, 1200
    prompt = prompts(6)[0]
    scorer = engine(max_draft_len=0, use_rejection_sampling=False)
    score = SamplingParams(max_tokens=1, logprobs=top_k, ignore_eos=True)
    possible: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        told = respond(scorer, [([*prompt, *tokens], score) for tokens in possible])
        extended = {}
        for (tokens, p), response in zip(possible.items(), told, strict=True):
            top = {t: x.logprob / temperature for t, x in response.logprobs[0].items()}
            total = sum(map(math.exp, top.values()))
            extended |= {(*tokens, t): p * math.exp(x) / total for t, x in top.items()}
        possible = extended
    assert len(possible) == top_k**3
    params = {"temperature": temperature, "top_k": top_k, "max_tokens": 3}
    executor = engine(max_batch_size=64, max_num_tokens=1024, kv_cache_max_tokens=8192)
    tokens = answer(executor, [(prompt, sampled(seed, **params)) for seed in range(count)])
    check_frequencies(map(tuple, tokens), possible)


def test_more_is_accepted_where_the_text_is_open() -> None:
    """The likeliest draft is right with its own probability, a drawn one with the overlap."""
    asked = [(prompt, sampled(seed, top_k=None)) for seed, prompt in enumerate(prompts(6))]
    lengths = []
    for use in (False, True):
        executor = engine(use_rejection_sampling=use)
        answer(executor, asked)
        length = executor.stats().speculation.acceptance_length
        assert length is not None
        lengths.append(length)
    assert lengths[1] > lengths[0]


def test_forced_acceptance_keeps_readable_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "3")
    executor = engine()
    tokens = answer(executor, ASKED)
    stats = executor.stats().speculation
    assert stats.accepted_drafts == (stats.verify_steps,) * 3
    assert [len(t) for t in tokens] == [NEW_TOKENS] * len(ASKED)
    assert all(0 <= token < 512 for t in tokens for token in t)


def test_uniform_numbers_are_uploaded_once_a_step_and_only_to_be_read(monkeypatch) -> None:
    uploads = []
    upload = HostStaging.upload

    def recorded(staging: HostStaging, *args: Any) -> torch.Tensor:
        uploaded = upload(staging, *args)
        uploads.append(uploaded.dtype)
        return uploaded

    monkeypatch.setattr(HostStaging, "upload", recorded)
    asked = [(prompt, greedy()) for prompt in prompts(4)]
    totals = []
    for use in (False, True):
        executor = engine(use_rejection_sampling=use)
        answer(executor, asked)
        totals.append(executor.model_engine.attn_metadata.staging.num_uploads)
    assert totals[0] == totals[1]
    answer(engine(use_rejection_sampling=False), ASKED)
    assert torch.float64 not in uploads
    executor = engine(max_num_tokens=256)
    answer(executor, ASKED)
    assert uploads.count(torch.float64) == executor.stats().iter


# --- a GPU ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("plain", [True, False])
def test_cuda_repeats_itself_and_greedy_batches_stay_in_the_graphs(plain, monkeypatch) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    graphs = {"device": "cuda", "cuda_graph_batch_sizes": (1, 2, 4), "max_batch_size": 4}
    executor = engine(disable_overlap_scheduler=plain, **graphs)
    tokens = answer(executor, ASKED[:4])
    assert answer(executor, ASKED[:4]) == tokens
    assert [len(t) for t in tokens] == [NEW_TOKENS] * 4
    asked = [(prompt, greedy()) for prompt in prompts(4)]
    without = answer(engine(use_rejection_sampling=False, **graphs), asked)
    runner = executor.model_engine.graphs
    replays = []
    replay = runner.replay
    monkeypatch.setattr(runner, "replay", lambda batch: replays.append(len(batch)) or replay(batch))
    assert answer(executor, asked) == without
    assert replays


@pytest.mark.gpu
def test_cuda_draws_what_the_cpu_draws() -> None:
    rows, vocab = 7, 154_880
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(2, rows, vocab, generator=generator)
    columns = torch.tensor([[1.2, 500.0, 0.95, 0.001]], dtype=torch.float64).expand(rows, -1)
    uniforms = torch.rand(3, rows, dtype=torch.float64, generator=generator)

    def tokens(device: str) -> list[int]:
        p, q = (probabilities(x.to(device), columns.to(device)) for x in logits)
        drafting, accepting, redrawing = uniforms.to(device)
        drafts = draw(q, drafting)
        return accept_or_redraw(p, q, drafts, accepting, redrawing).tolist()

    assert tokens("cuda") == tokens("cpu")


@pytest.mark.multi_gpu
def test_two_gpus_draw_alike() -> None:
    first, second = run_ranks(2, tokens_of_rank, "cuda", device="cuda")
    assert first == second
    assert [len(t) for t in first] == [NEW_TOKENS] * len(ASKED)
