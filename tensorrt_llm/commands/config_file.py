"""Reading the YAML of `--config` and laying it over the command line."""

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml


def load(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        ValueError: it is no YAML, no mapping, or a key stands in it twice.
    """
    try:
        content = yaml.load(path.read_text(), Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must hold keys and values")
    return content


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, key by key also inside of mappings that both have."""
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        both = isinstance(value, Mapping) and isinstance(under, Mapping)
        result[key] = merged(under, value) if both else value
    return result


class _StrictLoader(yaml.SafeLoader):
    """YAML lets a repeated key win silently; here it is an error."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands there twice", node.start_mark
                )
        return super().construct_mapping(node, deep)
