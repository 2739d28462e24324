"""Builds the engine of one rank: model, cache pools, decode graphs, step loop."""

from collections.abc import Callable
from dataclasses import replace

import torch

from tensorrt_llm._torch.distributed import min_over_ranks
from tensorrt_llm._torch.modeling_v2._router_index import modeling_v2_resolve
from tensorrt_llm._torch.models.loading import load_model
from tensorrt_llm._torch.models.model_config import (
    ModelConfig,
    PretrainedConfig,
    QuantConfig,
    eos_token_ids,
)
from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import (
    BufferConfig,
    KVCacheManagerV2,
    Role,
    num_blocks_for_memory,
)
from tensorrt_llm._torch.pyexecutor.model_engine import PyTorchModelEngine
from tensorrt_llm._torch.pyexecutor.py_executor import Incoming, Outgoing, PyExecutor
from tensorrt_llm._torch.pyexecutor.sampler import TorchSampler
from tensorrt_llm.logger import logger


def create_py_executor(
    config: ExecutorConfig,
    receive: Callable[[bool], list[Incoming]],
    send: Callable[[list[Outgoing]], None],
) -> PyExecutor:
    """Load, allocate and warm up; the process group of `config.mapping` must have been joined
    before.

    Args:
        receive, send: rank 0's way to the outside, see `PyExecutor`.

    Raises:
        ValueError: a config that the model or the memory cannot hold, with both numbers; a required
            target that there is not.
    """
    first = config.mapping.rank == 0
    model_config = _model_config(config)
    target = modeling_v2_resolve(model_config, config)
    model_config = replace(model_config, modeling_v2_target=target)
    model = load_model(config.model, model_config, load_format=config.load_format, progress=first)
    max_seq_len, cache = _create_kv_cache(config, model_config)
    if first:
        logger.info("%s", cache.report())
    engine = PyTorchModelEngine(model, cache, config, model.create_spec_worker())
    engine.warmup(progress=first)
    return PyExecutor(
        config,
        engine,
        cache,
        TorchSampler(),
        eos_token_ids(config.model),
        max_seq_len,
        model_config.pretrained_config.vocab_size,
        receive,
        send,
    )


def _model_config(config: ExecutorConfig) -> ModelConfig:
    if config.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device(config.device)
    return ModelConfig(
        pretrained_config=PretrainedConfig.from_directory(config.model),
        mapping=config.mapping,
        dtype=getattr(torch, config.dtype),
        device=device,
        kv_cache_fp8=config.kv_cache_dtype == "fp8",
        latent_norm_eps=config.latent_norm_eps,
        max_draft_len=config.max_draft_len,
        quant_config=QuantConfig.from_directory(config.model),
    )


def _create_kv_cache(
    config: ExecutorConfig, model_config: ModelConfig
) -> tuple[int, KVCacheManagerV2]:
    """The pools, and the longest sequence that model and pools allow."""
    buffers = _buffers(model_config)
    wanted = _wanted_seq_len(config, model_config.pretrained_config.max_position_embeddings)
    blocks = _num_blocks(config, model_config, buffers, wanted)
    room = blocks * config.tokens_per_block
    if room < wanted:
        logger.warning(
            "max_seq_len is %d instead of %d: the KV cache holds %d tokens", room, wanted, room
        )
    max_seq_len = min(wanted, room)
    manager = KVCacheManagerV2(
        buffers=buffers,
        tokens_per_block=config.tokens_per_block,
        max_seq_len=max_seq_len,
        max_batch_size=config.max_batch_size,
        num_blocks={b.role: blocks for b in buffers},
        device=model_config.device,
    )
    return max_seq_len, manager


def _buffers(model_config: ModelConfig) -> list[BufferConfig]:
    """Latents for every layer, index keys for those that own an indexer, as the MTP layer does."""
    model, layout = model_config.pretrained_config, model_config.cache_layout
    layers = range(model.num_hidden_layers + (model_config.max_draft_len > 0))
    owns = {**dict.fromkeys(layers, True), **dict(enumerate(model.full_indexer_layers))}
    full = tuple(layer for layer in layers if owns[layer])
    return [
        BufferConfig(Role.KEY, tuple(layers), layout.key_bytes),
        BufferConfig(Role.INDEX_KEY, full, layout.index_key_bytes),
    ]


def _wanted_seq_len(config: ExecutorConfig, max_position_embeddings: int) -> int:
    if config.max_seq_len is None:
        return max_position_embeddings
    if config.max_seq_len > max_position_embeddings:
        raise ValueError(
            f"max_seq_len is {config.max_seq_len}, but the model's max_position_embeddings is "
            f"{max_position_embeddings}"
        )
    return config.max_seq_len


def _num_blocks(
    config: ExecutorConfig, model_config: ModelConfig, buffers: list[BufferConfig], max_seq_len: int
) -> int:
    """Blocks of each pool: what was asked for, else what memory allows, never more than can be
    used."""
    useful = config.max_batch_size * -(-max_seq_len // config.tokens_per_block)
    if config.kv_cache_max_tokens is not None:
        return min(useful, -(-config.kv_cache_max_tokens // config.tokens_per_block))
    if config.device != "cuda":
        raise ValueError("kv_cache_max_tokens is None; on the CPU the pools need a given size")
    free, _ = torch.cuda.mem_get_info(model_config.device)
    fitting = num_blocks_for_memory(
        buffers, config.tokens_per_block, int(free * config.free_gpu_memory_fraction)
    )
    return min_over_ranks(min(useful, fitting[Role.KEY]), config.mapping)
