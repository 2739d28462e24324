"""An executor around a scripted model whose only memory is the paged cache."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile, zip_longest
from operator import eq
from pathlib import Path

import torch
import torch.nn.functional as F

from helpers.engine import executor_config
from tensorrt_llm import SamplingParams
from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig
from tensorrt_llm._torch.pyexecutor.host_choice import HostChoice
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
from tensorrt_llm._torch.pyexecutor.py_executor import Outgoing, PyExecutor
from tensorrt_llm._torch.pyexecutor.sampler import SampledToken, TorchSampler
from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests
from tensorrt_llm._torch.pyexecutor.step import SequenceResult
from tensorrt_llm.mapping import Mapping

VOCAB = 32

Rule = Callable[[Sequence[int]], torch.Tensor]
# (request id, verify step of that request) -> how many of the drafts for it are right; more than
# there are is all of them.
Script = Callable[[int, int], int]

EMPTY = -1  # in a cell of the cache that was never written

CONFIG = executor_config(Path("scripted"), tokens_per_block=4, max_batch_size=4, max_num_tokens=16)


def random_rule(history: Sequence[int]) -> torch.Tensor:
    """Logits [VOCAB] that depend on every token before them."""
    generator = torch.Generator().manual_seed(hash(tuple(history)) % 2**63)
    return 2 * torch.randn(VOCAB, generator=generator)


def all_right(request_id: int, step: int) -> int:
    """The script of a drafter that never errs."""
    return VOCAB


@dataclass
class Slot:
    """What the device keeps of a request from one step to the next.

    Attributes:
        tokens: the last token, not in the cache yet, and the drafts after it.
        length: cached tokens that count.
        correction: accepted minus assumed tokens of the last step.
        step: verify steps for which drafts were made.
    """

    request_id: int
    tokens: list[int]
    length: int
    correction: int
    step: int


@dataclass
class Share:
    """One sequence's rows of a step.

    Attributes:
        end: cached tokens after the step if everything counts.
        drafts: to be verified; none in a context.
        histories: for each row with logits, the tokens that the cache holds up to it; empty where
            the row lies past the request's end.
        step: the verify step that the next drafts are for.
    """

    request: LlmRequest
    end: int
    drafts: list[int]
    histories: list[list[int]]
    step: int


class ScriptedModel:
    """Writes token ids into the pages of both roles and applies a rule to what it reads back.

    So a wrong block, a shared block, a gap between chunks, a wrong position, or the key of a
    rejected draft among the history changes the tokens. It drafts by a script, and accepts what
    agrees with the rule. A step is over when it is launched, which is the order of a device's
    queue; what the next one needs of it stays in the slots.
    """

    weights_bytes = 0

    def __init__(
        self, kv: KVCacheManagerV2, config: ExecutorConfig, rule: Rule, script: Script
    ) -> None:
        self.kv, self.config, self.rule, self.script = kv, config, rule, script
        self.rows_per_generation = 1 + config.max_draft_len
        self.steps: list[tuple[list[int], int]] = []  # chunk lengths and number of generations
        self._slots: dict[int, Slot] = {}  # by the requests' rows in the cache manager
        for role in Role:
            self._cells(role).fill_(EMPTY)

    def launch(self, batch: ScheduledRequests, choose: HostChoice | None) -> "Landed":
        """A step that is over at once."""
        contexts, generations = batch.context_requests, batch.generation_requests
        self._check_size([r.chunk_len for r in contexts], len(generations))
        shares = [self._context_share(r, batch.context_logits_needed) for r in contexts]
        shares += [self._verify_share(r) for r in generations]
        logits = torch.stack([row for share in shares for row in self._logits(share)])
        largest, tokens = logits.max(dim=-1)
        if choose is not None:
            tokens = choose(logits)
            largest = torch.zeros(tokens.shape)
        sizes = [1] * len(contexts) + [self.rows_per_generation] * len(generations)
        split = zip(shares, tokens.split(sizes), largest.split(sizes), strict=True)
        return Landed([self._accept(s, t.tolist(), x.tolist()) for s, t, x in split])

    def _check_size(self, chunks: list[int], generations: int) -> None:
        self.steps.append((chunks, generations))
        rows = sum(chunks) + generations * self.rows_per_generation
        assert all(chunks)
        assert 0 < rows <= self.config.max_num_tokens
        assert len(chunks) + generations <= self.config.max_batch_size

    def _context_share(self, request: LlmRequest, all_rows: bool) -> Share:
        start, end = request.num_computed_tokens, request.num_computed_tokens + request.chunk_len
        histories = self._compute(request, start, request.prompt_token_ids[start:end])
        return Share(request, end, [], histories if all_rows else histories[-1:], step=0)

    def _verify_share(self, request: LlmRequest) -> Share:
        """The last token and its drafts: where the host assumes them, corrected by the device."""
        slot = self._slots[self.kv.row(request.request_id)]
        assert slot.request_id == request.request_id
        start = request.num_assumed_tokens + (slot.correction if request.rows_in_flight else 0)
        assert start == slot.length
        histories = self._compute(request, start, slot.tokens)
        return Share(request, start + len(histories), slot.tokens[1:], histories, slot.step)

    def _compute(self, request: LlmRequest, start: int, tokens: list[int]) -> list[list[int]]:
        """Put tokens into the cache from `start` on, as far as the request reaches; the history up
        to each as the cache has it."""
        assert request.max_total_tokens <= self.kv.max_seq_len
        end = min(start + len(tokens), request.max_total_tokens)
        for role in Role:
            blocks, cells = self.kv.block_ids(request.request_id, role), self._cells(role)
            for position in range(start, end):
                block, offset = divmod(position, self.kv.tokens_per_block)
                cells[blocks[block], :, offset] = tokens[position - start]
        history = self._read(request, end) if start < end else []
        places = range(start, start + len(tokens))
        return [history[: p + 1] if p < end else [] for p in places]

    def _read(self, request: LlmRequest, length: int) -> list[int]:
        """The request's first tokens, which every layer of every role must hold alike."""
        layers = []
        for role in Role:
            blocks = self.kv.block_ids(request.request_id, role)
            layers.append(self._cells(role)[blocks].transpose(0, 1).flatten(1)[:, :length])
        found = torch.cat(layers)
        assert bool((found == found[0]).all())
        history = found[0].tolist()
        assert len(history) == length and EMPTY not in history
        return history

    def _cells(self, role: Role) -> torch.Tensor:
        """int64 [blocks, layers, tokens_per_block], a token id each."""
        return self.kv.pool(role).view(torch.int64)

    def _logits(self, share: Share) -> list[torch.Tensor]:
        """A row past the end computes garbage, and the worst garbage agrees with the next draft."""
        following = [*share.drafts, 0]
        return [
            self.rule(history) if history else F.one_hot(torch.tensor(token), VOCAB).float()
            for history, token in zip_longest(share.histories, following, fillvalue=0)
        ]

    def _accept(self, share: Share, targets: list[int], largest: list[float]) -> SequenceResult:
        """Keep the agreeing drafts and one more token, and draft the next ones."""
        agrees = map(eq, share.drafts, targets)
        count = 1 + len(list(takewhile(bool, agrees)))
        last, correction = targets[count - 1], count - len(targets)
        request_id = share.request.request_id
        history = [*share.histories[correction - 1], last]
        drafts = self._draft(history, self.script(request_id, share.step))
        self._slots[self.kv.row(request_id)] = Slot(
            request_id, [last, *drafts], share.end + correction, correction, share.step + 1
        )
        return SequenceResult(targets[:count], drafts, largest[:count])

    def _draft(self, history: list[int], num_right: int) -> list[int]:
        """The rule's own next tokens as long as they shall be right, then others."""
        drafts: list[int] = []
        for place in range(self.config.max_draft_len):
            token = int(self.rule(history + drafts).argmax())
            drafts.append(token if place < num_right else (token + 1) % VOCAB)
        return drafts


@dataclass
class Landed:
    """The handle of a step that is over."""

    results: list[SequenceResult]
    launch_counts: None = None
    paths: None = None

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
        script: Script = all_right,
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
        self.model = ScriptedModel(self.kv, self.config, rule, script)
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
            if not self.executor.has_work:
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
