"""What a step reads on the device was written by it or by the step before, never left over."""

import pytest
import torch
from helpers.engine import executor_config, generate, make_engine
from helpers.glm_tiny import CHECKPOINT, heldout

from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import Role
from tensorrt_llm._torch.pyexecutor.model_engine import PyTorchModelEngine
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor

NEW_TOKENS = 16
POISONS = (10**6, -12345)
CONSTANT = "batch_indices_cuda"  # 0, 1, 2, ...: no step writes it, so all may rely on it
TABLES = ("block_table", "indexer_k_cache_block_offsets")


def device_tensors(engine: PyTorchModelEngine) -> dict[str, torch.Tensor]:
    """Everything that the metadata and the token store keep between steps, by name."""
    owners = (engine.attn_metadata, engine.store)
    found = {name: value for owner in owners for name, value in vars(owner).items()}
    return {n: t for n, t in found.items() if isinstance(t, torch.Tensor) and n != CONSTANT}


def poison(engine: PyTorchModelEngine, value: int) -> None:
    """Fill the buffers of an engine that has not staged anything yet.

    Later would be too late: staging does not repeat an upload that it remembers.
    """
    assert engine.attn_metadata.staging.num_uploads == 0
    spare = engine.store.next_new_tokens[engine.store.spare_slot].clone()
    last_block = min(engine.kv_cache_manager.num_blocks(role) for role in Role) - 1
    for name, tensor in device_tensors(engine).items():
        # Padding rows look up keys in the table rows that an earlier step left behind: pages of
        # others, or none, but never pages that do not exist.
        tensor.fill_(min(value, last_block) if name in TABLES else value)
    # Padding rows also embed the spare slot's token: any will do, but it has to be one.
    engine.store.next_new_tokens[engine.store.spare_slot] = spare


def make_poisoned(monkeypatch: pytest.MonkeyPatch, value: int, **settings: object) -> PyExecutor:
    """An engine whose buffers were poisoned before it warmed up."""
    warmup, poisoned = PyTorchModelEngine.warmup, []

    def poison_and_warm_up(self: PyTorchModelEngine, progress: bool) -> None:
        poison(self, value)
        poisoned.append(self)
        warmup(self, progress)

    monkeypatch.setattr(PyTorchModelEngine, "warmup", poison_and_warm_up)
    executor = make_engine(_config(**settings))
    assert poisoned == [executor.model_engine]
    return executor


def _config(**settings: object) -> ExecutorConfig:
    """Few tokens per step, so that prompts are chunked beside generations."""
    return executor_config(
        CHECKPOINT, max_seq_len=128, max_num_tokens=40, max_batch_size=4, **settings
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [[5], *(prompt for prompt, _ in heldout(every=120))]


@pytest.fixture(scope="module")
def expected(prompts) -> list[list[int]]:
    return generate(make_engine(_config()), prompts, NEW_TOKENS)


def test_the_buffers_that_carry_something_are_poisoned(monkeypatch) -> None:
    """New ones join by themselves; these must not be lost."""
    executor = make_poisoned(monkeypatch, POISONS[0], max_draft_len=3)
    assert set(device_tensors(executor.model_engine)) >= {
        *TABLES,
        "seq_lens_cuda",
        "kv_lens_cuda",
        "kv_limits_cuda",
        "_buffers",
        "next_new_tokens",
        "kv_correction",
        "slots",
        "corrected",
    }


@pytest.mark.parametrize("value", POISONS)
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "overlap"])
@pytest.mark.parametrize("draft_len", [0, 3])
def test_poison_does_not_change_tokens(
    draft_len, plain, value, prompts, expected, monkeypatch
) -> None:
    executor = make_poisoned(
        monkeypatch, value, max_draft_len=draft_len, disable_overlap_scheduler=plain
    )
    assert generate(executor, prompts, NEW_TOKENS) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [(), (1, 4)], ids=["eager", "graphs"])
@pytest.mark.parametrize("value", POISONS)
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "overlap"])
@pytest.mark.parametrize("draft_len", [0, 3])
def test_cuda_poison_does_not_change_tokens(
    draft_len, plain, value, graphs, prompts, expected, monkeypatch
) -> None:
    """Before the capture; then one request alone and three in a graph of four."""
    torch.backends.cuda.matmul.allow_tf32 = False
    executor = make_poisoned(
        monkeypatch,
        value,
        device="cuda",
        max_draft_len=draft_len,
        disable_overlap_scheduler=plain,
        cuda_graph_batch_sizes=graphs,
    )
    assert generate(executor, prompts[:1], NEW_TOKENS) == expected[:1]
    assert generate(executor, prompts[1:], NEW_TOKENS) == expected[1:]
