"""Executors on real rank processes that run the counting engine."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig
from tensorrt_llm.executor import GenerationExecutor
from tensorrt_llm.executor.ranks import python_command
from tensorrt_llm.mapping import Mapping

FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"


def executor_config(world_size: int = 1, model: str = "/nowhere") -> ExecutorConfig:
    return ExecutorConfig(
        model=Path(model),
        device="cpu",
        dtype="float32",
        mapping=Mapping(world_size=world_size, tp_size=world_size),
        load_format="auto",
        latent_norm_eps=None,
        kv_cache_dtype="auto",
        tokens_per_block=32,
        kv_cache_max_tokens=512,
        free_gpu_memory_fraction=0.9,
        max_batch_size=4,
        max_num_tokens=32,
        max_seq_len=64,
        enable_chunked_prefill=False,
        cuda_graph_batch_sizes=(),
        max_draft_len=0,
        use_rejection_sampling=False,
        disable_overlap_scheduler=True,
        attn_backend="TRTLLM",
        modeling_v2="off",
        stop_tokenizer=None,
        num_threads=1,
        iter_perf_stats=False,
    )


@pytest.fixture
def make_executor() -> Iterator[Callable[..., GenerationExecutor]]:
    """`make_executor(world_size, model)`; shut down at the end of the test."""
    made: list[GenerationExecutor] = []

    def make(world_size: int = 1, model: str = "/nowhere") -> GenerationExecutor:
        code = f"import runpy; runpy.run_path({str(FAKE_ENGINE)!r}, run_name='__main__')"
        config = executor_config(world_size, model)
        made.append(GenerationExecutor(config, worker_command=python_command(code)))
        return made[-1]

    yield make
    for executor in made:
        executor.shutdown()
