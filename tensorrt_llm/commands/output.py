"""How results of `trtllm-bench` and `trtllm-eval` look."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tensorrt_llm.version import __version__


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first one to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "   ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    )


def environment() -> dict[str, Any]:
    """Versions and machine, for the settings that go with a result."""
    libraries = ("torch", "transformers")
    return {
        "versions": {
            "tensorrt_llm": __version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in libraries},
        },
        "machine": platform.machine(),
        "cpu_cores": os.cpu_count(),
    }


def write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    """Write a result if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(content, indent=2, default=str) + "\n")
        click.echo(f"Written to {path}")
