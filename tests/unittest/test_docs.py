"""The documents say what is true: links lead somewhere, and named functions and flags exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
TOKEN_PATH = ROOT / "docs" / "token_path.md"


def names(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_relative_links_lead_to_files(document):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    broken = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not broken


def test_the_readme_names_commands_that_make_has():
    makefile = (ROOT / "Makefile").read_text()
    commands = set(re.findall(r"`?make (\w+)", (ROOT / "README.md").read_text()))
    assert {"serve", "test"} <= commands
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in commands)


def code_references(document: Path) -> set[tuple[str, str]]:
    """Each `path.py:function` or `path.py:Class.method` of the document."""
    return set(re.findall(r"`([\w/.]+\.py):([\w.]+)`", document.read_text()))


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, f"{prefix}{node.name}.")


def test_the_token_path_has_references():
    assert len(code_references(TOKEN_PATH)) >= 15


@pytest.mark.parametrize(
    ("path", "function"), sorted(set().union(*map(code_references, DOCUMENTS)))
)
def test_code_that_documents_name_exists(path, function):
    source = (ROOT / "tensorrt_llm" / path).read_text()
    assert function in definitions(ast.parse(source).body)
