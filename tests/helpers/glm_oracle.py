"""Small random GLM-MoE-DSA checkpoints, and transformers' own model as the oracle for them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

TRANSFORMERS_LATENT_EPS = 1e-6

BASE: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "attention_bias": False,
    "dtype": "float32",
    "eos_token_id": [252, 253],
    "pad_token_id": 252,
    "first_k_dense_replace": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "index_head_dim": 32,
    "index_n_heads": 16,
    "index_topk": 8,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "indexer_rope_interleave": True,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 40,
    "v_head_dim": 32,
    "head_dim": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": 256,
}

# Layer patterns like GLM-5.2's and unlike them.
VARIANTS: dict[str, dict[str, Any]] = {
    "glm52": {},
    "odd_pattern": {
        "num_hidden_layers": 7,
        "indexer_types": ["full", "shared", "full", "shared", "shared", "full", "full"],
    },
    "every_layer_full": {"num_hidden_layers": 4, "index_topk_freq": 1, "index_skip_topk_offset": 2},
    "one_dense_layer": {
        "num_hidden_layers": 5,
        "first_k_dense_replace": 1,
        "num_attention_heads": 8,
        "index_topk": 12,
    },
    "topk_above_context": {"num_hidden_layers": 5, "index_topk": 256},
}


# A model of two layers, one of each kind, and an MTP layer: many engines in little time.
SMALL_WITH_MTP: dict[str, Any] = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "indexer_types": ["full", "shared"],
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": True,
}


def make_checkpoint(directory: Path, variant: str, seed: int, **overrides: Any) -> Path:
    """Write a random checkpoint in the hub layout and return its directory.

    Args:
        overrides: fields of config.json. `num_nextn_predict_layers` 1 adds an MTP layer.
    """
    config = hub_config({**VARIANTS[variant], **overrides})
    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**_with_mtp_block(config))).eval()
    _randomise(model, seed)
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))
    path = directory / "model.safetensors"
    save_file({**load_file(path), **_mtp_head(config, seed)}, path, metadata={"format": "pt"})
    return directory


def make_drafts_agree(directory: Path, kept: float = 0.15) -> Path:
    """Change a random checkpoint so that about half of its drafts are right.

    The layers add less to the last token's embedding, and the MTP layer mostly passes on that of
    the token it is given; of a random model's drafts one in `vocab_size` would be right.

    Args:
        kept: of what each layer adds; the more layers, the less for the same share of right drafts.
    """
    config, path = _read_config(directory), directory / "model.safetensors"
    weights, hidden = load_file(path), config["hidden_size"]
    for name in weights:
        if _is_block_output(name):
            weights[name] *= kept
    mtp = f"model.layers.{config['num_hidden_layers']}"
    weights[f"{mtp}.eh_proj.weight"] *= 0.05
    weights[f"{mtp}.eh_proj.weight"][:, :hidden] += torch.eye(hidden)
    weights[f"{mtp}.shared_head.norm.weight"] = weights["model.norm.weight"].clone()
    save_file(weights, path, metadata={"format": "pt"})
    return directory


def with_config(source: Path, directory: Path, **overrides: Any) -> Path:
    """A checkpoint with the files of another one, but for some fields of config.json."""
    directory.mkdir()
    for file in source.iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps({**_read_config(source), **overrides}))
    return directory


def hub_config(overrides: dict[str, Any]) -> dict[str, Any]:
    """Config.json as the hub has it; the per-layer lists follow from the counts unless given."""
    config = {**BASE, **overrides}
    layers = config["num_hidden_layers"]
    freq, offset = config["index_topk_freq"], config["index_skip_topk_offset"]
    config.setdefault(
        "indexer_types",
        ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(layers)],
    )
    config["num_key_value_heads"] = config["num_attention_heads"]
    dense = config["first_k_dense_replace"]
    config["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    config["layer_types"] = ["deepseek_sparse_attention"] * layers
    return config


def load_oracle(directory: Path, dtype: torch.dtype = torch.float32) -> GlmMoeDsaForCausalLM:
    """transformers' model of a checkpoint, with eager attention."""
    return GlmMoeDsaForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def oracle_generate(model: GlmMoeDsaForCausalLM, prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy continuation, eos ignored."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # else a prompt token that equals the pad id is masked
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def oracle_forward(
    model: GlmMoeDsaForCausalLM, tokens: list[int]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """(logits [tokens, vocab], per layer output hidden states [tokens, hidden], per layer top-k
    [tokens, k])."""
    hidden: list[torch.Tensor] = []
    topk: list[torch.Tensor] = []
    hooks = []
    for layer in model.model.layers:
        hooks.append(
            layer.register_forward_hook(lambda _m, _a, out: hidden.append(_first(out)[0].clone()))
        )
        hooks.append(
            layer.self_attn.register_forward_hook(
                lambda _m, _a, out: topk.append(out[2][0].clone())
            )
        )
    try:
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return logits, hidden, topk


@torch.no_grad()
def oracle_final_hidden(model: GlmMoeDsaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Hidden states after the final norm [tokens, hidden]."""
    return model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]


def random_prompt(length: int, seed: int, vocab: int = 250) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()


def _read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def _with_mtp_block(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a backbone whose last layers are what the MTP layers are at their core."""
    extra = config["num_nextn_predict_layers"]
    return hub_config(
        {
            **config,
            "num_hidden_layers": config["num_hidden_layers"] + extra,
            "indexer_types": config["indexer_types"] + ["full"] * extra,
        }
    )


def _mtp_head(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """What an MTP layer has beside an ordinary one."""
    generator, size = torch.Generator().manual_seed(seed), config["hidden_size"]
    weights = {}
    for i in range(config["num_nextn_predict_layers"]):
        layer = f"model.layers.{config['num_hidden_layers'] + i}"
        for name in ("enorm", "hnorm", "shared_head.norm", "eh_proj"):
            shape = (size, 2 * size) if name == "eh_proj" else (size,)
            value = torch.randn(shape, generator=generator)
            weights[f"{layer}.{name}.weight"] = _scaled(name, value)
    return weights


def _is_block_output(name: str) -> bool:
    return name.endswith("o_proj.weight") or "down_proj" in name


def _first(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


def _randomise(module: torch.nn.Module, seed: int) -> None:
    """Every tensor non-trivial: norms around 1, biases non-zero, matrices scaled by their
    fan-in."""
    generator = torch.Generator().manual_seed(seed)
    named = dict(module.named_parameters())
    named |= {n: b for n, b in module.named_buffers() if n.endswith("e_score_correction_bias")}
    with torch.no_grad():
        for name in sorted(named):
            value = torch.randn(named[name].shape, generator=generator)
            named[name].copy_(_scaled(name, value))


def _scaled(name: str, value: torch.Tensor) -> torch.Tensor:
    if name.endswith("e_score_correction_bias"):
        return 6.94 + 0.06 * value  # the real range; bf16 would merge its values
    if name.endswith("bias"):
        return 0.3 * value
    if "norm" in name:
        return 1.0 + 0.2 * value
    if "embed_tokens" in name:
        return value
    gain = 1.5 if _is_block_output(name) else 1.0
    return gain * value / value.shape[-1] ** 0.5
