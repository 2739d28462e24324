"""Everything that modeling_v2 takes from the engine around it.

Targets are meant to run inside TensorRT-LLM's own tree too, where the engine is not this one. So a
name is listed here before it is used: where it is, what is read of it and what that means. Two
tests hold the list true: no code of this package imports or reads an engine name that is not on
it, and this project's engine provides every name that is.
"""

from dataclasses import dataclass
from typing import Any

TORCH = "tensorrt_llm._torch"


@dataclass(frozen=True)
class Entry:
    """One engine name.

    Args:
        module, name: `from module import name`.
        meaning: what it is, or who sets the fields.
        fields: attributes and methods that are read; of a function none.
        receivers: the variable names that such an object goes by in this package; what is read
            of a variable of that name must be one of `fields`.
        ours: TensorRT-LLM lacks this, or has it elsewhere; laying a target over its tree means
            bringing these along.
    """

    module: str
    name: str
    meaning: str
    fields: tuple[str, ...] = ()
    receivers: tuple[str, ...] = ()
    ours: bool = False


SURFACE = (
    Entry("tensorrt_llm.logger", "logger", "the logger", ("info",), ("logger",)),
    Entry(
        "tensorrt_llm.mapping",
        "Mapping",
        "the rank's place in the parallel layout; set when the ranks start",
        (
            "rank",
            "tp_rank",
            "world_size",
            "tp_size",
            "moe_ep_size",
            "moe_cluster_size",
            "enable_attention_dp",
        ),
        ("mapping",),
    ),
    Entry(
        f"{TORCH}.models.model_config",
        "ModelConfig",
        "what a model is built from; complete before routing",
        ("pretrained_config", "mapping", "quant_config", "spec_config"),
        ("model_config",),
    ),
    Entry(
        f"{TORCH}.models.model_config",
        "ModelConfig",
        "the device that the model is built on",
        ("device",),
        ("model_config",),
        ours=True,
    ),
    Entry(
        f"{TORCH}.models.model_config",
        "PretrainedConfig",
        "config.json under the hub's names (in TensorRT-LLM it is transformers' class)",
        (
            "architectures",
            "num_hidden_layers",
            "hidden_size",
            "n_routed_experts",
            "q_lora_rank",
            "num_attention_heads",
            "moe_intermediate_size",
            "intermediate_size",
            "vocab_size",
            "index_share_for_mtp_iteration",
        ),
        ("pretrained_config",),
    ),
    Entry(
        f"{TORCH}.models.model_config",
        "PretrainedConfig",
        "read from a checkpoint directory, for `explain`",
        ("from_directory",),
        ours=True,
    ),
    Entry(
        f"{TORCH}.models.model_config",
        "QuantConfig",
        'the checkpoint\'s quantisation; quant_algo "NVFP4", "FP8_BLOCK_SCALES" or None',
        ("quant_algo",),
        ("quant_config",),
    ),
    Entry(
        f"{TORCH}.models.model_config",
        "QuantConfig",
        "read from a checkpoint directory, for `explain`",
        ("from_directory",),
        ours=True,
    ),
    Entry(
        f"{TORCH}.speculative.interface",
        "SpecConfig",
        "the drafting (in TensorRT-LLM the speculative_config of the LLM arguments)",
        ("spec_dec_mode", "max_draft_len"),
        ("spec_config",),
    ),
    Entry(
        f"{TORCH}.speculative.interface",
        "SpeculativeDecodingMode",
        "kinds of drafting",
        ("MTP", "MTP_EAGLE_ONE_MODEL", "NGRAM"),
    ),
    *(
        Entry(f"{TORCH}.speculative.{module}", name, meaning)
        for module, name, meaning in (
            ("interface", "SpecMetadata", "the step's facts for a worker"),
            ("interface", "SpecWorkerBase", "what accepts and drafts after the model"),
            ("mtp", "MTPEagleWorker", "the built-in draft loop, base of the target's worker"),
        )
    ),
    Entry(
        f"{TORCH}.speculative.interface", "SpecOutputs", "what a step with drafts gives", ours=True
    ),
    Entry(
        f"{TORCH}.attention.backends.sparse.dsa.metadata",
        "DSAtrtllmAttentionMetadata",
        "the step's tables; the model engine sets them before each forward",
        (
            "num_contexts",
            "num_seqs",
            "num_tokens",
            "block_table",
            "kv_lens_cuda",
            "kv_cache_manager",
            "skip_indexer_for_gen_reqs",
        ),
        ("md", "attn_metadata"),
    ),
    Entry(
        f"{TORCH}.attention.backends.sparse.dsa.metadata",
        "DSAtrtllmAttentionMetadata",
        "positions, slots and pool views of the step; kv_limits_cuda says how far drafts may go",
        (
            "position_ids",
            "kv_limits_cuda",
            "index_block",
            "index_offset",
            "generation_index_table",
            "key_rows",
            "key_rows_per_block",
        ),
        ours=True,
    ),
    Entry(
        f"{TORCH}.pyexecutor.kv_cache.kv_cache_manager_v2",
        "KVCacheManagerV2",
        "the pools; another one after the executor's memory profiling, so asked at each use",
        ("tokens_per_block",),
        ("kv_cache_manager", "manager"),
    ),
    Entry(
        f"{TORCH}.pyexecutor.kv_cache.kv_cache_manager_v2",
        "KVCacheManagerV2",
        "the bytes of a pool, and a layer's place in its blocks",
        ("pool", "layer_slot"),
        ours=True,
    ),
    Entry(
        f"{TORCH}.attention.backends.sparse.dsa.cache_manager",
        "INDEX_KEY",
        "role of the index keys' pool",
        ours=True,
    ),
    Entry(
        f"{TORCH}.attention.backends.sparse.dsa.indexer",
        "dense_rows",
        "the selection of rows that take all their keys",
        ours=True,
    ),
    Entry(
        f"{TORCH}.attention.backends.sparse.dsa.cache_manager",
        "DSACacheLayout",
        "where index keys and their scales lie in a page, and their writer",
        ("write_index_pool", "index_key_bytes", "key_dtype"),
        ("layout",),
        ours=True,
    ),
    Entry(
        f"{TORCH}.attention.backends.sparse.dsa.indexer",
        "KEY_NORM_EPS",
        "eps of the index keys' norm",
        ours=True,
    ),
    Entry(
        f"{TORCH}.attention.backends.sparse.dsa.indexer",
        "Indexer",
        "a full layer's indexer; operands are derived from its weights",
        ("params", "k_norm", "wq_b", "weight_scale"),
    ),
    Entry(
        f"{TORCH}.modules.mla",
        "MLA",
        "a layer's attention; fused_a has the indexer's rows behind its own",
        (
            "fused_a",
            "indexer",
            "kv_a_layernorm",
            "nope",
            "num_heads",
            "o_proj",
            "q_a_layernorm",
            "q_b_proj",
            "q_lora_rank",
            "rope",
            "w_uk",
            "w_uv",
        ),
    ),
    Entry(
        f"{TORCH}.modules.fused_moe",
        "FusedMoE",
        "this rank's slice of all routed experts",
        ("down", "gate_up", "intermediate_size", "part"),
    ),
    Entry(
        f"{TORCH}.modules.gated_mlp",
        "GatedMLP",
        "this rank's slice of a dense MLP or of the shared expert",
        ("gate_up_proj", "down_proj"),
    ),
    Entry(
        f"{TORCH}.models.modeling_deepseekv3",
        "Deepseekv3MoE",
        "router, routed and shared experts of a layer",
        ("gate", "experts", "shared_experts"),
    ),
    Entry(
        f"{TORCH}.models.modeling_deepseekv3",
        "DeepseekV3DecoderLayer",
        "a layer",
        ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    ),
    Entry(
        f"{TORCH}.models.modeling_deepseekv3",
        "DeepseekV3Model",
        "the built-in trunk; its forward is the fallback",
        ("forward",),
    ),
    Entry(
        f"{TORCH}.models.modeling_deepseekv3",
        "DeepseekV3MTP",
        "the MTP layer: a decoder layer and what stands around it",
        ("block", "eh_proj", "enorm", "hnorm", "shared_head_norm"),
    ),
    Entry(
        f"{TORCH}.models.modeling_deepseekv3",
        "GlmMoeDsaForCausalLM",
        "the built-in model, loaded",
        ("config", "draft_model", "lm_head", "model"),
    ),
    *(
        Entry(f"{TORCH}.{module}", name, meaning)
        for module, name, meaning in (
            ("models.modeling_utils", "register_auto_model", "gives a model class its name"),
            ("modules.embedding", "LMHead", "this rank's vocabulary shard"),
            ("modules.logits_processor", "LogitsProcessor", "which rows get logits"),
        )
    ),
    Entry(
        f"{TORCH}.models.checkpoints.reader",
        "CheckpointReader",
        "the checkpoint's files; for NVFP4 experts as they are stored",
        ("read", "tensors"),
        ours=True,
    ),
    Entry(f"{TORCH}.models.checkpoints.reader", "Range", "rows or columns of a tensor", ours=True),
    Entry(
        f"{TORCH}.models.checkpoints.quantization",
        "nvfp4_part_problem",
        "what is wrong with a part of an NVFP4 tensor",
        ours=True,
    ),
    Entry(
        f"{TORCH}.distributed",
        "LamportWorkspace",
        "three buffers that ranks exchange rows through; made by `lamport_workspace`",
        ("at", "exchange", "publish", "rank", "world_size_of", "descriptor"),
        ours=True,
    ),
    Entry(
        f"{TORCH}.distributed",
        "Payload",
        "what a workspace carries, and so its empty word",
        ("SUM", "EXCHANGE"),
        ours=True,
    ),
    *(
        Entry(f"{TORCH}.distributed", name, meaning, ours=True)
        for name, meaning in (
            ("allgather", "shards of all ranks, one behind the other"),
            ("joined_ranks", "this rank and how many there are"),
            ("lamport_workspace", "makes a workspace, or finds the tag's"),
        )
    ),
    *(
        Entry(f"{TORCH}.{module}", name, meaning, ours=True)
        for module, name, meaning in (
            ("custom_ops.cache_ops", "scatter_rows", "writes rows of a pool"),
            ("custom_ops.fp4", "NVFP4_GROUP", "codes that share a scale"),
            ("custom_ops.fp4", "quantize_nvfp4", "e2m1 codes and their block scales"),
            ("custom_ops.fp4", "dequantize_nvfp4", "the values of those"),
            ("custom_ops.fp8", "QUANT_BLOCK", "channels that share a scale"),
            ("custom_ops.fp8", "quantize_e4m3_ue8m0", "e4m3 with power-of-two scales"),
            ("custom_ops.fp8", "saturating_cast", "e4m3 at unit scale"),
            ("custom_ops.paged_mqa_logits", "check_paged_mqa_logits", "what it refuses"),
            ("custom_ops.paged_mqa_logits", "paged_mqa_logits", "index scores of paged keys"),
            ("custom_ops.paged_mqa_logits", "paged_mqa_logits_schedule", "its processors' shares"),
            ("custom_ops.paged_mqa_logits", "paged_mqa_logits_processors", "how many those are"),
            ("custom_ops.sparse_mla", "gather_rows", "reads rows of a pool"),
            ("modules.rotary_embedding", "apply_rotary", "rotates interleaved pairs in fp32"),
            ("speculative.mtp_tail_trim", "check_argmax_pack", "what it refuses"),
            ("speculative.mtp_tail_trim", "local_argmax_pack", "its kernel"),
            ("speculative.mtp_tail_trim", "torch_argmax_pack", "the same by torch"),
            ("speculative.forced_acceptance", "POOL_SIZE", "numbers that fractions draw from"),
            ("speculative.forced_acceptance", "STEP_STRIDE", "the counter's factor in a draw"),
            ("speculative.forced_acceptance", "SLOT_STRIDE", "the slot's factor in a draw"),
        )
    ),
)


def fields_of(name: str) -> tuple[str, ...]:
    """All listed fields of an engine class."""
    return tuple(field for entry in SURFACE if entry.name == name for field in entry.fields)


def missing_fields(name: str, value: Any) -> list[str]:
    """The listed fields of engine class `name` that `value` does not have."""
    return [field for field in fields_of(name) if not hasattr(value, field)]
