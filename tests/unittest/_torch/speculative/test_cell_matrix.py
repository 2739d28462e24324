"""Greedy tokens are the same in every cell of loop x draft length x trim x ranks x index_topk."""

from pathlib import Path

import pytest
from helpers.cells import BATCH_SIZE, Questions, run_cells, wrong_cells
from helpers.engine import executor_config, generate, make_engine, run_ranks
from helpers.glm_oracle import (
    SMALL_WITH_MTP,
    load_oracle,
    make_checkpoint,
    make_drafts_agree,
    oracle_generate,
    random_prompt,
    with_config,
)

from tensorrt_llm.mapping import Mapping

DRAFT_LENS = (0, 1, 2, 3, 5, 7)
PROMPTS = [random_prompt(n, seed=n) for n in (1, 3, 8, 9, 12, 21, 33, 60)]
NEW_TOKENS = 8
QUESTIONS = Questions(PROMPTS, NEW_TOKENS, alone=1, batched=len(PROMPTS))
FEW_QUESTIONS = Questions(
    PROMPTS, 4, alone=1, batched=BATCH_SIZE
)  # ranks mostly wait for each other
# Below most contexts, and above all of them: with it every key is chosen and none is scored.
INDEX_TOPK = {"topk 8": 8, "topk 256": 256}
SETTINGS = {"max_seq_len": 128}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("cells")
    base = make_drafts_agree(make_checkpoint(root / "base", "glm52", seed=1, **SMALL_WITH_MTP))
    return {
        name: with_config(base, root / name, index_topk=topk) for name, topk in INDEX_TOPK.items()
    }


@pytest.fixture(scope="module")
def expected(checkpoints) -> dict[str, list[list[int]]]:
    """Without drafts, one prompt after the other, in the plain loop of a single rank."""
    tokens = {}
    for name, directory in checkpoints.items():
        engine = make_engine(executor_config(directory, **SETTINGS))
        tokens[name] = [generate(engine, [p], NEW_TOKENS)[0] for p in PROMPTS]
    return tokens


def test_expected_tokens_are_transformers(checkpoints, expected) -> None:
    """And they depend on the choice of keys; else the cells would prove little about it."""
    for name, directory in checkpoints.items():
        oracle = load_oracle(directory)
        assert expected[name] == [oracle_generate(oracle, p, NEW_TOKENS) for p in PROMPTS]
    few, all_keys = expected.values()
    assert all(a != b for a, b in zip(few[4:], all_keys[4:], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("trim", ["1", "0"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_tokens_are_the_same_in_every_cell(tp_size, trim, checkpoints, expected) -> None:
    asked = (checkpoints, DRAFT_LENS, trim)
    if tp_size == 1:
        outcomes = run_cells(Mapping(), *asked, QUESTIONS, SETTINGS)
    else:
        outcomes, *others = run_ranks(
            tp_size, run_cells, *asked, FEW_QUESTIONS, SETTINGS, gpus_per_node=2
        )
        assert all(other == outcomes for other in others)
    wrong = wrong_cells(outcomes, expected)
    assert not wrong, "\n".join(wrong)
    for cell, outcome in outcomes.items():
        if cell.draft_len:
            assert outcome.accepted > 0 and outcome.rejected > 0, cell


@pytest.mark.multi_gpu
@pytest.mark.parametrize("trim", ["1", "0"])
def test_two_gpus_with_graphs_give_the_same_tokens(trim, checkpoints, expected) -> None:
    settings = {**SETTINGS, "device": "cuda", "cuda_graph_batch_sizes": (1, 4)}
    asked = (checkpoints, (1, 3, 7), trim, QUESTIONS, settings)
    outcomes, other = run_ranks(2, run_cells, *asked, device="cuda")
    assert other == outcomes
    wrong = wrong_cells(outcomes, expected)
    assert not wrong, "\n".join(wrong)
