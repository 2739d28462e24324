"""Everything a rank process needs to know, resolved once by `LlmArgs` and never defaulted again
below it."""

from dataclasses import dataclass
from pathlib import Path

from tensorrt_llm.mapping import Mapping


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """Resolved engine configuration, the same on every rank but for `mapping.rank`.

    Args:
        model: checkpoint directory in the hub layout.
        device: "cpu" or "cuda".
        dtype: activation and weight dtype, "float32" | "bfloat16" | "float16".
        mapping: this rank's place.
        load_format: "auto" reads the checkpoint, "dummy" makes random weights on the device.
        latent_norm_eps: None takes `rms_norm_eps` for MLA's latent norms; transformers uses 1e-6.
        kv_cache_dtype: "auto" (the activation dtype) or "fp8" (e4m3 latents at unit scale, e4m3
            index keys).
        tokens_per_block: tokens in one page of every pool.
        kv_cache_max_tokens: bound on cached tokens per pool; None sizes the pools by memory.
        free_gpu_memory_fraction: share of the memory left after loading that the pools may take.
        max_batch_size: requests in one step.
        max_num_tokens: tokens in one step.
        max_seq_len: prompt plus generated tokens of one request; None takes the model's.
        max_draft_len: drafts per step with the checkpoint's MTP layer; 0 turns speculation off.
        use_rejection_sampling: requests that sample draw their drafts as well.
        enable_chunked_prefill: split prompts that do not fit into `max_num_tokens`.
        cuda_graph_batch_sizes: decode batch sizes to capture, ascending; empty turns graphs off.
        disable_overlap_scheduler: run the plain step loop.
        attn_backend: carried for the rooms that read it.
        modeling_v2: "off" | "auto" | "require", see `modeling_v2_resolve`.
        stop_tokenizer: directory of the tokenizer that stop strings are matched with; None refuses
            them.
        num_threads: CPU threads of one rank; None leaves torch's choice divided by the ranks of
            the host.
        iter_perf_stats: collect per-step statistics.
    """

    model: Path
    device: str
    dtype: str
    mapping: Mapping
    load_format: str
    latent_norm_eps: float | None
    kv_cache_dtype: str
    tokens_per_block: int
    kv_cache_max_tokens: int | None
    free_gpu_memory_fraction: float
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int | None
    max_draft_len: int
    use_rejection_sampling: bool
    enable_chunked_prefill: bool
    cuda_graph_batch_sizes: tuple[int, ...]
    disable_overlap_scheduler: bool
    attn_backend: str
    modeling_v2: str
    stop_tokenizer: Path | None
    num_threads: int | None
    iter_perf_stats: bool
