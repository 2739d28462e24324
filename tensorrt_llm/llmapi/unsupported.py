"""TensorRT-LLM's arguments that this project does not have, and their values that change nothing.

A key of these tables is accepted with one of its neutral values (what this project does anyway) and
refused with any other one.
"""

from typing import Any

# name -> the values under which it asks for nothing that is not here
Neutral = dict[str, tuple[Any, ...]]

OFF = (None, False)

LLM_ARGS: Neutral = {
    # One backend, one kind of parallelism, one model family.
    "backend": ("pytorch",),
    "orchestrator_type": (None, "rpc"),
    "pipeline_parallel_size": (1,),
    "context_parallel_size": (1,),
    "moe_cluster_parallel_size": (None, -1, 1),
    "moe_tensor_parallel_size": (None, -1),
    "moe_expert_parallel_size": (None, -1, 1),
    "cp_config": (None, {}),
    "pp_partition": (None,),
    "enable_attention_dp": OFF,
    "attention_dp_config": (None,),
    "enable_lm_head_tp_in_adp": OFF,
    "allreduce_strategy": (None, "AUTO"),
    # Requests and sampling.
    "max_input_len": (None,),
    "max_beam_width": (None, 1),
    "sampler_type": ("auto", "TorchSampler"),
    "enable_in_graph_sampling": OFF,
    "guided_decoding_backend": (None,),
    "scheduler_config": (None,),
    "peft_cache_config": (None,),
    "enable_lora": OFF,
    "lora_config": (None,),
    "batch_wait_timeout_ms": (0,),
    "batch_wait_timeout_iters": (0,),
    "batch_wait_max_tokens_ratio": (0,),
    "stream_interval": (1,),
    "gather_generation_logits": OFF,
    "num_postprocess_workers": (0,),
    "postprocess_tokenizer_dir": (None,),
    "reasoning_parser": (None,),
    "enable_early_first_token_response": OFF,
    # Disaggregation and attention.
    "cache_transceiver_config": (None,),
    "sparse_attention_config": (None, {"algorithm": "dsa"}),
    # Kernels and graphs.
    "moe_config": (None, {}, {"backend": "AUTO"}),
    "nvfp4_gemm_config": (None, {}),
    "quant_config": (None,),
    "torch_compile_config": (None,),
    "prefill_cuda_graph_backend": (None, "disabled"),
    "prefill_capture_num_tokens": (None,),
    "enable_autotuner": OFF,
    "enable_mla_skip_correction": OFF,
    # Loading.
    "trust_remote_code": OFF,
    "revision": (None,),
    "tokenizer_revision": (None,),
    "tokenizer_mode": (None, "auto"),
    "custom_tokenizer": (None,),
    "checkpoint_format": (None, "HF"),
    "checkpoint_loader": (None,),
    "model_kwargs": (None, {}),
    "env_overrides": (None, {}),
    # Reports.
    "print_iter_log": OFF,
    "enable_iter_req_stats": OFF,
    "iter_perf_stats_interval": (1,),
    "return_perf_metrics": OFF,
    "perf_metrics_max_requests": (None, 0),
    "perf_metrics_output_dir": (None,),
    "per_request_spec_decode_stats": OFF,
    "enable_energy_metrics": OFF,
    "otlp_traces_endpoint": (None,),
    "telemetry_config": (None,),
}

KV_CACHE_CONFIG: Neutral = {
    "max_attention_window": (None,),
    "sink_token_length": (None,),
    "host_cache_size": (None, 0),
    "disk_cache_size": (None, 0),
    "disk_cache_path": (None,),
    "use_kv_cache_manager_v2": (True, "auto"),
    "enable_partial_reuse": OFF,
    "copy_on_partial_reuse": OFF,
    "block_reuse_config": (None,),
    "event_buffer_max_size": (0,),
    "max_gpu_total_bytes": (None, 0),
    "max_util_for_resume": (None, 0.95),
    "pool_ratio": (None,),
    "avg_seq_len": (None,),
    "enable_kv_pool_rebalance": OFF,
    "fp8_context_mla_kv_len_cap": (None,),
    "enable_swa_scratch_reuse": OFF,
}

SPECULATIVE_CONFIG: Neutral = {
    "max_total_draft_tokens": (None,),
    "draft_len_schedule": (None,),
    "max_concurrency": (None,),
    "acceptance_rate_threshold": (None,),
    "acceptance_rate_window_size": (None,),
    "load_format": (None,),
    "speculative_model": (None,),
    "speculative_model_dir": (None,),
    "speculative_model_subfolder": (None,),
    "allow_advanced_sampling": (None, True),
    "use_relaxed_acceptance_for_thinking": OFF,
    "relaxed_topk": (1,),
    "relaxed_delta": (0.0, 0),
    "use_mtp_vanilla": OFF,
    "mtp_eagle_one_model": (None, True),
}

CUDA_GRAPH_CONFIG: Neutral = {
    "mode": (None, "decode"),
    "num_tokens": (None,),
    "max_num_token": (None,),
    "seq_lens": (None,),
    "max_seq_len": (None,),
}
