"""trtllm-serve: an OpenAI-compatible server for one model."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tensorrt_llm.llmapi.config_file import llm_args_from_cli_and_yaml
from tensorrt_llm.llmapi.llm_args import LlmArgs
from tensorrt_llm.llmapi.strict_model import StrictModel
from tensorrt_llm.logger import LEVELS, set_level

if TYPE_CHECKING:
    from tensorrt_llm.llmapi import LLM


@dataclass(frozen=True)
class EngineFlag:
    """A flag that is an engine argument; `LlmArgs` owns its default, its meaning and its checks.

    Args:
        path: in `LlmArgs`, with dots into nested ones.
        kind: type of the value; bool makes a flag without one.
        names: as on the command line.
    """

    path: str
    kind: type
    names: tuple[str, ...]

    def option(self) -> Callable[[Any], Any]:
        text = f"{self._meaning()}  [default: {self.default}]"
        kind: dict[str, Any] = {"is_flag": True} if self.kind is bool else {"type": self.kind}
        return click.option(*self.names, self.parameter, default=None, help=text, **kind)

    @property
    def parameter(self) -> str:
        """The path as the name of a Python parameter."""
        return self.path.replace(".", "__")

    @property
    def default(self) -> object:
        model, name = self._owner()
        if name in model.model_fields:
            return model.model_fields[name].default
        return model.neutral_values[name][-1]

    def _meaning(self) -> str:
        model, name = self._owner()
        if name in model.model_fields:
            return model.model_fields[name].description or ""
        return "For command lines of TensorRT-LLM; another value is refused."

    def _owner(self) -> tuple[type[StrictModel], str]:
        *above, name = self.path.split(".")
        model: type[StrictModel] = LlmArgs
        for step in above:
            nested = model.model_fields[step].annotation
            assert isinstance(nested, type) and issubclass(nested, StrictModel)
            model = nested
        return model, name


ENGINE_FLAGS = (
    EngineFlag("tokenizer", str, ("--tokenizer",)),
    EngineFlag("tensor_parallel_size", int, ("--tp_size", "--tensor_parallel_size")),
    EngineFlag("pipeline_parallel_size", int, ("--pp_size", "--pipeline_parallel_size")),
    EngineFlag("context_parallel_size", int, ("--cp_size", "--context_parallel_size")),
    EngineFlag("moe_expert_parallel_size", int, ("--ep_size", "--moe_expert_parallel_size")),
    EngineFlag("gpus_per_node", int, ("--gpus_per_node",)),
    EngineFlag("max_batch_size", int, ("--max_batch_size",)),
    EngineFlag("max_num_tokens", int, ("--max_num_tokens",)),
    EngineFlag("max_seq_len", int, ("--max_seq_len",)),
    EngineFlag("max_beam_width", int, ("--max_beam_width",)),
    EngineFlag("enable_chunked_prefill", bool, ("--enable_chunked_prefill",)),
    EngineFlag(
        "kv_cache_config.free_gpu_memory_fraction",
        float,
        ("--free_gpu_memory_fraction", "--kv_cache_free_gpu_memory_fraction"),
    ),
    EngineFlag("kv_cache_config.dtype", str, ("--kv_cache_dtype",)),
    EngineFlag("backend", str, ("--backend",)),
)

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
UNSUPPORTED_COMMANDS = frozenset(
    {"disaggregated", "disaggregated_mpi_worker", "mm_embedding_serve"}
)


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


def _engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    for flag in reversed(ENGINE_FLAGS):  # decorators apply from the last to the first
        command = flag.option()(command)
    return command


@click.group(cls=_DefaultGroup)
def main() -> None:
    """Serve a model over OpenAI's API.

    `trtllm-serve MODEL [flags]` is short for `trtllm-serve serve MODEL [flags]`, whose --help
    has the flags.
    """


@main.command(cls=_ServeCommand, context_settings={"show_default": True})
@click.argument("model")
@click.option("--host", default="localhost", help="Address to listen on.")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--served_model_name", help="What clients call the model.  [default: MODEL's name]")
@click.option(
    "--chat_template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the Jinja chat template to use.  [default: the tokenizer's]",
)
@click.option(
    "--log_level",
    default="info",
    type=click.Choice(sorted(LEVELS)),
    help="Least severe level that is logged.",
)
@click.option(
    "--config",
    "--extra_llm_api_options",
    "config",
    type=click.Path(path_type=Path),
    help="YAML file of LLM arguments, which win over the flags.  [default: none]",
)
@_engine_flags
def serve(
    model: str,
    host: str,
    port: int,
    served_model_name: str | None,
    chat_template: Path | None,
    log_level: str,
    config: Path | None,
    **engine: Any,
) -> None:
    """Serve the checkpoint in directory MODEL (hub layout) over OpenAI's API."""
    set_level(log_level)
    os.environ["TLLM_LOG_LEVEL"] = log_level  # for the rank processes
    try:
        args = llm_args_from_cli_and_yaml({"model": model, **_nested(engine)}, config)
        if args.skip_tokenizer_init:
            raise ValueError("skip_tokenizer_init is True; a server needs the tokenizer")
    except ValueError as error:
        raise click.UsageError(str(error)) from None

    # Late, so that --help and mistakes on the command line answer at once.
    from tensorrt_llm.serve import launcher

    try:
        sock = launcher.bind(host, port)
    except OSError as error:
        raise click.ClickException(str(error)) from None
    name = served_model_name or args.model.resolve().name
    template = chat_template.read_text() if chat_template else None
    sys.exit(launcher.serve(lambda: _load(args), sock, name, template))


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a__b": 1}` as `{"a": {"b": 1}}`."""
    result: dict[str, Any] = {}
    for flag in ENGINE_FLAGS:
        *above, name = flag.path.split(".")
        inner = result
        for step in above:
            inner = inner.setdefault(step, {})
        inner[name] = values[flag.parameter]
    return result


def _load(args: LlmArgs) -> "LLM":
    from tensorrt_llm.llmapi import LLM

    return LLM.from_args(args)
