"""`LlmArgs`: what one can ask of an engine, under TensorRT-LLM's names, and how it is resolved."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, field_validator, model_validator

from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig
from tensorrt_llm.llmapi import unsupported
from tensorrt_llm.llmapi.checkpoint import Checkpoint
from tensorrt_llm.llmapi.devices import cuda_is_usable
from tensorrt_llm.llmapi.strict_model import StrictModel
from tensorrt_llm.llmapi.unsupported import Neutral
from tensorrt_llm.mapping import Mapping

# Without kv_cache_config.max_tokens the CPU caches eight longest sequences, but no more tokens than
# these unless one sequence alone needs more: host memory is shared, so there is no "free" to take.
CPU_KV_CACHE_SEQUENCES = 8
CPU_KV_CACHE_TOKENS = 65536
DEFAULT_MAX_BATCH_SIZE = {"cpu": 64, "cuda": 256}
DEFAULT_GRAPH_BATCH_SIZE = 8


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _path(value: Any) -> Any:
    return Path(value) if isinstance(value, str) else value


def _yaml_off(value: Any) -> Any:
    """YAML reads a bare `off` as False."""
    return "off" if value is False else value


FilePath = Annotated[Path, BeforeValidator(_path)]


class KvCacheConfig(StrictModel):
    """The paged cache of latents and index keys."""

    neutral_values: ClassVar[Neutral] = unsupported.KV_CACHE_CONFIG

    enable_block_reuse: bool = Field(
        default=False,
        description="Sharing blocks between prompts with a common beginning; not supported yet, so "
        "True is refused (TensorRT-LLM's default is True).",
    )
    max_tokens: PositiveInt | None = Field(
        default=None,
        description="Tokens that each pool holds. None: on CUDA what `free_gpu_memory_fraction` "
        "allows, on the CPU 8 longest sequences but at most 65536 tokens.",
    )
    free_gpu_memory_fraction: float = Field(
        default=0.9,
        gt=0.0,
        le=1.0,
        description="Share of the GPU memory free after loading (CUDA only).",
    )
    tokens_per_block: PositiveInt = Field(default=32, description="Tokens in one page.")
    dtype: Annotated[Literal["auto", "fp8"], BeforeValidator(_lower)] = Field(
        default="auto", description="auto: as the activations; fp8: e4m3 latents and index keys."
    )

    @field_validator("enable_block_reuse")
    @classmethod
    def _no_reuse(cls, value: bool) -> bool:
        if value:
            raise ValueError("True is not supported by this project yet; it must be False")
        return value


class CudaGraphConfig(StrictModel):
    """Decode steps captured as CUDA graphs; no effect on the CPU."""

    neutral_values: ClassVar[Neutral] = unsupported.CUDA_GRAPH_CONFIG

    batch_sizes: list[PositiveInt] | None = Field(
        default=None,
        description="Batch sizes to capture. None: 1, 2, 4, ... up to `max_batch_size`.",
    )
    max_batch_size: PositiveInt | None = Field(
        default=None,
        description="Largest batch size to capture when `batch_sizes` is not given; None: 8.",
    )
    enable_padding: bool = Field(
        default=True,
        description="Smaller batches are padded to the next captured size. That is always so here: "
        "False is refused (it is TensorRT-LLM's default).",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.enable_padding:
            raise ValueError("enable_padding is False; it must be True, batches are always padded")
        if self.batch_sizes is not None and self.max_batch_size is not None:
            raise ValueError(
                f"batch_sizes {self.batch_sizes} and max_batch_size {self.max_batch_size} "
                "are both given; give one of them"
            )
        return self

    def resolve(self, max_batch_size: int) -> tuple[int, ...]:
        """Batch sizes to capture for an engine of `max_batch_size`, ascending.

        Raises:
            ValueError: a given batch size is larger than that.
        """
        if self.batch_sizes is None:
            largest = min(self.max_batch_size or DEFAULT_GRAPH_BATCH_SIZE, max_batch_size)
            powers = (1 << i for i in range(largest.bit_length()))
            return tuple(sorted({*powers, largest}))
        if max(self.batch_sizes, default=0) > max_batch_size:
            raise ValueError(
                f"cuda_graph_config.batch_sizes is {self.batch_sizes}; "
                f"none may be above max_batch_size {max_batch_size}"
            )
        return tuple(sorted(set(self.batch_sizes)))


class MTPDecodingConfig(StrictModel):
    """Drafting with the checkpoint's own MTP layer, run again for every draft (MTP-Eagle)."""

    neutral_values: ClassVar[Neutral] = unsupported.SPECULATIVE_CONFIG

    decoding_type: Literal["MTP"] = Field(description="The one kind of speculation served.")
    max_draft_len: PositiveInt | None = Field(
        default=None, description="Drafts per step; None: `num_nextn_predict_layers`, else 1."
    )
    num_nextn_predict_layers: PositiveInt | None = Field(
        default=None, description="The older name of `max_draft_len`; equal when both are given."
    )
    use_rejection_sampling: bool = Field(
        default=False,
        description="Requests that sample draw their drafts as well, and keep or replace each so "
        "that the output has the model's distribution; accepts more where that is flat.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        new, old = self.max_draft_len, self.num_nextn_predict_layers
        if new is not None and old is not None and new != old:
            raise ValueError(
                f"max_draft_len {new} and num_nextn_predict_layers {old} mean the same; "
                "give one of them, or equal values"
            )
        return self

    @property
    def draft_len(self) -> int:
        """Drafts per step."""
        return self.max_draft_len or self.num_nextn_predict_layers or 1


class LlmArgs(StrictModel):
    """Arguments of an engine. Names and defaults are TensorRT-LLM's where it has them.

    Create it with `LlmArgs.create(mapping)` for errors in plain words.
    """

    neutral_values: ClassVar[Neutral] = unsupported.LLM_ARGS

    model: FilePath = Field(description="Checkpoint directory in the hub layout.")
    tokenizer: FilePath | None = Field(
        default=None, description="Its directory; None: the checkpoint's."
    )
    skip_tokenizer_init: bool = Field(default=False, description="Token ids in, token ids out.")
    tensor_parallel_size: PositiveInt = Field(
        default=1, description="Ranks that share every layer."
    )
    gpus_per_node: PositiveInt = Field(default=8, description="Ranks on one host.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda where there is a usable GPU. (This project's own.)"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Activations and weights. auto: the checkpoint's; float32 on the CPU.",
    )
    load_format: Annotated[Literal["auto", "dummy"], BeforeValidator(_lower)] = Field(
        default="auto",
        description="dummy: random weights, made on the device; only config.json is read.",
    )
    max_batch_size: PositiveInt | None = Field(
        default=None, description="Requests in one step; None: 64 on the CPU, 256 on CUDA."
    )
    max_num_tokens: PositiveInt = Field(default=8192, description="Tokens in one step.")
    max_seq_len: PositiveInt | None = Field(
        default=None,
        description="Prompt plus output of one request; None: the model's "
        "max_position_embeddings, or what the cache holds if that is less.",
    )
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    cuda_graph_config: CudaGraphConfig | None = Field(
        default_factory=CudaGraphConfig, description="None: no CUDA graphs."
    )
    enable_chunked_prefill: bool = Field(
        default=False,
        description="Split prompts longer than `max_num_tokens`; else they are refused.",
    )
    speculative_config: MTPDecodingConfig | None = Field(
        default=None, description="Drafting; None: one token per step."
    )
    disable_overlap_scheduler: bool = Field(
        default=False,
        description="Look at a step's tokens before the next one is launched.",
    )
    attn_backend: Literal["TRTLLM"] = Field(default="TRTLLM", description="The DSA backend.")
    modeling_v2: Annotated[Literal["off", "auto", "require"], BeforeValidator(_yaml_off)] = Field(
        default="off",
        description="Run the deployment's own target: off never, auto where there is one, require "
        "or else fail. Each rank decides once, when it builds its model.",
    )
    enable_iter_perf_stats: bool = Field(
        default=False, description="Report statistics of every step, not only now and then."
    )
    latent_norm_eps: float | None = Field(
        default=None,
        gt=0.0,
        description="Epsilon of the latent norms; None: the config's rms_norm_eps. transformers "
        "uses 1e-6. (This project's own.)",
    )
    num_threads: PositiveInt | None = Field(
        default=None,
        description="CPU threads per rank; None: the cores, shared. (This project's own.)",
    )

    @model_validator(mode="after")
    def _cache_holds_a_sequence(self) -> Self:
        tokens = self.kv_cache_config.max_tokens
        if tokens is not None and self.max_seq_len is not None and tokens < self.max_seq_len:
            raise ValueError(
                f"kv_cache_config.max_tokens {tokens} cannot hold max_seq_len {self.max_seq_len}"
            )
        return self

    @property
    def tokenizer_dir(self) -> Path | None:
        """Directory of the tokenizer; None when none is wanted."""
        return None if self.skip_tokenizer_init else self.tokenizer or self.model

    def executor_config(self, rank: int = 0) -> ExecutorConfig:
        """The resolved configuration of one rank: no default is decided anywhere below.

        Raises:
            ValueError: the checkpoint is not there or not served, or does not fit the arguments.
        """
        checkpoint = Checkpoint.open(self.model)
        checkpoint.check_tensor_parallel(self.tensor_parallel_size)
        if self.speculative_config is not None:
            checkpoint.check_drafting()
        device = self._resolve_device()
        max_batch_size = self.max_batch_size or DEFAULT_MAX_BATCH_SIZE[device]
        graphs = self.cuda_graph_config if device == "cuda" else None
        speculation = self.speculative_config
        return ExecutorConfig(
            model=self.model.resolve(),
            device=device,
            dtype=self._resolve_dtype(checkpoint, device),
            mapping=self._mapping(rank),
            load_format=self.load_format,
            latent_norm_eps=self.latent_norm_eps,
            kv_cache_dtype=self.kv_cache_config.dtype,
            tokens_per_block=self.kv_cache_config.tokens_per_block,
            kv_cache_max_tokens=self._kv_cache_tokens(checkpoint, device),
            free_gpu_memory_fraction=self.kv_cache_config.free_gpu_memory_fraction,
            max_batch_size=max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_seq_len=self.max_seq_len,
            max_draft_len=speculation.draft_len if speculation else 0,
            use_rejection_sampling=bool(speculation and speculation.use_rejection_sampling),
            enable_chunked_prefill=self.enable_chunked_prefill,
            cuda_graph_batch_sizes=graphs.resolve(max_batch_size) if graphs else (),
            disable_overlap_scheduler=self.disable_overlap_scheduler,
            attn_backend=self.attn_backend,
            modeling_v2=self.modeling_v2,
            stop_tokenizer=self.tokenizer_dir and self.tokenizer_dir.resolve(),
            num_threads=self.num_threads,
            iter_perf_stats=self.enable_iter_perf_stats,
        )

    def _mapping(self, rank: int) -> Mapping:
        size = self.tensor_parallel_size
        return Mapping(world_size=size, rank=rank, tp_size=size, gpus_per_node=self.gpus_per_node)

    def _resolve_device(self) -> str:
        if self.device == "cpu":
            return "cpu"
        usable = cuda_is_usable()
        if self.device == "cuda" and not usable:
            raise ValueError("device is 'cuda', but torch lacks CUDA or there is no GPU")
        return "cuda" if usable else "cpu"

    def _resolve_dtype(self, checkpoint: Checkpoint, device: str) -> str:
        if self.dtype != "auto":
            return self.dtype
        return checkpoint.dtype if device == "cuda" else "float32"

    def _kv_cache_tokens(self, checkpoint: Checkpoint, device: str) -> int | None:
        given = self.kv_cache_config.max_tokens
        if given is not None or device == "cuda":
            return given
        longest = self.max_seq_len or checkpoint.max_position_embeddings
        wanted = min(CPU_KV_CACHE_SEQUENCES * longest, CPU_KV_CACHE_TOKENS)
        return max(wanted, self.max_seq_len or 0)
