"""Receipts: which ops passed their GPU test, over all cells, on which architecture.

A receipt is the hash of the files it was earned with: record, kernel sources and test. Changing any
of them voids it until the test ran again. `receipts/<arch>.json` holds one architecture's, by op.

    python -m tensorrt_llm._torch.modeling_v2.receipts

runs the tests of all ops that have a kernel in this installation, on its GPU, and writes the
receipts that they earn. It works in a source tree only, where tests and kernel sources are.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from xml.etree import ElementTree

import torch

from tensorrt_llm._torch.modeling_v2.catalog._op import PACKAGE, Arch, OpWrapper, all_ops

ROOT = Path(__file__).parents[3]
TESTS = "tests/unittest/_torch/modeling_v2"


class Certification(StrEnum):
    CERTIFIED = "certified"
    STALE = "stale"  # a file changed since the test ran
    NONE = "none"


def record_files(record: type[OpWrapper]) -> list[str]:
    """What a receipt vouches for, relative to the source tree: record, test, kernel sources."""
    module = record.__module__.removeprefix(f"{PACKAGE}.").split(".")
    test = "/".join((TESTS, *module[:-1], f"test_{module[-1]}.py"))
    return [f"{record.__module__.replace('.', '/')}.py", test, *record.SOURCES]


def content_hash(record: type[OpWrapper]) -> str:
    """SHA-256 over the names and contents of the record's files.

    Raises:
        FileNotFoundError: one of them is not there.
    """
    digest = hashlib.sha256()
    for name in record_files(record):
        content = (ROOT / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def load(arch: Arch) -> dict[str, str]:
    """The architecture's receipts: op name -> hash."""
    return json.loads(_path(arch).read_text())


def verify(record: type[OpWrapper], arch: Arch) -> Certification:
    """Whether the op is certified for the architecture, as its files are now."""
    receipt = load(arch).get(record.name())
    if receipt is None:
        return Certification.NONE
    try:
        current = content_hash(record) == receipt
    except FileNotFoundError:
        current = False
    return Certification.CERTIFIED if current else Certification.STALE


def certify(record: type[OpWrapper], arch: Arch) -> None:
    """Run the op's test on this machine, which has a GPU of `arch`, and write its receipt.

    Raises:
        RuntimeError: a test failed or was skipped, or `test_kernel` did not run on every cell.
    """
    before = content_hash(record)
    ran = _run_test(record_files(record)[1])
    cells = sum(name.startswith("test_kernel[") for name in ran)
    if cells != len(record.CELLS):
        raise RuntimeError(
            f"{record.name()}: test_kernel ran {cells} times; it has {len(record.CELLS)} cells"
        )
    receipts = {**load(arch), record.name(): before}
    _path(arch).write_text(json.dumps(receipts, indent=2, sort_keys=True) + "\n")


def _run_test(file: str) -> list[str]:
    """The names of the file's tests, which have all passed."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", file]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    skipped = [case.get("name") for case in cases if case.find("skipped") is not None]
    if result.returncode or skipped or not cases:
        raise RuntimeError(f"{file} did not pass (skipped: {skipped}):\n{result.stdout}")
    return [case.get("name", "") for case in cases]


def _path(arch: Arch) -> Path:
    return ROOT / "tensorrt_llm/_torch/modeling_v2/receipts" / f"{arch}.json"


def main() -> None:
    arch = Arch.of(torch.cuda.get_device_capability())
    for record in all_ops().values():
        if record.has_kernel():
            certify(record, arch)
            print(f"{record.name()}: {arch} {len(record.CELLS)} cells")


if __name__ == "__main__":
    main()
