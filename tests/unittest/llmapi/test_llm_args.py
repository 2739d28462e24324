"""Arguments: what is accepted, what is refused and how, and what they resolve to."""

import json
from pathlib import Path
from typing import Any

import pytest

from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig, LlmArgs, llm_args_from_cli_and_yaml
from tensorrt_llm.llmapi.strict_model import StrictModel
from tensorrt_llm.mapping import Mapping


def cpu_args(model: Path, **args: Any) -> LlmArgs:
    return LlmArgs.create({"model": model, "device": "cpu", **args})


def copy_of(checkpoint: Path, directory: Path, **changes: Any) -> Path:
    """A checkpoint directory with only a config.json, in which None removes a key."""
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_batchsize": 4}, "unknown key 'max_batchsize'; did you mean 'max_batch_size'?"),
        ({"tp_size": 4}, "unknown key 'tp_size'"),
        (
            {"kv_cache_config": {"free_gpu_memory_fracton": 0.5}},
            "kv_cache_config: unknown key 'free_gpu_memory_fracton'; "
            "did you mean 'free_gpu_memory_fraction'?",
        ),
        (
            {"enable_attention_dp": True},
            "TensorRT-LLM's 'enable_attention_dp' is not supported by this project yet: "
            "it is True, and only None or False is accepted",
        ),
        (
            {"speculative_config": {"decoding_type": "NGram"}},
            "speculative_config.decoding_type is 'NGram'",
        ),
        (
            {
                "speculative_config": {
                    "decoding_type": "MTP",
                    "max_draft_len": 3,
                    "num_nextn_predict_layers": 2,
                }
            },
            "max_draft_len 3 and num_nextn_predict_layers 2 mean the same",
        ),
        (
            {"speculative_config": {"decoding_type": "MTP", "use_rejection_sampling": "yes"}},
            "speculative_config.use_rejection_sampling is 'yes'; input should be a valid boolean",
        ),
        (
            {"speculative_config": {"decoding_type": "MTP", "relaxed_topk": 3}},
            "'relaxed_topk' is not supported",
        ),
        ({"pipeline_parallel_size": 2}, "it is 2, and only 1 is accepted"),
        ({"pipeline_parallel_size": True}, "it is True, and only 1 is accepted"),
        (
            {"cuda_graph_config": {"seq_lens": [1]}},
            "cuda_graph_config: TensorRT-LLM's 'seq_lens' is not supported",
        ),
        ({"max_batch_size": "4"}, "max_batch_size is '4'; input should be a valid integer"),
        ({"max_batch_size": True}, "max_batch_size is True; input should be a valid integer"),
        ({"max_batch_size": 4.0}, "max_batch_size is 4.0; input should be a valid integer"),
        ({"max_num_tokens": 0}, "max_num_tokens is 0; input should be greater than 0"),
        (
            {"enable_chunked_prefill": 1},
            "enable_chunked_prefill is 1; input should be a valid bool",
        ),
        (
            {"kv_cache_config": {"dtype": "nvfp4"}},
            "kv_cache_config.dtype is 'nvfp4'; input should be",
        ),
        ({"kv_cache_config": 5}, "kv_cache_config is 5; input should be a valid dictionary"),
        (
            {"kv_cache_config": {"enable_block_reuse": True}},
            "kv_cache_config.enable_block_reuse: True is not supported",
        ),
        ({"dtype": "int8"}, "dtype is 'int8'; input should be 'auto', 'float32'"),
        ({"attn_backend": "FLASHINFER"}, "attn_backend is 'FLASHINFER'; input should be 'TRTLLM'"),
        ({"load_format": "VISION_ONLY"}, "load_format is 'vision_only'; input should be"),
        ({"cuda_graph_config": {"enable_padding": False}}, "enable_padding is False; it must be"),
        (
            {"cuda_graph_config": {"batch_sizes": [1], "max_batch_size": 2}},
            "batch_sizes [1] and max_batch_size 2 are both given",
        ),
        (
            {"cuda_graph_config": {"batch_sizes": [1, "2"]}},
            "cuda_graph_config.batch_sizes.1 is '2'",
        ),
        (
            {"max_seq_len": 100, "kv_cache_config": {"max_tokens": 64}},
            "kv_cache_config.max_tokens 64 cannot hold max_seq_len 100",
        ),
    ],
)
def test_refused(checkpoint: Path, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        cpu_args(checkpoint, **args)
    assert message in str(caught.value)


def test_everything_wrong_is_told_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        LlmArgs.create({"max_num_tokens": "x", "max_batch_size": -1})
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "model",
        "max_batch_size",
        "max_num_tokens",
    ]


@pytest.mark.parametrize("model", [LlmArgs, KvCacheConfig, CudaGraphConfig])
def test_neutral_values_are_accepted_and_no_field_is_called_unsupported(
    model: type[StrictModel], checkpoint: Path
) -> None:
    assert not set(model.neutral_values) & set(model.model_fields)
    needed = {"model": checkpoint} if model is LlmArgs else {}
    for key, values in model.neutral_values.items():
        for value in values:
            assert model.create({**needed, key: value}) == model.create(needed)


def test_every_field_but_the_plain_sections_is_documented() -> None:
    for model in (LlmArgs, KvCacheConfig, CudaGraphConfig):
        for name, field in model.model_fields.items():
            assert field.description or name == "kv_cache_config", name


def test_resolved_defaults(checkpoint: Path) -> None:
    config = cpu_args(checkpoint).executor_config()
    assert (config.device, config.dtype, config.load_format) == ("cpu", "float32", "auto")
    assert (config.max_batch_size, config.max_num_tokens, config.max_seq_len) == (64, 8192, None)
    assert config.cuda_graph_batch_sizes == ()
    assert config.kv_cache_max_tokens == 8 * 4096
    assert config.mapping == Mapping()
    assert config.stop_tokenizer == config.model == checkpoint.resolve()


def test_resolved_values(checkpoint: Path) -> None:
    args = cpu_args(
        checkpoint,
        tensor_parallel_size=4,
        gpus_per_node=2,
        load_format="DUMMY",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_seq_len=100,
        kv_cache_config=KvCacheConfig(dtype="fp8", tokens_per_block=16),
        modeling_v2=False,
    )
    config = args.executor_config(rank=3)
    assert config.mapping == Mapping(world_size=4, rank=3, tp_size=4, gpus_per_node=2)
    assert (config.load_format, config.dtype, config.kv_cache_dtype) == ("dummy", "bfloat16", "fp8")
    assert (config.stop_tokenizer, config.modeling_v2) == (None, "off")
    assert config.kv_cache_max_tokens == 800


@pytest.mark.parametrize(
    ("speculation", "draft_len", "rejection"),
    [
        (None, 0, False),
        ({"num_nextn_predict_layers": 2}, 2, False),
        ({"max_draft_len": 3, "use_rejection_sampling": True}, 3, True),
    ],
)
def test_resolved_speculation(
    checkpoint: Path, speculation: dict | None, draft_len: int, rejection: bool
) -> None:
    given = speculation and {"decoding_type": "MTP", **speculation}
    config = cpu_args(checkpoint, speculative_config=given).executor_config()
    assert (config.max_draft_len, config.use_rejection_sampling) == (draft_len, rejection)


@pytest.mark.parametrize(
    ("max_seq_len", "expected"), [(None, 65536), (1000, 8000), (10_000, 65536), (90_000, 90_000)]
)
def test_cpu_cache_is_bounded(
    checkpoint: Path, tmp_path: Path, max_seq_len: int | None, expected: int
) -> None:
    model = copy_of(checkpoint, tmp_path, max_position_embeddings=1_000_000)
    args = cpu_args(model, max_seq_len=max_seq_len)
    assert args.executor_config().kv_cache_max_tokens == expected


@pytest.mark.parametrize(
    ("config", "max_batch_size", "expected"),
    [
        ({}, 64, (1, 2, 4, 8)),
        ({}, 3, (1, 2, 3)),
        ({"max_batch_size": 12}, 64, (1, 2, 4, 8, 12)),
        ({"max_batch_size": 1}, 64, (1,)),
        ({"batch_sizes": [5, 1, 5]}, 64, (1, 5)),
        ({"batch_sizes": []}, 64, ()),
    ],
)
def test_graph_batch_sizes(
    config: dict[str, Any], max_batch_size: int, expected: tuple[int, ...]
) -> None:
    assert CudaGraphConfig(**config).resolve(max_batch_size) == expected


def test_graph_batch_size_above_the_engines() -> None:
    with pytest.raises(
        ValueError, match=r"batch_sizes is \[9\]; none may be above max_batch_size 8"
    ):
        CudaGraphConfig(batch_sizes=[9]).resolve(8)


@pytest.mark.parametrize(
    ("changes", "args", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, "only GlmMoeDsaForCausalLM is served"),
        ({"max_position_embeddings": None}, {}, "lacks max_position_embeddings"),
        (
            {"vocab_size": 510},
            {"tensor_parallel_size": 4},
            "tensor_parallel_size 4 does not divide vocab_size 510",
        ),
    ],
)
def test_unfit_checkpoints(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], args: dict[str, Any], message: str
) -> None:
    model = copy_of(checkpoint, tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        cpu_args(model, **args).executor_config()


@pytest.mark.parametrize("mode", ["off", "auto", "require"])
def test_every_rank_gets_the_mode_of_modeling_v2(
    checkpoint: Path, tmp_path: Path, mode: str
) -> None:
    path = tmp_path / "extra.yaml"
    path.write_text(f"modeling_v2: {mode}\ntensor_parallel_size: 4\n")
    args = llm_args_from_cli_and_yaml({"model": str(checkpoint), "device": "cpu"}, path)
    assert {args.executor_config(rank).modeling_v2 for rank in range(4)} == {mode}


@pytest.mark.parametrize("mode", ["on", "requires", "Auto", True, None])
def test_a_typo_in_modeling_v2_is_an_error(checkpoint: Path, mode: Any) -> None:
    with pytest.raises(ValueError, match="modeling_v2"):
        cpu_args(checkpoint, modeling_v2=mode)


def test_missing_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no/where'; it must be an existing directory"):
        cpu_args(tmp_path / "no" / "where").executor_config()
    with pytest.raises(ValueError, match="has no config.json"):
        cpu_args(tmp_path).executor_config()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        cpu_args(tmp_path).executor_config()


def test_cuda_is_refused_without_a_gpu(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorrt_llm.llmapi.devices._cuda_device_count", lambda: 0)
    assert LlmArgs.create({"model": checkpoint}).executor_config().device == "cpu"
    with pytest.raises(ValueError, match="device is 'cuda', but"):
        LlmArgs.create({"model": checkpoint, "device": "cuda"}).executor_config()


def test_cuda_defaults(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorrt_llm.llmapi.llm_args.cuda_is_usable", lambda: True)
    config = LlmArgs.create({"model": checkpoint}).executor_config()
    checkpoint_dtype = json.loads((checkpoint / "config.json").read_text())["dtype"]
    assert (config.device, config.dtype) == ("cuda", checkpoint_dtype)
    assert (config.max_batch_size, config.kv_cache_max_tokens) == (256, None)
    assert config.cuda_graph_batch_sizes == (1, 2, 4, 8)


def test_file_overrides_the_command_line(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "extra.yaml"
    path.write_text("max_batch_size: 4\nkv_cache_config: {max_tokens: 512}\nmodeling_v2: off\n")
    cli = {
        "model": str(checkpoint),
        "max_batch_size": 8,
        "max_num_tokens": None,
        "kv_cache_config": {"dtype": "fp8", "max_tokens": None},
    }
    args = llm_args_from_cli_and_yaml(cli, path)
    assert (args.max_batch_size, args.max_num_tokens) == (4, 8192)
    assert args.kv_cache_config == KvCacheConfig(dtype="fp8", max_tokens=512)
    path.write_text("")
    assert llm_args_from_cli_and_yaml(cli, path).max_batch_size == 8
    assert llm_args_from_cli_and_yaml(cli) == llm_args_from_cli_and_yaml(cli, path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "must hold a mapping"),
        ("1: 2\n", "must hold a mapping"),
        ("a: [1\n", "is not YAML"),
        ("max_batch: 1\n", "unknown key 'max_batch'; did you mean 'max_batch_size'"),
    ],
)
def test_bad_files_are_named(checkpoint: Path, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "extra.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"extra.yaml.*{message}"):
        llm_args_from_cli_and_yaml({"model": checkpoint}, path)
    with pytest.raises(ValueError, match="cannot read .*none.yaml: No such file"):
        llm_args_from_cli_and_yaml({"model": checkpoint}, tmp_path / "none.yaml")
