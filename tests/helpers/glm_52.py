"""GLM-5.2's config.json, as the hub has it, for what needs no weights."""

import json
from pathlib import Path
from typing import Any

from helpers.glm_oracle import hub_config

GLM_52: dict[str, Any] = {
    "num_hidden_layers": 78,
    "hidden_size": 6144,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 256,
    "v_head_dim": 256,
    "head_dim": 192,
    "num_attention_heads": 64,
    "moe_intermediate_size": 2048,
    "intermediate_size": 12288,
    "vocab_size": 154880,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_share_for_mtp_iteration": True,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1048576,
}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}


def glm_52_config(**changes: Any) -> dict[str, Any]:
    """nvidia/GLM-5.2-NVFP4's, with other values."""
    return {**hub_config({**GLM_52, **changes}), "quantization_config": NVFP4}


def glm_52_checkpoint(directory: Path, **changes: Any) -> Path:
    """A directory with that config.json alone."""
    (directory / "config.json").write_text(json.dumps(glm_52_config(**changes)))
    return directory
