"""Engines for tests: configs, greedy generation without I/O, and real rank processes."""

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tensorrt_llm._torch.distributed import destroy_process_group, init_process_group
from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig
from tensorrt_llm._torch.pyexecutor.messages import LlmResponse, NewRequest
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.pyexecutor.py_executor_creator import create_py_executor
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.sampling_params import SamplingParams

RANK_TIMEOUT_S = 240.0


def executor_config(model: Path, **overrides: Any) -> ExecutorConfig:
    """A small fp32 CPU engine with chunked prefill and transformers' latent eps."""
    settings: dict[str, Any] = {
        "model": model,
        "device": "cpu",
        "dtype": "float32",
        "mapping": Mapping(),
        "load_format": "auto",
        "latent_norm_eps": 1e-6,
        "kv_cache_dtype": "auto",
        "tokens_per_block": 8,
        "kv_cache_max_tokens": 2048,
        "free_gpu_memory_fraction": 0.9,
        "max_batch_size": 8,
        "max_num_tokens": 256,
        "max_seq_len": None,
        "max_draft_len": 0,
        "use_rejection_sampling": False,
        "enable_chunked_prefill": True,
        "cuda_graph_batch_sizes": (),
        "disable_overlap_scheduler": True,
        "attn_backend": "TRTLLM",
        "modeling_v2": "off",
        "stop_tokenizer": None,
        "num_threads": 1,
        "iter_perf_stats": False,
    }
    return ExecutorConfig(**{**settings, **overrides})


def make_engine(config: ExecutorConfig) -> PyExecutor:
    """An engine whose messages come and go by method calls."""
    return create_py_executor(config, receive=lambda _block: [], send=lambda _news: None)


def generate(engine: PyExecutor, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy tokens of all prompts in one go, eos ignored."""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    engine.add_requests([NewRequest(i, prompt, params) for i, prompt in enumerate(prompts)])
    tokens: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    open_requests = set(tokens)
    while open_requests:
        for news in engine.step():
            if isinstance(news, LlmResponse):
                assert news.error is None, news.error
                tokens[news.request_id] += news.token_ids
                if news.finish_reason:
                    open_requests.discard(news.request_id)
    return [tokens[i] for i in range(len(prompts))]


def run_ranks(
    tp_size: int, work: Callable[..., Any], *args: Any, device: str = "cpu", **mapping: Any
) -> list[Any]:
    """`work(mapping, *args)` on `tp_size` real rank processes; their results in rank order.

    Raises:
        RuntimeError: with the traceback of the first rank that failed.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"file://{directory}/rendezvous"
        ranks = [
            context.Process(
                target=_rank_main,
                args=(
                    Mapping(world_size=tp_size, tp_size=tp_size, rank=r, **mapping),
                    device,
                    rendezvous,
                    results,
                    work,
                    args,
                ),
            )
            for r in range(tp_size)
        ]
        for rank in ranks:
            rank.start()
        try:
            answers = [results.get(timeout=RANK_TIMEOUT_S) for _ in ranks]
        finally:
            for rank in ranks:
                rank.join(5)
                rank.kill()
    failures = [error for _, error, _ in answers if error]
    if failures:
        raise RuntimeError(failures[0])
    return [pickle.loads(result) for _, _, result in sorted(answers, key=lambda a: a[0])]


def _rank_main(
    mapping: Mapping,
    device: str,
    rendezvous: str,
    results: Any,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(mapping.local_rank)
    try:
        init_process_group(mapping, device, rendezvous, RANK_TIMEOUT_S)
        # Plain bytes: a tensor would travel as a handle that dies with this process.
        results.put((mapping.rank, None, pickle.dumps(work(mapping, *args))))
        destroy_process_group()
    except BaseException:
        results.put((mapping.rank, traceback.format_exc(), None))
