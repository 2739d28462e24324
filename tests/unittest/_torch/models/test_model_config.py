"""config.json of real checkpoints, and what the model must not accept silently in one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorrt_llm._torch.models.model_config import (
    FIXED_VALUES,
    ModelConfig,
    PretrainedConfig,
    eos_token_ids,
)
from tensorrt_llm.mapping import Mapping

GLM_5_2_FULL_LAYERS = [0, 1, 2, *range(6, 75, 4)]

# zai-org/GLM-5.2, but for the three lists that go by layer (78 entries each, added below).
GLM_5_2: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "num_hidden_layers": 78,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 256,
    "v_head_dim": 256,
    "head_dim": 192,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_router_dtype": "float32",
    "num_nextn_predict_layers": 1,
    "ep_size": 1,
    "pretraining_tp": 1,
    "use_cache": True,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_topk_pattern": None,
    "index_share_for_mtp_iteration": True,
    "indexer_rope_interleave": True,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "vocab_size": 154880,
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "transformers_version": "5.12.0",
    "indexer_types": ["full" if i in GLM_5_2_FULL_LAYERS else "shared" for i in range(78)],
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
}

# nvidia/GLM-5.2-NVFP4 says the same with a few fields more and less.
GLM_5_2_NVFP4: dict[str, Any] = {
    **{k: v for k, v in GLM_5_2.items() if k != "moe_router_dtype"},
    "bos_token_id": 0,
    "mlp_bias": False,
    "num_experts": 256,
    "layer_types": ["deepseek_sparse_attention"] * 78,
    "transformers_version": "5.11.0",
}

# GLM-5.1: a flat rope_theta, and an indexer on every layer.
GLM_5_1: dict[str, Any] = {
    **{
        name: value
        for name, value in GLM_5_2.items()
        if not name.startswith(("index_topk_", "index_s", "indexer_types", "rope_par", "mlp_layer"))
    },
    "rope_theta": 1000000,
    "max_position_embeddings": 202752,
}


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in GLM_5_2.items() if name not in names}


def test_glm_5_2(logged) -> None:
    config = PretrainedConfig.from_dict(GLM_5_2)
    for name in ("hidden_size", "vocab_size", "index_topk", "routed_scaling_factor"):
        assert getattr(config, name) == GLM_5_2[name]
    assert config.rope_theta == 8e6
    assert [i for i, full in enumerate(config.full_indexer_layers) if full] == GLM_5_2_FULL_LAYERS
    assert [i for i, dense in enumerate(config.dense_layers) if dense] == [0, 1, 2]
    assert config.dsa_params.index_n_heads == 32
    assert config.index_share_for_mtp_iteration is True
    assert not logged.records  # it says everything


def test_the_nvfp4_export_is_the_same_model_with_a_logged_router_dtype(logged) -> None:
    assert PretrainedConfig.from_dict(GLM_5_2_NVFP4) == PretrainedConfig.from_dict(GLM_5_2)
    assert [r.getMessage() for r in logged.records] == [
        "config.json does not say, so these hold: moe_router_dtype = 'float32'"
    ]


def test_glm_5_1_has_an_indexer_on_every_layer(logged) -> None:
    config = PretrainedConfig.from_dict(GLM_5_1)
    assert all(config.full_indexer_layers)
    assert [i for i, dense in enumerate(config.dense_layers) if dense] == [0, 1, 2]
    assert config.rope_theta == 1e6
    assert config.index_share_for_mtp_iteration is False
    [record] = logged.records
    for told in ("index_topk_freq = 1", "index_skip_topk_offset = 2"):
        assert told in record.getMessage()


@pytest.mark.parametrize(
    "name", ["index_topk_freq", "moe_router_dtype", "num_nextn_predict_layers"]
)
def test_null_means_the_same_as_absent(name, logged) -> None:
    """transformers writes null for what it does not know."""
    null = {**without("indexer_types"), name: None}
    assert PretrainedConfig.from_dict(null) == PretrainedConfig.from_dict(
        without("indexer_types", name)
    )
    assert all(f"{name} = " in record.getMessage() for record in logged.records)


@pytest.mark.parametrize(
    "name",
    [
        *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "vocab_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
        *("qk_rope_head_dim", "v_head_dim", "n_routed_experts", "n_shared_experts"),
        *("num_experts_per_tok", "routed_scaling_factor", "rms_norm_eps"),
        *("max_position_embeddings", "index_n_heads", "index_head_dim", "index_topk"),
    ],
)
@pytest.mark.parametrize("absent", [True, False], ids=["absent", "null"])
def test_a_missing_field_is_named(name, absent) -> None:
    raw = without(name) if absent else {**GLM_5_2, name: None}
    with pytest.raises(ValueError, match=f"lacks '{name}'"):
        PretrainedConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("n_group", 8),
        ("topk_group", 4),
        ("moe_layer_freq", 2),
        ("tie_word_embeddings", True),
        ("rope_interleave", False),
        ("indexer_rope_interleave", False),
    ],
)
def test_a_value_that_the_model_does_not_do_is_an_error(name, value) -> None:
    with pytest.raises(ValueError, match=rf"{name} = {value!r}; the model is written for"):
        PretrainedConfig.from_dict({**GLM_5_2, name: value})


def test_every_fixed_value_has_such_a_case() -> None:
    [mark] = test_a_value_that_the_model_does_not_do_is_an_error.pytestmark
    assert {name for name, _ in mark.args[1]} == set(FIXED_VALUES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["DeepseekV3ForCausalLM"]},
            r"\['DeepseekV3ForCausalLM'\]; this project",
        ),
        ({"architectures": None}, r"architectures is None"),
        (
            {"moe_router_dtype": "bfloat16"},
            r"moe_router_dtype is 'bfloat16'; the router is float32",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, r"rope_type is 'yarn'"),
        (
            {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "yarn"}},
            r"rope_type is 'yarn'",
        ),
        ({"rope_parameters": {"rope_type": "default"}}, r"lacks rope_parameters\.rope_theta"),
        ({"rope_parameters": None}, r"lacks rope_parameters\.rope_theta"),
        ({"mlp_layer_types": ["dense"] * 77}, r"needs 78 entries of 'dense' or 'sparse'"),
        ({"mlp_layer_types": ["dense"] * 77 + ["moe"]}, r"needs 78 entries"),
        (
            {"mlp_layer_types": None, "first_k_dense_replace": None},
            r"lacks 'first_k_dense_replace'",
        ),
        ({"indexer_types": ["shared"] + ["full"] * 77}, r"layer 0 is marked as a shared"),
        ({"indexer_types": ["full"] * 3}, r"indexer_types has 3 entries; num_hidden_layers is 78"),
        ({"indexer_types": None, "index_topk_freq": 0}, r"index_topk_freq is 0"),
    ],
)
def test_what_cannot_be_served_is_an_error(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        PretrainedConfig.from_dict({**GLM_5_2, **changes})


def test_dense_layers_by_count_or_by_list() -> None:
    by_count = PretrainedConfig.from_dict(
        {**without("mlp_layer_types"), "first_k_dense_replace": 5}
    )
    assert by_count.dense_layers == (True,) * 5 + (False,) * 73
    listed = {**GLM_5_2, "mlp_layer_types": ["sparse", "dense"] * 39}
    assert PretrainedConfig.from_dict(listed).dense_layers == (False, True) * 39


def test_a_directory_without_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist; .* no checkpoint"):
        PretrainedConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GLM_5_2))
    assert PretrainedConfig.from_directory(tmp_path).hidden_size == 6144


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 5}, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": [5]}, (7,)),
        ({"temperature": 1.0}, {"eos_token_id": [5, 6]}, (5, 6)),
        ({"eos_token_id": None}, {"eos_token_id": 5}, (5,)),
        (None, {"eos_token_id": 0}, (0,)),
        (None, {}, ()),
        ({}, None, ()),
    ],
)
def test_eos_ids_come_from_generation_config_first(generation, config, expected, tmp_path) -> None:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize(
    ("fp8", "key_bytes", "index_bytes"), [(False, 1152, 256), (True, 576, 132)]
)
def test_cache_bytes_and_latent_eps(fp8, key_bytes, index_bytes) -> None:
    def build(**given: Any) -> ModelConfig:
        return ModelConfig(
            pretrained_config=PretrainedConfig.from_dict(GLM_5_2),
            mapping=Mapping(),
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            kv_cache_fp8=fp8,
            **given,
        )

    layout = build().cache_layout
    assert (layout.key_bytes, layout.index_key_bytes) == (key_bytes, index_bytes)
    assert build().latent_eps == 1e-5
    assert build(latent_norm_eps=1e-6).latent_eps == 1e-6
