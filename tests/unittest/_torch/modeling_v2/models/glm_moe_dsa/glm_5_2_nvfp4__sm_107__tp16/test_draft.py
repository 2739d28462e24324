"""The target's draft loop against the built-in one: from the same state in every step, and as whole
engines wherever the loop does not serve a step."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.draft_twins import ROLES, Twins, changed_rows, row_bytes
from helpers.engine import executor_config, generate, make_engine, run_requests
from helpers.glm_oracle import with_config
from helpers.glm_tiny import CHECKPOINT, prompts

from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.speculative.forced_acceptance import ENV
from tensorrt_llm._torch.speculative.interface import SpecMetadata, SpecOutputs
from tensorrt_llm._torch.speculative.mtp import MTPEagleWorker
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.sampling_params import SamplingParams

LONGEST_ANSWER = 44
LONG = prompts(8)[-1]  # 32 tokens, twice as many as the keys that a row chooses
PROMPTS = [LONG, [5]]
BUILTIN, FAST = "builtin", "fast"
PLAIN = pytest.mark.parametrize("plain", [True, False], ids=["plain", "overlap"])


def engine(checkpoint: Path = CHECKPOINT, mode: str = "require", **overrides: Any) -> PyExecutor:
    settings = {"modeling_v2": mode, "max_seq_len": 128, "max_batch_size": 4, **overrides}
    return make_engine(executor_config(checkpoint, **settings))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By what `LONG` is in them: "short" if rows take all its keys."""
    every_key = tmp_path_factory.mktemp("topk") / "every_key"
    return {"long": CHECKPOINT, "short": with_config(CHECKPOINT, every_key, index_topk=256)}


@pytest.fixture(scope="module")
def answers(checkpoints) -> dict[str, list[list[int]]]:
    """To `LONG`, and to one token, whose context is short at first in any case."""
    return {
        name: generate(engine(path, "off"), PROMPTS, LONGEST_ANSWER)
        for name, path in checkpoints.items()
    }


# --- the same state in both loops -----------------------------------------------------------------


def assert_outputs(outputs: SpecOutputs, expected: SpecOutputs, drafts: int) -> None:
    """Equal, but for drafts after the first so many."""
    for name in ("new_tokens", "new_tokens_lens"):
        assert torch.equal(getattr(outputs, name), getattr(expected, name)), name
    for name, columns in (("next_draft_tokens", drafts), ("next_new_tokens", 1 + drafts)):
        given, wanted = getattr(outputs, name), getattr(expected, name)
        assert given.shape == wanted.shape and given.dtype == wanted.dtype, name
        assert torch.equal(given[:, :columns], wanted[:, :columns]), name


SAME_STATE = [
    *itertools.product([1, 2, 7], ["short", "long"], [True]),
    *[(1, "long", False), (2, "short", False), (7, "long", False)],
]


@pytest.mark.parametrize(("draft_len", "context", "plain"), SAME_STATE)
def test_drafts_are_the_built_in_loops(draft_len, context, plain, checkpoints, answers) -> None:
    """After steps that accept none, half and all of their drafts, in two rounds."""
    executor = engine(
        checkpoints[context], max_draft_len=draft_len, disable_overlap_scheduler=plain
    )
    twins, accepts = Twins(executor), (0, draft_len // 2, draft_len)
    tokens = 1 + 2 * sum(1 + n for n in accepts)
    for prompt, answer in zip(PROMPTS, answers[context], strict=True):
        assert twins.follow(prompt, answer, tokens, accepts) == answer[:tokens]
    for step in twins.steps:
        assert_outputs(step.fast, step.builtin, draft_len)
    seen = {(step.short, step.count) for step in twins.steps}
    assert seen >= {(context == "short", 1 + n) for n in accepts}
    assert any(step.short for step in twins.steps)  # also where `LONG` is not


@pytest.mark.parametrize(("draft_len", "plain"), [(2, True), (2, False), (7, False)])
def test_drafts_end_with_their_request(draft_len, plain, answers) -> None:
    """Rows at a request's end and past it: drafts that can still count are the same, and the whole
    generation writes nothing behind the end, which is also that of a block at times."""
    executor = engine(max_draft_len=draft_len, disable_overlap_scheduler=plain)
    twins, answer = Twins(executor), answers["long"][0]
    for tokens in range(2, 4 + draft_len):
        pools = overwritten_pools(executor)
        assert twins.follow(LONG, answer, tokens, [0, draft_len]) == answer[:tokens]
        assert_written_only(executor, pools, len(LONG) + tokens)
    for step in twins.steps:
        assert_outputs(step.fast, step.builtin, step.usable)
    assert {step.usable for step in twins.steps} == set(range(draft_len + 1))


def test_tokens_may_be_accepted_past_the_end(monkeypatch) -> None:
    """By force, whatever stands in the padding rows: nothing is written, and nothing fails."""
    monkeypatch.setenv(ENV, "7")
    executor = engine(max_draft_len=7)
    twins = Twins(executor)
    for tokens in (2, 7, 8):
        pools = overwritten_pools(executor)
        generate(executor, [LONG], tokens)
        assert_written_only(executor, pools, len(LONG) + tokens)
    for step in twins.steps:
        assert_outputs(step.fast, step.builtin, step.usable)
    assert [step.position >= 0 for step in twins.steps] == [False, False, True]


def overwritten_pools(executor: PyExecutor) -> dict[str, torch.Tensor]:
    """Copies of the pools, after a number that no key has was written all over them."""
    pools = {role: executor.kv_cache_manager.pool(role) for role in ROLES}
    for pool in pools.values():
        pool.fill_(0x40)
    return {role: pool.clone() for role, pool in pools.items()}


def assert_written_only(executor: PyExecutor, before: dict[str, torch.Tensor], limit: int) -> None:
    """Raises AssertionError if the last step's one request holds a key past its limit, or if there
    is one outside of its blocks."""
    manager, metadata = executor.kv_cache_manager, executor.model_engine.attn_metadata
    tables = (metadata.block_table, metadata.indexer_k_cache_block_offsets)
    for role, table in zip(ROLES, tables, strict=True):
        layers, size = manager.pool(role).shape[1], manager.tokens_per_block
        inside = {
            (int(table[0, place // size]) * layers + slot) * size + place % size
            for place in range(limit)
            for slot in range(layers)
        }
        changed = changed_rows(before[role], manager.pool(role), row_bytes(metadata, role))
        assert changed and changed <= inside, role


# --- acceptance -----------------------------------------------------------------------------------


class Step(NamedTuple):
    """What a step of a running engine was, and what its worker did."""

    contexts: int
    generations: int
    path: str | None
    counts: list[int]


def watch(executor: PyExecutor) -> list[Step]:
    """Every step from here on."""
    worker, steps = executor.model_engine.worker, list[Step]()
    forward = worker.forward

    def watched(*args: Any) -> SpecOutputs:
        outputs, spec = forward(*args), args[4]
        counts = outputs.new_tokens_lens.tolist()
        steps.append(Step(spec.num_contexts, spec.num_generations, worker.draft_path, counts))
        return outputs

    worker.forward = watched
    return steps


def forced_generation(mode: str, **settings: Any) -> tuple[list[Step], list[list[int]], int]:
    """One request, and then three whose prompts are cut into chunks beside generations.

    Returns:
        (the steps without their paths, tokens, draws so far).
    """
    executor = engine(mode=mode, max_draft_len=3, max_num_tokens=24, **settings)
    steps = watch(executor)
    tokens = generate(executor, [LONG], 16) + generate(executor, prompts(4)[1:], 20)
    _, counter = executor.model_engine.worker.forced.state(torch.device("cpu"))
    return [step._replace(path=None) for step in steps], tokens, int(counter)


@pytest.mark.parametrize(
    ("value", "counts", "plain"),
    [("2", {3}, True), ("2.6", {3, 4}, True), ("2.6", {3, 4}, False), ("9", {4}, False)],
)
def test_forced_counts_are_the_built_in_workers(value, counts, plain, monkeypatch) -> None:
    """Draw by draw over whole generations, alone, in batches and beside contexts."""
    monkeypatch.setenv(ENV, value)
    expected = forced_generation("off", disable_overlap_scheduler=plain)
    assert forced_generation("require", disable_overlap_scheduler=plain) == expected
    steps, _, draws = expected
    forced = [step for step in steps if step.generations]
    assert {n for step in forced for n in step.counts[step.contexts :]} == counts
    assert draws == (len(forced) if value == "2.6" else 0)
    shapes = {(bool(step.contexts), step.generations) for step in forced}
    assert shapes >= {(False, 1), (False, 3), (True, 1)}


def random_step(contexts: int, generations: int, k: int, seed: int) -> tuple[torch.Tensor, Any]:
    """(target tokens, metadata) of drafts that are right or wrong by chance."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    sequences = contexts + generations
    following = torch.full((contexts,), -1)
    spec = SpecMetadata(
        k, contexts, generations, draw(2, generations, k), following, draw(64, sequences)
    )
    return draw(2, contexts + generations * (1 + k)), spec


@pytest.mark.parametrize("value", ["0", "1.3", "2", "2.6", "9"])
def test_accepted_tokens_are_the_built_in_workers(value, monkeypatch) -> None:
    """Over steps of all shapes that share one counter; the warm-up of a graph is strict and leaves
    the counter alone."""
    monkeypatch.setenv(ENV, value)
    # A build without CUDA cannot even ask.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    k = 3
    worker = engine(max_draft_len=k).model_engine.worker
    builtin, cpu = MTPEagleWorker(k, Mapping(), index_share=True), torch.device("cpu")
    shapes = [(0, 1), (0, 4), (2, 3), (0, 1), (1, 0), (0, 7), (0, 1)]
    for seed, (contexts, generations) in enumerate(5 * shapes):
        tokens, spec = random_step(contexts, generations, k, seed)
        spec = dataclasses.replace(spec, is_cuda_graph=seed % 4 == 3)
        given, expected = (w.accept_draft_tokens(tokens, spec) for w in (worker, builtin))
        assert all(map(torch.equal, given, expected)), (seed, contexts, generations)
        assert worker.forced.state(cpu)[1] == builtin.forced.state(cpu)[1]


# --- the built-in loop inside the target ----------------------------------------------------------


class Fallback(NamedTuple):
    """Why, and who asks for what.

    Attributes:
        builtin: of a step's contexts and generations, whether its drafts are the built-in loop's.
        settings, config: the engine's and the checkpoint's.
        params: of sampling.
    """

    reason: str
    builtin: Callable[[int, int], bool]
    prompts: list[list[int]]
    settings: dict[str, Any] = {}
    config: dict[str, Any] = {}
    params: dict[str, Any] = {}


FALLBACKS = {
    "contexts": Fallback("contexts", lambda c, g: c > 0 or g > 1, PROMPTS, {"max_num_tokens": 16}),
    "batch": Fallback(
        "a verify step of the built-in modules", lambda c, g: c > 0 or g > 1, PROMPTS
    ),
    "drawn": Fallback(
        "drawn drafts",
        lambda c, g: True,
        [LONG],
        {"use_rejection_sampling": True},
        params={"temperature": 0.8, "seed": 3},
    ),
    "no index share": Fallback(
        "index_share_for_mtp_iteration off",
        lambda c, g: True,
        [LONG],
        config={"index_share_for_mtp_iteration": False},
    ),
}


@PLAIN
@pytest.mark.parametrize("why", FALLBACKS)
def test_other_steps_draft_with_the_built_in_loop(why, plain, tmp_path, logged) -> None:
    """The engine answers twice, and says once what it does."""
    case = FALLBACKS[why]
    checkpoint = with_config(CHECKPOINT, tmp_path / "checkpoint", **case.config)
    settings = {"max_draft_len": 3, "disable_overlap_scheduler": plain, **case.settings}
    target, builtin = (engine(checkpoint, mode, **settings) for mode in ("require", "off"))
    steps = watch(target)
    for length in (14, 8):
        params = SamplingParams(max_tokens=length, ignore_eos=True, **case.params)
        given, expected = (run_requests(e, case.prompts, params) for e in (target, builtin))
        assert given == expected
    for step in steps:
        fallback = case.builtin(step.contexts, step.generations)
        assert step.path == (BUILTIN if fallback else FAST), step
    assert any(not step.contexts for step in steps)
    told = f"modeling_v2: drafting with {case.reason} runs the built-in loop"
    assert logged.messages.count(told) == 1
