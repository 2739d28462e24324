"""The built-in model against transformers' own GlmMoeDsaForCausalLM, fp32 on the CPU."""

from pathlib import Path

import pytest
import torch
from helpers.engine import executor_config, generate, make_engine, run_ranks
from helpers.glm_oracle import (
    VARIANTS,
    hub_config,
    load_oracle,
    make_checkpoint,
    oracle_forward,
    oracle_generate,
    random_prompt,
)

from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm.mapping import Mapping

NEW_TOKENS = 48
# Bound on fp32 differences of O(1) hidden states after up to 8 layers of differently ordered sums.
HIDDEN_TOLERANCE = 1e-4


def prompt_lengths(variant: str) -> list[int]:
    """From 1 token to 6 x index_topk, around the seam where the selection begins to bite."""
    topk = min(hub_config(VARIANTS[variant])["index_topk"], 12)
    return [1, 2, topk - 1, topk, topk + 1, 2 * topk + 3, 4 * topk, 6 * topk]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("oracle")
    return {name: make_checkpoint(root / name, name, seed) for seed, name in enumerate(VARIANTS)}


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Per variant, (prompt, transformers' greedy continuation) for each prompt length."""
    answers = {}
    for variant, directory in checkpoints.items():
        oracle = load_oracle(directory)
        prompts = [random_prompt(n, seed=n) for n in prompt_lengths(variant)]
        answers[variant] = [(p, oracle_generate(oracle, p, NEW_TOKENS)) for p in prompts]
    return answers


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal(variant, checkpoints, expected) -> None:
    """One request at a time, the whole prompt in one step."""
    engine = make_engine(executor_config(checkpoints[variant]))
    for prompt, tokens in expected[variant]:
        assert generate(engine, [prompt], NEW_TOKENS) == [tokens]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_in_chunks_and_batches(variant, checkpoints, expected) -> None:
    """All lengths at once, prompts cut into chunks, contexts and generations mixed in one step."""
    engine = make_engine(executor_config(checkpoints[variant], max_num_tokens=19, max_batch_size=5))
    prompts, tokens = zip(*expected[variant], strict=True)
    assert generate(engine, list(prompts), NEW_TOKENS) == list(tokens)


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_and_selections_equal(variant, checkpoints) -> None:
    """Layer by layer: hidden states within a bound, the selected keys as sets, logits within the
    bound."""
    prompt = random_prompt(prompt_lengths(variant)[-1], seed=99)
    logits, hidden, topk = oracle_forward(load_oracle(checkpoints[variant]), prompt)
    engine = make_engine(executor_config(checkpoints[variant]))
    own_logits, own_hidden, own_topk = _trace(engine, prompt)
    for layer, (own, reference) in enumerate(zip(own_hidden, hidden, strict=True)):
        torch.testing.assert_close(
            own, reference, atol=HIDDEN_TOLERANCE, rtol=0, msg=f"layer {layer}"
        )
    for layer, (own, reference) in enumerate(zip(own_topk, topk, strict=True)):
        assert _as_sets(own) == _as_sets(reference), f"layer {layer}"
    torch.testing.assert_close(own_logits, logits, atol=HIDDEN_TOLERANCE, rtol=0)


def test_selection_bites(checkpoints) -> None:
    """The oracle prompts are long enough for sparsity to change the result; else the tests above
    prove little."""
    prompt = random_prompt(48, seed=99)
    oracle = load_oracle(checkpoints["glm52"])
    sparse = oracle_forward(oracle, prompt)[0]
    oracle.config.index_topk = 4096
    for layer in oracle.model.layers:
        if getattr(layer.self_attn, "indexer", None) is not None:
            layer.self_attn.indexer.index_topk = 4096
    dense = oracle_forward(oracle, prompt)[0]
    assert (sparse - dense).abs().amax() > 0.1


def test_cached_and_recomputed_logits_agree(checkpoints) -> None:
    """Feeding tokens one by one leaves the same cache as one long prompt: the continuations are
    equal."""
    engine = make_engine(executor_config(checkpoints["glm52"]))
    prompt = random_prompt(30, seed=5)
    [whole] = generate(engine, [prompt], 20)
    [rest] = generate(engine, [prompt + whole[:10]], 10)
    assert rest == whole[10:]


@pytest.mark.parametrize("tp_size", [2, 4])
def test_tensor_parallel_tokens_equal(tp_size, checkpoints, expected) -> None:
    """Real ranks over gloo; with tp 4 two "nodes", so that the dense MLP's split spans them."""
    jobs = [
        (
            checkpoints[name],
            [p for p, _ in expected[name]][1::2],
            [t for _, t in expected[name]][1::2],
        )
        for name in ("glm52", "one_dense_layer")
    ]
    for answers in run_ranks(tp_size, _generate_on_rank, jobs, gpus_per_node=2):
        for answer, (_, _, tokens) in zip(answers, jobs, strict=True):
            assert answer == tokens


def _generate_on_rank(mapping: Mapping, jobs) -> list[list[list[int]]]:
    answers = []
    for directory, prompts, _ in jobs:
        engine = make_engine(executor_config(directory, mapping=mapping, max_num_tokens=31))
        answers.append(generate(engine, prompts, NEW_TOKENS))
    return answers


def _trace(
    engine: PyExecutor, prompt: list[int]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """(logits of all tokens, hidden states after each layer, selection used by each layer)."""
    model, metadata = engine.model_engine.model, engine.model_engine.attn_metadata
    hidden: list[torch.Tensor] = []
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _m, _a, out: hidden.append((out[0] + out[1]).clone()))
        layer.self_attn.register_forward_hook(
            lambda *_: chosen.append(metadata.selection.indices.clone())
        )
    engine.kv_cache_manager.add_request(0)
    engine.kv_cache_manager.resize(0, len(prompt))
    metadata.request_ids, metadata.seq_lens, metadata.num_contexts = [0], [len(prompt)], 1
    metadata.kv_cache_params.num_cached_tokens_per_seq = [0]
    metadata.prepare()
    logits = model(metadata, torch.tensor(prompt), metadata.position_ids)
    return logits, hidden, chosen


def _as_sets(topk: torch.Tensor) -> list[set[int]]:
    """Per row the legal positions; transformers pads short rows with future ones, this project
    with -1."""
    return [{t for t in row if 0 <= t <= position} for position, row in enumerate(topk.tolist())]
