"""The engine on one GPU: against transformers in fp32, and decode graphs against eager steps."""

from pathlib import Path

import pytest
import torch
from helpers.engine import executor_config, generate, make_engine, run_ranks
from helpers.glm_oracle import (
    VARIANTS,
    load_oracle,
    make_checkpoint,
    oracle_generate,
    random_prompt,
)
from helpers.glm_slice import slice_checkpoint, slice_config
from helpers.glm_tiny import CHECKPOINT, heldout, share_answered

from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import Role
from tensorrt_llm.mapping import Mapping

pytestmark = pytest.mark.gpu

NEW_TOKENS = 64


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="module")
def slice_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slice_checkpoint(tmp_path_factory.mktemp("glm_5_2_slice"))


@pytest.mark.parametrize("graphs", [(), (1, 2, 4, 8)], ids=["eager", "graphs"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_equal_transformers(variant, graphs, tmp_path) -> None:
    """fp32: one by one and as a mixed batch of chunked prompts."""
    directory = make_checkpoint(tmp_path, variant, seed=3)
    oracle = load_oracle(directory)
    prompts = [random_prompt(n, seed=n) for n in (1, 7, 8, 9, 20, 48)]
    expected = [oracle_generate(oracle, p, NEW_TOKENS) for p in prompts]
    engine = make_engine(
        executor_config(directory, device="cuda", max_num_tokens=19, cuda_graph_batch_sizes=graphs)
    )
    assert [generate(engine, [p], NEW_TOKENS)[0] for p in prompts] == expected
    assert generate(engine, prompts, NEW_TOKENS) == expected


@pytest.mark.parametrize("draft_len", [0, 3])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_slice_graph_equals_eager(kv_cache_dtype, draft_len, slice_directory) -> None:
    """GLM-5.2's per-rank shapes with random bf16 weights, below and above index_topk."""
    prompts = [random_prompt(n, seed=n, vocab=9000) for n in (33, 2030, 2500)]
    answers = []
    for graphs in ((), (1,)):
        engine = make_engine(
            slice_config(
                slice_directory,
                kv_cache_dtype=kv_cache_dtype,
                cuda_graph_batch_sizes=graphs,
                max_draft_len=draft_len,
            )
        )
        answers.append([generate(engine, [p], NEW_TOKENS)[0] for p in prompts])
        del engine
        torch.cuda.empty_cache()
    assert answers[0] == answers[1]
    assert len(set(answers[0][0])) > 1


def test_slice_activations_stay_finite(slice_directory) -> None:
    engine = make_engine(slice_config(slice_directory))
    outputs = []
    for layer in engine.model_engine.model.model.layers:
        layer.register_forward_hook(lambda _m, _a, out: outputs.append(out[0] + out[1]))
    generate(engine, [random_prompt(100, seed=1, vocab=9000)], 2)
    assert all(bool(hidden.isfinite().all()) for hidden in outputs)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_padding_rows_write_nowhere(kv_cache_dtype, tmp_path) -> None:
    """Three requests in a graph of eight: blocks that nobody holds keep their bytes."""
    directory = make_checkpoint(tmp_path, "glm52", seed=4)
    engine = make_engine(
        executor_config(
            directory,
            device="cuda",
            dtype="bfloat16",
            kv_cache_dtype=kv_cache_dtype,
            cuda_graph_batch_sizes=(8,),
        )
    )
    cache = engine.kv_cache_manager
    for role in (Role.KEY, Role.INDEX_KEY):
        cache.pool(role).fill_(0x5A)
    prompts = [random_prompt(n, seed=n) for n in (3, 12, 30)]
    generate(engine, prompts, 20)
    held = sum(
        cache.blocks_for(len(p) + 20) for p in prompts
    )  # the lowest ids are handed out first
    for role in (Role.KEY, Role.INDEX_KEY):
        assert bool((cache.pool(role)[held:] == 0x5A).all())


@pytest.mark.parametrize("draft_len", [0, 3])
@pytest.mark.parametrize("graphs", [(), (8,)], ids=["eager", "graphs"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_glm_tiny_answers_in_bf16(kv_cache_dtype, graphs, draft_len) -> None:
    """The trained checkpoint's held-out questions: bf16 has other bits, but the same answers."""
    engine = make_engine(
        executor_config(
            CHECKPOINT,
            device="cuda",
            dtype="bfloat16",
            kv_cache_dtype=kv_cache_dtype,
            latent_norm_eps=None,
            max_seq_len=256,
            max_draft_len=draft_len,
            disable_overlap_scheduler=False,
            cuda_graph_batch_sizes=graphs,
        )
    )
    assert share_answered(engine, heldout(every=6)) >= 0.9


@pytest.mark.multi_gpu
@pytest.mark.parametrize("draft_len", [0, 3])
@pytest.mark.parametrize("graphs", [(), (1, 4)], ids=["eager", "graphs"])
def test_two_gpus_give_the_same_tokens(graphs, draft_len) -> None:
    """NCCL in eager steps and inside of captured ones; fp32 tokens are those of one rank."""
    prompts = [prompt for prompt, _ in heldout(every=90)]
    expected = _tiny_tokens(Mapping(), (), 0, prompts)
    assert run_ranks(2, _tiny_tokens, graphs, draft_len, prompts, device="cuda") == [expected] * 2


def _tiny_tokens(
    mapping: Mapping, graphs: tuple[int, ...], draft_len: int, prompts: list[list[int]]
) -> list[list[int]]:
    torch.backends.cuda.matmul.allow_tf32 = False
    engine = make_engine(
        executor_config(
            CHECKPOINT,
            mapping=mapping,
            device="cuda",
            max_seq_len=256,
            max_draft_len=draft_len,
            disable_overlap_scheduler=False,
            cuda_graph_batch_sizes=graphs,
        )
    )
    alone = [generate(engine, [p], 30)[0] for p in prompts]
    assert generate(engine, prompts, 30) == alone
    return alone
