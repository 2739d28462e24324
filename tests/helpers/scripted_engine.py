"""An executor around a scripted model whose only memory is the paged cache."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from helpers.engine import executor_config
from tensorrt_llm import SamplingParams
from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import (
    BufferConfig,
    KVCacheManagerV2,
    Role,
)
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest
from tensorrt_llm._torch.pyexecutor.messages import (
    CancelRequest,
    EngineStats,
    FinishReason,
    LlmResponse,
    NewRequest,
    Shutdown,
    TokenLogprobs,
)
from tensorrt_llm._torch.pyexecutor.py_executor import Choose, Outgoing, PyExecutor
from tensorrt_llm._torch.pyexecutor.sampler import SampledToken, TorchSampler
from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests
from tensorrt_llm._torch.pyexecutor.step import SequenceResult
from tensorrt_llm.mapping import Mapping

VOCAB = 32

Rule = Callable[[Sequence[int]], torch.Tensor]

CONFIG = executor_config(Path("scripted"), tokens_per_block=4, max_batch_size=4, max_num_tokens=16)


def random_rule(history: Sequence[int]) -> torch.Tensor:
    """Logits [VOCAB] that depend on every token before them."""
    generator = torch.Generator().manual_seed(hash(tuple(history)) % 2**63)
    return 2 * torch.randn(VOCAB, generator=generator)


class ScriptedModel:
    """Writes token ids into the pages of both roles and applies a rule to what it reads back.

    So a wrong block, a shared block, a gap between chunks or a wrong position changes the tokens.
    """

    weights_bytes = 0
    rows_per_generation = 1

    def __init__(self, kv: KVCacheManagerV2, config: ExecutorConfig, rule: Rule) -> None:
        self.kv, self.config, self.rule = kv, config, rule
        self.steps: list[tuple[list[int], int]] = []  # chunk lengths and number of generations

    def launch(self, batch: ScheduledRequests, choose: Choose | None) -> "Landed":
        """A step that is over at once."""
        logits = self._logits(batch)
        largest, tokens = logits.max(dim=-1)
        if choose is not None:
            tokens, largest = (
                choose(logits),
                torch.zeros(len(batch.context_requests + batch.generation_requests)),
            )
        return Landed(
            [
                SequenceResult([t], [], [x])
                for t, x in zip(tokens.tolist(), largest.tolist(), strict=True)
            ]
        )

    def _logits(self, batch: ScheduledRequests) -> torch.Tensor:
        contexts, generations = batch.context_requests, batch.generation_requests
        chunks = [r.chunk_len for r in contexts]
        self.steps.append((chunks, len(generations)))
        assert all(chunks)
        assert 0 < sum(chunks) + len(generations) <= self.config.max_num_tokens
        assert len(chunks) + len(generations) <= self.config.max_batch_size
        rows = []
        for request in contexts:
            histories = self._compute(request, request.chunk_len)
            rows += histories if batch.context_logits_needed else histories[-1:]
        for request in generations:
            assert request.num_computed_tokens == request.num_tokens - 1
            rows += self._compute(request, 1)
        return torch.stack([self.rule(history) for history in rows])

    def _compute(self, request: LlmRequest, count: int) -> list[list[int]]:
        """Put `count` tokens into the cache; the history up to each of them as the cache has it."""
        start = request.num_computed_tokens
        for position in range(start, start + count):
            for role in Role:
                self._cell(request, role, position)[:] = request.tokens[position]
        read = [
            {int(self._cell(request, role, p).unique()) for role in Role}
            for p in range(start + count)
        ]
        assert all(len(values) == 1 for values in read)
        history = [values.pop() for values in read]
        return [history[: p + 1] for p in range(start, start + count)]

    def _cell(self, request: LlmRequest, role: Role, position: int) -> torch.Tensor:
        """int64 [layers], one token's place in every layer."""
        block, offset = divmod(position, self.kv.tokens_per_block)
        block_id = self.kv.block_ids(request.request_id, role)[block]
        return self.kv.pool(role)[block_id].view(torch.int64)[:, offset]


@dataclass
class Landed:
    """The handle of a step that is over."""

    results: list[SequenceResult]
    launch_counts: None = None

    def wait(self) -> list[SequenceResult]:
        return self.results


@dataclass
class Outcome:
    """All that was said about one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    last: LlmResponse | None = None
    num_responses: int = 0

    @property
    def reason(self) -> FinishReason | None:
        return self.last.finish_reason if self.last else None

    def add(self, response: LlmResponse) -> None:
        assert self.last is None, "a response after the last one"
        self.num_responses += 1
        self.tokens += response.token_ids
        self.logprobs += response.logprobs
        if response.prompt_logprobs is not None:
            assert self.num_responses == 1
            self.prompt_logprobs = response.prompt_logprobs
        self.last = response if response.finish_reason else None


class Engine:
    """A `PyExecutor` to be stepped by hand."""

    def __init__(
        self,
        *,
        rule: Rule = random_rule,
        max_seq_len: int = 64,
        num_blocks: dict[Role, int] | None = None,
        eos: Sequence[int] = (),
        receive: Callable[[bool], list] = lambda block: [],
        send: Callable[[list], None] = lambda news: None,
        **config: object,
    ) -> None:
        self.config = replace(CONFIG, **config)
        size = self.config.tokens_per_block
        blocks = num_blocks or dict.fromkeys(Role, 4 * -(-max_seq_len // size))
        self.kv = KVCacheManagerV2(
            buffers=[BufferConfig(Role.KEY, (0, 1), 8), BufferConfig(Role.INDEX_KEY, (1,), 8)],
            tokens_per_block=size,
            max_seq_len=max_seq_len,
            max_batch_size=self.config.max_batch_size,
            num_blocks=blocks,
            device=torch.device("cpu"),
        )
        self.model = ScriptedModel(self.kv, self.config, rule)
        self.executor = PyExecutor(
            self.config,
            self.model,
            self.kv,
            TorchSampler(),
            eos,
            max_seq_len,
            VOCAB,
            receive,
            send,
        )
        self.outcomes: dict[int, Outcome] = {}
        self.stats: list[EngineStats] = []
        self._ids = itertools.count()

    def add(self, prompt: Sequence[int], choice: int = 0, **params: object) -> int:
        request_id = next(self._ids)
        self.outcomes[request_id] = Outcome()
        message = NewRequest(request_id, list(prompt), SamplingParams(**params), choice)
        self.executor.add_requests([message])
        return request_id

    def step(self) -> list[Outgoing]:
        news = self.executor.step()
        for item in news:
            if isinstance(item, EngineStats):
                self.stats.append(item)
            else:
                self.outcomes[item.request_id].add(item)
        return news

    def finish(self) -> None:
        """Step until nobody is left; everybody must have ended and all blocks be free."""
        for _ in range(2000):
            self.step()
            if not self.executor.scheduler.has_requests:
                break
        assert all(outcome.reason for outcome in self.outcomes.values())
        assert self.used_blocks == 0

    def generate(self, prompt: Sequence[int], **params: object) -> Outcome:
        request_id = self.add(prompt, **params)
        self.finish()
        return self.outcomes[request_id]

    @property
    def used_blocks(self) -> int:
        return sum(self.kv.num_used_blocks(role) for role in Role)


def greedy_tokens(prompt: Sequence[int], count: int, rule: Rule = random_rule) -> list[int]:
    """What the scripted model generates greedily, computed without any engine."""
    history = list(prompt)
    for _ in range(count):
        history.append(int(rule(history).argmax()))
    return history[len(prompt) :]


def serve_two_requests(mapping: Mapping) -> tuple[list, list[int], int]:
    """One of several ranks: serves two requests, one of which is cancelled.

    Returns:
        (the steps taken, tokens sampled for request 0, responses sent).
    """
    # Log probabilities are wanted so that the sampler is asked.
    params = [SamplingParams(max_tokens=4 + i, logprobs=0) for i in range(2)]
    requests = [NewRequest(i, [3, 1, 4, 1, 5], params[i]) for i in range(2)]
    script = [[], requests, [], [CancelRequest(1)], [], [Shutdown()]]
    sent: list = []

    def receive(block: bool) -> list:
        assert mapping.rank == 0
        return script.pop(0)

    engine = Engine(mapping=mapping, receive=receive, send=sent.extend)
    sampler = RecordingSampler()
    engine.executor.sampler = sampler
    engine.executor.run()
    return engine.model.steps, sampler.tokens, sum(isinstance(m, LlmResponse) for m in sent)


class RecordingSampler(TorchSampler):
    """Remembers the tokens of request 0."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def sample(
        self,
        logits: torch.Tensor,
        requests: Sequence[LlmRequest],
        drafted: Sequence[Sequence[int]] | None = None,
    ) -> list[SampledToken]:
        result = super().sample(logits, requests, drafted)
        self.tokens += [
            t.token_id for t, r in zip(result, requests, strict=True) if r.request_id == 0
        ]
        return result
