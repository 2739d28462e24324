"""A checkpoint's config.json, read strictly: what the model needs is there and is something this
model can do."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tensorrt_llm._torch.attention.backends.sparse.dsa.cache_manager import DSACacheLayout
from tensorrt_llm._torch.attention.backends.sparse.dsa.params import DSAParams, full_indexer_layers
from tensorrt_llm._torch.models.checkpoints.quantization import declared_format
from tensorrt_llm._torch.speculative.interface import SpecConfig, SpeculativeDecodingMode
from tensorrt_llm.logger import logger
from tensorrt_llm.mapping import Mapping

ARCHITECTURE = "GlmMoeDsaForCausalLM"

# Values that the model is written for; a config that says otherwise describes another model.
FIXED_VALUES: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
}

# What a config may leave out, and what it then means; each use is logged.
DEFAULTS: dict[str, Any] = {
    **FIXED_VALUES,
    "moe_router_dtype": "float32",
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
    "index_share_for_mtp_iteration": False,
}


# declared_format's names -> TensorRT-LLM's
QUANT_ALGOS = {"nvfp4": "NVFP4", "fp8": "FP8_BLOCK_SCALES", "none": None}


@dataclass(frozen=True, kw_only=True)
class PretrainedConfig:
    """The fields of config.json that the model reads; names are the hub's."""

    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_share_for_mtp_iteration: bool
    num_nextn_predict_layers: int
    dense_layers: tuple[bool, ...]
    full_indexer_layers: tuple[bool, ...]
    raw: dict[str, Any] = field(repr=False, compare=False)

    @classmethod
    def from_directory(cls, directory: Path) -> "PretrainedConfig":
        """Read `directory`/config.json; see `from_dict`."""
        path = directory / "config.json"
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist; {directory} is no checkpoint in the hub layout"
            )
        return cls.from_dict(json.loads(path.read_text()))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "PretrainedConfig":
        """Check and pick the fields of a parsed config.json.

        Raises:
            ValueError: another architecture, a needed field that is missing, or a value this model
                does not do.
        """
        if raw.get("architectures") != [ARCHITECTURE]:
            raise ValueError(
                f"architectures is {raw.get('architectures')}; "
                f"this project serves ['{ARCHITECTURE}']"
            )
        values = _with_defaults(raw)
        _check_fixed_values(values)
        layers = _needed(values, "num_hidden_layers")
        derived: dict[str, Any] = {
            "rope_theta": _rope_theta(values),
            "dense_layers": _dense_layers(values, layers),
            "full_indexer_layers": full_indexer_layers(
                layers,
                indexer_types=values.get("indexer_types"),
                pattern=values.get("index_topk_pattern"),
                freq=values["index_topk_freq"],
                offset=values["index_skip_topk_offset"],
            ),
            "raw": raw,
        }
        picked = {
            name: _needed(values, name) for name in cls.__dataclass_fields__ if name not in derived
        }
        return cls(**picked, **derived)

    @property
    def architectures(self) -> list[str]:
        return self.raw["architectures"]

    @property
    def dsa_params(self) -> DSAParams:
        return DSAParams(self.index_n_heads, self.index_head_dim, self.index_topk)


@dataclass(frozen=True)
class QuantConfig:
    """How the checkpoint's quantised tensors are stored: TensorRT-LLM's name, None for none."""

    quant_algo: str | None = None

    @classmethod
    def from_directory(cls, directory: Path) -> "QuantConfig":
        """As config.json and hf_quant_config.json declare it; see `declared_format`."""
        files = (directory / name for name in ("config.json", "hf_quant_config.json"))
        config, extra = (json.loads(f.read_text()) if f.is_file() else {} for f in files)
        return cls(QUANT_ALGOS[declared_format(config, extra)])


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that building the model needs.

    Args:
        latent_norm_eps: eps of the norms of q_a and kv_a; None takes rms_norm_eps, as production
            engines do. transformers builds them with 1e-6.
        kv_cache_fp8: e4m3 latents and index keys.
        max_draft_len: drafts per step with the MTP layer; 0 leaves that layer out.
        quant_config: the checkpoint's storage.
        modeling_v2_target: name of the registered class that modeling_v2 chose; None builds the
            architecture's own.

    Raises:
        ValueError: drafting without an MTP layer in the checkpoint.
    """

    pretrained_config: PretrainedConfig
    mapping: Mapping
    dtype: torch.dtype
    device: torch.device
    kv_cache_fp8: bool = False
    latent_norm_eps: float | None = None
    max_draft_len: int = 0
    quant_config: QuantConfig = field(default_factory=QuantConfig)
    modeling_v2_target: str | None = None

    def __post_init__(self) -> None:
        if self.max_draft_len and not self.pretrained_config.num_nextn_predict_layers:
            raise ValueError(
                f"max_draft_len is {self.max_draft_len}, but the checkpoint has no MTP layer "
                "(num_nextn_predict_layers is 0)"
            )

    @property
    def latent_eps(self) -> float:
        eps = self.latent_norm_eps
        return self.pretrained_config.rms_norm_eps if eps is None else eps

    @property
    def spec_config(self) -> SpecConfig | None:
        """The one kind of drafting that the engine runs, None without drafts."""
        if not self.max_draft_len:
            return None
        return SpecConfig(SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL, self.max_draft_len)

    @property
    def cache_layout(self) -> DSACacheLayout:
        config = self.pretrained_config
        width = config.kv_lora_rank + config.qk_rope_head_dim
        return DSACacheLayout(width, config.index_head_dim, self.dtype, self.kv_cache_fp8)


def _with_defaults(raw: dict[str, Any]) -> dict[str, Any]:
    absent = {name: value for name, value in DEFAULTS.items() if raw.get(name) is None}
    if absent:
        told = ", ".join(f"{name} = {value!r}" for name, value in absent.items())
        logger.info("config.json does not say, so these hold: %s", told)
    return {**raw, **absent}


def _check_fixed_values(values: dict[str, Any]) -> None:
    for name, expected in FIXED_VALUES.items():
        if values[name] != expected:
            raise ValueError(
                f"config.json has {name} = {values[name]!r}; the model is written for {expected!r}"
            )
    if values["moe_router_dtype"] != "float32":
        raise ValueError(
            f"moe_router_dtype is {values['moe_router_dtype']!r}; the router is float32"
        )


def _needed(values: dict[str, Any], name: str) -> Any:
    if values.get(name) is None:
        raise ValueError(f"config.json lacks {name!r}, which the model needs")
    return values[name]


def _rope_theta(values: dict[str, Any]) -> float:
    """From rope_parameters, or the older flat rope_theta. There is no default: 1e4 would be
    silently wrong."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))  # "type" is the older name
    if kind != "default":
        raise ValueError(f"rope_type is {kind!r}; only 'default' (no scaling) is served")
    theta = rope.get("rope_theta", values.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json lacks rope_parameters.rope_theta, which the model needs")
    return float(theta)


def _dense_layers(values: dict[str, Any], layers: int) -> tuple[bool, ...]:
    types = values.get("mlp_layer_types")
    if types is None:
        first = _needed(values, "first_k_dense_replace")
        return tuple(i < first for i in range(layers))
    if len(types) != layers or set(types) - {"dense", "sparse"}:
        raise ValueError(
            f"mlp_layer_types is {types}; it needs {layers} entries of 'dense' or 'sparse'"
        )
    return tuple(kind == "dense" for kind in types)


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """The ids that end an answer: generation_config.json's, else config.json's, as transformers
    has it."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()
