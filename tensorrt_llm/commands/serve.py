"""trtllm-serve: an OpenAI-compatible server for one model."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tensorrt_llm.commands import config_file
from tensorrt_llm.logger import LEVELS, set_level

if TYPE_CHECKING:
    from tensorrt_llm.llmapi import LLM

# Names that TensorRT-LLM's command has and this one does not.
UNSUPPORTED_FLAGS = frozenset(
    {
        "--agent_percentage",
        "--agent_types",
        "--allow_request_chat_template",
        "--cluster_size",
        "--custom_module_dirs",
        "--custom_tokenizer",
        "--disagg_cluster_uri",
        "--enable_attention_dp",
        "--enable_visual_gen",
        "--fail_fast_on_attention_window_too_large",
        "--generation-config",
        "--grpc",
        "--hf_revision",
        "--media_io_kwargs",
        "--metadata_server_config_file",
        "--middleware",
        "--moe_cluster_parallel_size",
        "--no-telemetry",
        "--num_input_processor_workers",
        "--num_media_load_workers",
        "--num_postprocess_workers",
        "--num_serve_frontends",
        "--otlp_traces_endpoint",
        "--post_processor_hook",
        "--reasoning_parser",
        "--report_addr",
        "--revision",
        "--server_role",
        "--telemetry",
        "--tool_parser",
        "--trust_remote_code",
        "--video_pruning_rate",
        "--visual_gen_args",
    }
)
UNSUPPORTED_COMMANDS = frozenset({"disaggregated", "disaggregated_mpi_worker", "mm_embedding_serve"})


class _DefaultGroup(click.Group):
    """A group whose first word, when it is no sub-command, belongs to `serve`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] in UNSUPPORTED_COMMANDS - set(self.commands):
            raise click.UsageError(_unsupported(f"trtllm-serve {args[0]}"), ctx)
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["serve", *args]
        return super().parse_args(ctx, args)


class _ServeCommand(click.Command):
    """Tells TensorRT-LLM's flags that are missing here from misspelled ones."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name in UNSUPPORTED_FLAGS:
                raise click.UsageError(_unsupported(error.option_name), ctx) from None
            raise


def _unsupported(name: str) -> str:
    return f"TensorRT-LLM's {name} is not supported by this project yet"


def _only_one(ctx: click.Context, option: click.Parameter, value: int) -> int:
    if value != 1:
        raise click.BadParameter(f"{value} is not supported by this project; it must be 1")
    return value


@click.group(cls=_DefaultGroup)
def main() -> None:
    """Serve a model over OpenAI's API.

    `trtllm-serve MODEL [flags]` is short for `trtllm-serve serve MODEL [flags]`, whose --help has the flags.
    """


@main.command(cls=_ServeCommand, context_settings={"show_default": True})
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--host", default="localhost", help="Address to listen on.")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), help="Port; 0 takes a free one.")
@click.option("--served_model_name", help="What clients call the model. [default: MODEL's last part]")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of the tokenizer. [default: MODEL]",
)
@click.option(
    "--chat_template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Jinja file used instead of the tokenizer's chat template.",
)
@click.option(
    "--log_level", default="info", type=click.Choice(sorted(LEVELS)), help="Least severe level logged."
)
@click.option(
    "--config",
    "--extra_llm_api_options",
    "config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML file of LLM arguments; they win over the flags.",
)
@click.option("--backend", default="pytorch", type=click.Choice(["pytorch"]), help="The only one.")
@click.option("--max_batch_size", default=2048, help="Most requests in one step.")
@click.option("--max_num_tokens", default=8192, help="Most tokens in one step.")
@click.option(
    "--max_seq_len", type=int, help="Most tokens of a request, prompt included. [default: the model's]"
)
@click.option("--max_beam_width", default=1, callback=_only_one, help="There is no beam search.")
@click.option(
    "--tp_size", "--tensor_parallel_size", "tensor_parallel_size", default=1, help="Ranks (GPUs)."
)
@click.option(
    "--pp_size",
    "--pipeline_parallel_size",
    "pipeline_parallel_size",
    default=1,
    callback=_only_one,
    help="There is no pipeline parallelism.",
)
@click.option(
    "--cp_size",
    "--context_parallel_size",
    "context_parallel_size",
    default=1,
    callback=_only_one,
    help="There is no context parallelism.",
)
@click.option(
    "--ep_size",
    "--moe_expert_parallel_size",
    "moe_expert_parallel_size",
    default=1,
    callback=_only_one,
    help="There is no expert parallelism; each rank holds a slice of every expert.",
)
@click.option("--gpus_per_node", type=int, help="GPUs of one host. [default: those found]")
@click.option(
    "--free_gpu_memory_fraction",
    "--kv_cache_free_gpu_memory_fraction",
    "free_gpu_memory_fraction",
    default=0.9,
    help="Share of the memory left after loading that the KV cache takes.",
)
@click.option(
    "--kv_cache_dtype", default="auto", type=click.Choice(["auto", "fp8"]), help="Type of the KV cache."
)
@click.option(
    "--enable_chunked_prefill", is_flag=True, help="Split prompts longer than max_num_tokens."
)
def serve(
    model: Path,
    host: str,
    port: int,
    served_model_name: str | None,
    chat_template: Path | None,
    log_level: str,
    config: Path | None,
    **flags: Any,
) -> None:
    """Serve the checkpoint in directory MODEL (hub layout) over OpenAI's API."""
    set_level(log_level)
    try:
        args = _llm_args(model, flags, config_file.load(config) if config else {})
    except ValueError as error:
        raise click.UsageError(str(error)) from None

    # Late, so that --help and mistakes on the command line answer at once.
    from tensorrt_llm.serve import launcher

    try:
        sock = launcher.bind(host, port)
    except OSError as error:
        raise click.ClickException(str(error)) from None
    name = served_model_name or model.resolve().name
    template = chat_template.read_text() if chat_template else None
    sys.exit(launcher.serve(lambda: _load(args), sock, name, template))


def _llm_args(model: Path, flags: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM`, checked: those of the flags, with the file's over them."""
    own = {"backend", "max_beam_width", "free_gpu_memory_fraction", "kv_cache_dtype"}
    args = {name: value for name, value in flags.items() if name not in own and value is not None}
    args["model"] = model
    args["kv_cache_config"] = {
        "free_gpu_memory_fraction": flags["free_gpu_memory_fraction"],
        "dtype": flags["kv_cache_dtype"],
    }
    return config_file.merged(args, file)


def _load(args: Mapping[str, Any]) -> "LLM":
    from tensorrt_llm.llmapi import LLM

    return LLM(**args)
