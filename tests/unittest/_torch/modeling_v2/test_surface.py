"""modeling_v2 takes from the engine what `_surface` lists, and the engine has all of it."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorrt_llm._torch.modeling_v2 import _surface
from tensorrt_llm._torch.modeling_v2._surface import SURFACE, Entry, fields_of, missing_fields

ROOT = Path(_surface.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
INSIDE = "tensorrt_llm._torch.modeling_v2"
LISTED = {(entry.module, entry.name) for entry in SURFACE}
CLASS_OF = {receiver: entry.name for entry in SURFACE for receiver in entry.receivers}
CLASS_OF |= {entry.name: entry.name for entry in SURFACE}


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Engine names that are imported, as (module, name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)


def unlisted_imports(tree: ast.AST) -> list[tuple[str, str]]:
    engine = (
        (module, name)
        for module, name in imports(tree)
        if f"{module}.".startswith("tensorrt_llm.") and not f"{module}.".startswith(f"{INSIDE}.")
    )
    return [found for found in engine if found not in LISTED]


def unlisted_reads(tree: ast.AST) -> list[str]:
    """`receiver.field` of an engine object whose field is not listed."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        base = node.value
        receiver = getattr(base, "id", None) or getattr(base, "attr", None)
        if receiver in CLASS_OF and node.attr not in fields_of(CLASS_OF[receiver]):
            found.append(f"{receiver}.{node.attr}")
    return found


def provides(value: Any, field: str) -> bool:
    """Whether a class or object has the field: by attribute, annotation or assignment to self."""
    if hasattr(value, field) or not inspect.isclass(value):
        return hasattr(value, field)
    return any(
        field in vars(base).get("__annotations__", {})
        or re.search(rf"self\.{field}\b[^=\n]*=", inspect.getsource(base))
        for base in value.__mro__
        if base.__module__.startswith("tensorrt_llm")
    )


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_listed_engine_names_are_used(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert not unlisted_imports(tree)
    assert not unlisted_reads(tree)


@pytest.mark.parametrize("entry", SURFACE, ids=lambda e: f"{e.name}-{e.ours}")
def test_the_engine_provides_what_is_listed(entry: Entry) -> None:
    value = getattr(importlib.import_module(entry.module), entry.name)
    assert not [field for field in entry.fields if not provides(value, field)]
    assert entry.meaning


def test_names_that_are_not_listed_are_found() -> None:
    tree = ast.parse(
        "import tensorrt_llm.mapping\n"
        "from tensorrt_llm._torch.modules.linear import Linear\n"
        "from tensorrt_llm._torch.modeling_v2._core import ModelingV2Core\n"
        "x = self.mapping.pp_size + mapping.tp_size + attn_metadata.secret + own.secret\n"
    )
    assert unlisted_imports(tree) == [
        ("tensorrt_llm.mapping", ""),
        ("tensorrt_llm._torch.modules.linear", "Linear"),
    ]
    assert sorted(unlisted_reads(tree)) == ["attn_metadata.secret", "mapping.pp_size"]


def test_a_field_that_the_engine_lacks_is_found() -> None:
    metadata = importlib.import_module("tensorrt_llm._torch.attention.backends.interface")
    assert provides(metadata.AttentionMetadata, "num_contexts")
    assert not provides(metadata.AttentionMetadata, "num_context")
    assert missing_fields("Mapping", object()) == list(fields_of("Mapping"))


def test_a_receiver_belongs_to_one_class() -> None:
    classes = {(receiver, e.name) for e in SURFACE for receiver in e.receivers}
    assert len(classes) == len({receiver for receiver, _ in classes})
