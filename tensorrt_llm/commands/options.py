"""What `trtllm-bench` and `trtllm-eval` share: options, and errors that are the user's."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import click

_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)

model = click.option("--model", required=True, type=_DIRECTORY, help="Checkpoint directory.")
tp_size = click.option(
    "--tp_size", default=1, type=click.IntRange(min=1), help="Ranks that share every layer."
)
config = click.option(
    "--config",
    "--extra_llm_api_options",
    "config",
    type=_FILE,
    help="YAML file of LLM arguments, which win over the flags.",
)
output_json = click.option(
    "--output_json", type=_NEW_FILE, help="Also write settings and results to this file."
)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """What a user can do something about ends the command with its text, without a traceback."""
    from tensorrt_llm.commands.benchmark.engine import BenchError
    from tensorrt_llm.executor import EngineDeadError

    try:
        yield
    except (ValueError, OSError, BenchError, EngineDeadError) as error:
        raise click.ClickException(str(error)) from None
