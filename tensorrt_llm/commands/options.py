"""What `trtllm-bench` and `trtllm-eval` have in common: options, and errors without tracebacks."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from tensorrt_llm.llmapi.llm_args import LlmArgs

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)

model = click.option("--model", required=True, type=_FOLDER, help="Checkpoint directory.")
tp_size = click.option(
    "--tp_size", default=1, type=click.IntRange(min=1), help="Tensor-parallel ranks."
)
config = click.option(
    "--config",
    "--extra_llm_api_options",
    "config",
    type=_FILE,
    help="YAML file of LLM arguments, which win over the flags.",
)
output_json = click.option(
    "--output_json",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write settings and results to this file.",
)


def llm_args(values: Mapping[str, Any], config: Path | None) -> LlmArgs:
    """The engine's arguments from flags and `--config`.

    Raises:
        click.UsageError: an argument is wrong.
    """
    from tensorrt_llm.llmapi.config_file import llm_args_from_cli_and_yaml

    with user_errors():
        return llm_args_from_cli_and_yaml(values, config)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """What a user can get wrong ends the command with one message, not with a traceback of this
    process."""
    from tensorrt_llm.executor import EngineDeadError

    try:
        yield
    except (ValueError, OSError, EngineDeadError) as error:
        raise click.ClickException(str(error)) from None


def write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    """Write a result if the user wants one."""
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n")
        click.echo(f"Written to {path}")
