"""Receipts vouch for exactly the files that they were earned with."""

import json
from pathlib import Path

import pytest
from helpers.example_op import ScaledAppend

from tensorrt_llm._torch.modeling_v2 import receipts
from tensorrt_llm._torch.modeling_v2.catalog._op import Arch, all_ops
from tensorrt_llm._torch.modeling_v2.receipts import (
    Certification,
    certify,
    content_hash,
    load,
    record_files,
    verify,
)

PASSING = """
import pytest

@pytest.mark.parametrize("cell", ["one row", "all rows"])
def test_kernel(cell):
    pass
"""
KERNEL = "cpp/tensorrt_llm/kernels/glmMoeDsa/example.cu"


class Example(ScaledAppend):
    """The example op as if it stood in the catalog and had a kernel."""

    SOURCES = (KERNEL,)


Example.__module__ = "tensorrt_llm._torch.modeling_v2.catalog.example"
RECORD, TEST, _ = record_files(Example)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree with the example's files and no receipts."""
    monkeypatch.setattr(receipts, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the inner runs need none
    for name, text in {RECORD: "record", TEST: PASSING, KERNEL: "kernel"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for arch in Arch:
        receipts._path(arch).parent.mkdir(exist_ok=True)
        receipts._path(arch).write_text("{}")
    return tmp_path


@pytest.mark.parametrize("arch", Arch)
def test_no_receipt_is_older_than_its_files(arch: Arch) -> None:
    ops = all_ops()
    held = load(arch)
    assert held.keys() <= ops.keys()
    assert not [name for name in held if verify(ops[name], arch) is not Certification.CERTIFIED]


def test_a_record_a_test_and_its_kernel_make_a_receipt() -> None:
    assert record_files(Example) == [
        "tensorrt_llm/_torch/modeling_v2/catalog/example.py",
        "tests/unittest/_torch/modeling_v2/catalog/test_example.py",
        KERNEL,
    ]


def test_every_ops_files_exist() -> None:
    for record in all_ops().values():
        assert len(content_hash(record)) == 64


@pytest.mark.parametrize("file", [RECORD, TEST, KERNEL])
def test_any_changed_file_voids_the_receipt(tree: Path, file: str) -> None:
    held = {"test_scaled_append": content_hash(Example)}
    receipts._path(Arch.SM_90).write_text(json.dumps(held))
    assert verify(Example, Arch.SM_90) is Certification.CERTIFIED
    assert verify(Example, Arch.SM_107) is Certification.NONE
    (tree / file).write_text((tree / file).read_text() + " ")
    assert verify(Example, Arch.SM_90) is Certification.STALE
    (tree / file).unlink()
    assert verify(Example, Arch.SM_90) is Certification.STALE


def test_other_receipts_are_kept(tree: Path) -> None:
    receipts._path(Arch.SM_90).write_text(json.dumps({"other": "hash"}))
    certify(Example, Arch.SM_90)
    assert load(Arch.SM_90) == {"other": "hash", "test_scaled_append": content_hash(Example)}


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (PASSING.replace("pass", "assert False"), "did not pass"),
        (PASSING.replace("pass", "pytest.skip('no GPU')"), r"skipped: \['test_kernel\[one row\]'"),
        (PASSING.replace(', "all rows"', ""), "test_kernel ran 1 times; it has 2 cells"),
        ("", "did not pass"),
    ],
)
def test_nothing_less_than_all_cells_earns_a_receipt(tree: Path, test: str, message: str) -> None:
    (tree / TEST).write_text(test)
    with pytest.raises(RuntimeError, match=message):
        certify(Example, Arch.SM_90)
    assert load(Arch.SM_90) == {}


def test_a_moved_byte_is_another_hash(tree: Path) -> None:
    before = content_hash(Example)
    (tree / RECORD).write_text("recordk")
    (tree / KERNEL).write_text("ernel")
    assert content_hash(Example) != before
