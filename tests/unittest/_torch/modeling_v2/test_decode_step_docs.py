"""docs/decode_step.md shows the step as it runs."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[4] / "docs"


def test_timelines_are_those_of_a_run() -> None:
    script = runpy.run_path(str(DOCS / "generate_decode_step.py"))
    text = (DOCS / "decode_step.md").read_text()
    filled = script["filled"](text, script["recorded_step"]())
    assert filled == text, "run `python docs/generate_decode_step.py`"
