"""Engine arguments from a command line and a YAML file; the file wins."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tensorrt_llm.llmapi.llm_args import LlmArgs
from tensorrt_llm.logger import logger

Values = Mapping[str, Any]


def llm_args_from_cli_and_yaml(cli: Values, yaml_path: Path | None = None) -> LlmArgs:
    """Merge, level by level.

    Args:
        cli: engine arguments by their names in `LlmArgs`, nested ones as nested mappings. None
            means that the flag was not given.
        yaml_path: a file that holds a mapping of the same names; its values override `cli`'s.

    Raises:
        ValueError: the file cannot be read as a mapping, or an argument is wrong.
    """
    given = _without_none(cli)
    if yaml_path is None:
        return LlmArgs.create(given)
    try:
        return LlmArgs.create(_merge(given, read_yaml(yaml_path), path=""))
    except ValueError as error:
        raise ValueError(f"{yaml_path} and the command line: {error}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty one.

    Raises:
        ValueError: no such file, no YAML, or no mapping with strings as keys.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    values = {} if values is None else values
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path} must hold a mapping with names as keys")
    return values


def _without_none(values: Values) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None
    }


def _merge(cli: Values, file: Values, path: str) -> dict[str, Any]:
    merged = dict(cli)
    for key, value in file.items():
        old = cli.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(old, value, f"{path}{key}.")
            continue
        if key in cli and old != value:
            logger.info("the file's %s%s %r overrides %r", path, key, value, old)
        merged[key] = value
    return merged
