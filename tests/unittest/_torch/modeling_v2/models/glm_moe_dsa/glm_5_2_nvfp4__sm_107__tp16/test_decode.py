"""The decode step and its drafts against the built-in path, transformers and float64, in fp32."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from helpers import glm_tiny
from helpers.engine import executor_config, generate, make_engine, verified_drafts
from helpers.glm_oracle import (
    TRANSFORMERS_LATENT_EPS,
    load_oracle,
    make_checkpoint,
    make_drafts_agree,
    oracle_generate,
    random_prompt,
)
from helpers.numerics import Float64
from helpers.reference_glm import ContraryDecisions, Decisions, DraftChain, ReferenceGlm

from tensorrt_llm._torch.modeling_v2.catalog._op import validating
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.decode import (
    FAST,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.modeling import (  # noqa: E501
    GlmCore,
)
from tensorrt_llm._torch.pyexecutor.messages import PathCounts
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor

DRAFT_LENS = (0, 1, 3, 7)
NEW_TOKENS = 6
INDEX_TOPK = {"glm_tiny": 16, "random": 20}
# Which prompts: the first choice of all for which nothing hangs on a tie, see the test of that.
CHOICE = {"glm_tiny": 2, "random": 0}
# All sizes that may differ from glm_tiny's do, and layers follow each other in another order.
RANDOM = {
    "num_hidden_layers": 8,
    "hidden_size": 128,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_head_dim": 48,
    "v_head_dim": 24,
    "num_attention_heads": 8,
    "index_topk": INDEX_TOPK["random"],
    "index_n_heads": 32,
    "index_head_dim": 64,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "indexer_types": ["full", "shared", "full", "shared", "shared", "full", "full", "shared"],
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": True,
}

Prompt = list[int]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    random = make_checkpoint(tmp_path_factory.mktemp("decode") / "random", "glm52", 1, **RANDOM)
    return {"glm_tiny": glm_tiny.CHECKPOINT, "random": make_drafts_agree(random, kept=0.05)}


@pytest.fixture(scope="module")
def oracle_tokens(checkpoints: dict[str, Path]) -> Callable[[str, int], list[int]]:
    """transformers' greedy answer to the prompt of so many tokens."""
    oracle = cache(lambda name: load_oracle(checkpoints[name]))
    return cache(
        lambda name, length: oracle_generate(
            oracle(name), prompt_of(name, length), new_tokens(name, length)
        )
    )


def prompt_of(name: str, length: int) -> Prompt:
    """The end of several questions to the trained checkpoint; any tokens for the random one."""
    if name == "random":
        return random_prompt(length, seed=1000 * CHOICE[name] + length)
    questions = [question for question, _ in glm_tiny.heldout(every=30 + CHOICE[name])]
    return [token for question in questions for token in question][-length:]


def prompt_lengths(name: str, draft_len: int) -> list[int]:
    """From 1 token to 6 x index_topk, and those around the two seams: up to index_topk - 1 - 2 K
    the first step is a short one, and up to index_topk - 1 - K its rows see no more keys than are
    chosen."""
    topk = INDEX_TOPK[name]
    last_short = topk - 1 - 2 * draft_len
    seam = range(topk - 1 - draft_len, topk + 2)
    return sorted({1, last_short, last_short + 1, *seam, 3 * topk, 6 * topk})


def new_tokens(name: str, length: int) -> int:
    """Of the shortest prompt so many that its answer ends well behind the seam."""
    return INDEX_TOPK[name] + 4 if length == 1 else NEW_TOKENS


def make(directory: Path, modeling_v2: str, draft_len: int) -> PyExecutor:
    return make_engine(executor_config(directory, modeling_v2=modeling_v2, max_draft_len=draft_len))


def assert_all_fast(engine: PyExecutor, draft_len: int) -> None:
    """Every generation step, and the drafts after it."""
    counts = engine.stats().generation_steps
    steps = counts["target"].fast
    parts = ("target", "draft") if draft_len else ("target",)
    assert steps and counts == dict.fromkeys(parts, PathCounts(fast=steps))


@pytest.mark.parametrize("draft_len", DRAFT_LENS)
@pytest.mark.parametrize("name", INDEX_TOPK)
def test_tokens_and_acceptance(name, draft_len, checkpoints, oracle_tokens) -> None:
    """One request at a time."""
    target, builtin = (make(checkpoints[name], way, draft_len) for way in ("require", "off"))
    for length in prompt_lengths(name, draft_len):
        prompt, count = prompt_of(name, length), new_tokens(name, length)
        [tokens] = generate(target, [prompt], count)
        assert [tokens] == generate(builtin, [prompt], count), length
        assert tokens == oracle_tokens(name, length), length
        assert verified_drafts(target) == verified_drafts(builtin), length
    assert_all_fast(target, draft_len)
    steps, accepted = verified_drafts(target)
    assert not draft_len or steps / 4 < accepted[0] < steps


def right_drafts(
    model: ReferenceGlm, tokens: list[int], hidden: list[Float64], first: int
) -> list[int]:
    """After `first` known tokens and more, how many of the drafts that follow are right."""
    chain, right = DraftChain(model, index_share=True), []
    for known in range(2, len(tokens)):
        chain.extend(hidden[known - 2], tokens[known - 1])
        if known < first:
            continue
        pairs = zip(chain.drafts(max(DRAFT_LENS)), tokens[known:], strict=False)
        right.append(len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))))
    return right


@pytest.mark.parametrize("name", INDEX_TOPK)
def test_nothing_hangs_on_a_tie(name, checkpoints, oracle_tokens) -> None:
    """Float64 gives the same tokens, and as many right drafts, where it breaks ties and choices
    within noise the other way, so the test above may ask for equality. This is how its prompts are
    to be chosen."""
    plain, contrary = (
        ReferenceGlm(checkpoints[name], latent_eps=TRANSFORMERS_LATENT_EPS, decisions=decisions)
        for decisions in (Decisions(), ContraryDecisions())
    )
    for length in prompt_lengths(name, max(DRAFT_LENS)):
        answer = oracle_tokens(name, length)
        tokens = prompt_of(name, length) + answer
        hidden = [model.hidden_states(tokens) for model in (plain, contrary)]
        for states in hidden:
            logits = np.array([plain.logits(state) for state in states[length - 1 : -1]])
            assert logits.argmax(-1).tolist() == answer, length
            second, best = np.sort(logits)[:, -2:].T
            assert (best - second > plain.noise * np.abs(logits).max()).all(), length
        right = [
            right_drafts(model, tokens, states, length + 1)
            for model, states in zip((plain, contrary), hidden, strict=True)
        ]
        assert right[0] == right[1], length


# --- the calls ------------------------------------------------------------------------------------


@contextmanager
def sides_of_the_seam(engine: PyExecutor) -> Iterator[set[str]]:
    """Which of "short" and "long" the fast steps within it were."""
    seen: set[str] = set()

    def note(core: GlmCore, *_: object) -> None:
        if core.path == FAST:
            seen.add("short" if core.decode.step.shard is None else "long")

    hook = engine.model_engine.model.core.register_forward_hook(note)
    yield seen
    hook.remove()


@pytest.mark.parametrize("draft_len", [0, 3])
@pytest.mark.parametrize("name", INDEX_TOPK)
def test_every_call_is_valid(name, draft_len, checkpoints) -> None:
    """Each op accepts what the step gives it, and nothing bound is an earlier step's."""
    engine = make(checkpoints[name], "require", draft_len)
    prompt = prompt_of(name, INDEX_TOPK[name] - 1 - 2 * draft_len)
    with validating(), sides_of_the_seam(engine) as seen:
        generate(engine, [prompt], 4 + draft_len)
    assert_all_fast(engine, draft_len)
    assert seen == {"short", "long"}
