"""GLM-5.2 as one rank of sixteen sees it, as a model of its own with random weights."""

import json
from pathlib import Path
from typing import Any

from helpers.engine import executor_config
from helpers.glm_oracle import hub_config
from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig

# Per-rank shapes of GLM-5.2 at tp 16, as one rank of its own.
SLICE = {
    "hidden_size": 6144,
    "intermediate_size": 768,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 9680,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 256,
    "v_head_dim": 256,
    "head_dim": 192,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "num_hidden_layers": 8,
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": True,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 8192,
    "eos_token_id": [9000],
    "pad_token_id": 9000,
}


def slice_checkpoint(directory: Path) -> Path:
    """A directory with the config alone; weights are made up by `load_format: dummy`."""
    (directory / "config.json").write_text(json.dumps(hub_config(SLICE)))
    return directory


def slice_config(directory: Path, **overrides: Any) -> ExecutorConfig:
    """bf16 on one GPU, one request of up to 4096 tokens."""
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "load_format": "dummy",
        "tokens_per_block": 32,
        "kv_cache_max_tokens": 4096,
        "max_batch_size": 1,
        "max_num_tokens": 4096,
        "max_seq_len": 4096,
    }
    return executor_config(directory, **{**settings, **overrides})
