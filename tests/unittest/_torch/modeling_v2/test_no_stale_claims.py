"""No file of the package speaks of versions or dates, which would be wrong soon."""

import re
from pathlib import Path

import pytest

from tensorrt_llm._torch import modeling_v2

ROOT = Path(modeling_v2.__file__).parent
FILES = sorted(p for p in ROOT.rglob("*") if p.suffix in {".py", ".md", ".yaml", ".json"})
STALE = {
    "a release candidate": r"\b\d+\.\d+\.\d+rc\d+",
    "a version of a package": r"(?i)\b(torch|triton|flashinfer|tensorrt_llm|cuda)\W{1,3}v?\d+\.\d",
    "a date": r"\b20[2-9]\d-[01]\d\b",
}


@pytest.mark.parametrize("file", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_goes_stale(file: Path) -> None:
    text = file.read_text()
    found = {what: m.group() for what, rx in STALE.items() if (m := re.search(rx, text))}
    assert not found


@pytest.mark.parametrize("text", ["1.4.0rc2", "needs torch>=2.11", "flashinfer 0.6", "2031-04-01"])
def test_stale_words_are_found(text: str) -> None:
    assert any(re.search(rx, text) for rx in STALE.values())
