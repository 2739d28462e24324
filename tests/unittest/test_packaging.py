import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def distribution_name(requirement: str) -> str:
    """The normalised name at the start of a requirement or constraint line."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", requirement)[0]).lower()


def pinned() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {distribution_name(line) for line in lines if not line.startswith("#")}


def test_the_distribution_and_its_extras():
    assert PROJECT["name"] == "tensorrt-llm-glm"
    assert {"cuda", "disagg", "build", "test"} <= PROJECT["optional-dependencies"].keys()


def test_the_console_scripts():
    assert PROJECT["scripts"].keys() == {
        "trtllm-serve",
        "trtllm-bench",
        "trtllm-eval",
        "trtllm-llmapi-launch",
    }


@pytest.mark.parametrize(("script", "target"), PROJECT["scripts"].items())
def test_each_console_script_leads_to_a_function(script, target):
    module, function = target.split(":")
    assert callable(getattr(importlib.import_module(module), function)), script


def test_constraints_pin_everything_that_make_installs():
    extras = PROJECT["optional-dependencies"]
    needed = PROJECT["dependencies"] + extras["test"] + extras["lint"]
    assert {distribution_name(one) for one in needed} <= pinned()


def test_constraints_are_exact():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins)
    assert "torch==2.13.0" in pins


@pytest.mark.parametrize(
    "module",
    ["tensorrt_llm", "tensorrt_llm.commands.serve", "tensorrt_llm.mapping"],
)
def test_importing_the_front_stays_light(module):
    code = (
        f"import {module}, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"


def test_make_knows_the_promised_commands():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("serve", "test", "lint", "install"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_ci_runs_lint_and_tests():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert {"make lint", "make test"} <= set(script.read_text().splitlines())


def test_markers_are_strict():
    options = PYPROJECT["tool"]["pytest"]["ini_options"]
    assert "--strict-markers" in options["addopts"]
    assert {line.split(":")[0] for line in options["markers"]} == {"gpu", "multi_gpu", "slow"}
