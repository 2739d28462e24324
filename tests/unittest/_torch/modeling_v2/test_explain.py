"""`python -m tensorrt_llm._torch.modeling_v2.explain`, as one types it, and its parts."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers.example_op import ScaledAppend
from helpers.glm_52 import glm_52_checkpoint
from helpers.glm_tiny import CHECKPOINT

from tensorrt_llm._torch.modeling_v2 import _router_index, explain
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa import routing

ROOT = Path(__file__).parents[4]
MODULE = "tensorrt_llm._torch.modeling_v2.explain"
DEPLOYMENT = ("--tp", "16", "--sm", "10.7", "--spec", "mtp_eagle:7")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return glm_52_checkpoint(tmp_path)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """GLM-5.2's target can be imported and has the example op, in one cell per step size."""
    module = routing.TARGET_MODULES["ModelingV2Glm52Nvfp4Sm107Tp16"]
    name = f"{_router_index.PACKAGE}.{module}"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    record = type("Example", (ScaledAppend,), {"__doc__": ScaledAppend.__doc__})
    record.__module__ = f"{_router_index.PACKAGE}.models.glm_moe_dsa.x.ops.moe.example"
    monkeypatch.setattr(explain, "all_ops", lambda: {"test_scaled_append": record})


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", MODULE, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_command_tells_every_criterion_without_a_gpu(model: Path) -> None:
    result = run("--model", str(model), "--tp", "16", "--ep", "16", "--sm", "10.3", "--json")
    report = json.loads(result.stdout)
    assert result.returncode == 1, result.stderr
    assert report["target"] is None
    outcomes = {step["label"]: step["outcome"] for step in report["criteria"]}
    assert outcomes["shape"] == "glm_5_2_nvfp4"
    assert [label for label, outcome in outcomes.items() if outcome is None] == [
        "sm",
        "moe_ep_size",
    ]
    assert "sm is (10, 3), it needs (10, 7)" in report["reason"]


def test_a_miss_is_exit_code_1(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(model), "--tp", "8", "--attention-dp", "--spec", "ngram:4"]
    assert explain.main(arguments) == 1
    out = capsys.readouterr().out
    for label in ("sm", "tp_size", "enable_attention_dp", "spec"):
        line = next(line for line in out.splitlines() if line.startswith(f"{label} "))
        assert "NO MATCH" in line
    assert "no target: glm_5_2_nvfp4 has no target here: sm is None" in out


def test_a_target_is_exit_code_0_with_its_ops(
    model: Path, built: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain.main(["--model", str(model), *DEPLOYMENT]) == 0
    last = capsys.readouterr().out.splitlines()[-2:]
    directory = "models/glm_moe_dsa/glm_5_2_nvfp4__sm_107__tp16"
    assert last[0] == f"target ModelingV2Glm52Nvfp4Sm107Tp16 in {directory}"
    # 8 verify rows of 16 fp32 read, bf16 written, an int64 slot read and an fp32 sum written each
    moved = 8 * (16 * (4 + 2) + 8 + 4)
    assert last[1].split() == (
        f"test_scaled_append {moved} B no architecture as many rows as the pool".split()
    )


def test_the_json_report_has_the_ops_cell_bytes_and_certification(
    model: Path, built: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain.main(["--model", str(model), "--tp", "16", "--sm", "10.7", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["target"] == "ModelingV2Glm52Nvfp4Sm107Tp16"
    assert report["ops"] == [
        {
            "op": "test_scaled_append",
            "cell": "one row",
            "bytes": 16 * (4 + 2) + 8 + 4,
            "certification": dict.fromkeys(("sm_90", "sm_100", "sm_103", "sm_107"), "none"),
        }
    ]


def test_a_step_size_without_a_cell_takes_the_first(model: Path, built: None) -> None:
    lines = explain.op_lines(routing.TARGET_MODULES["ModelingV2Glm52Nvfp4Sm107Tp16"], rows=3)
    assert [line.cell for line in lines] == ["one row"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sm", "107"), "'107' is no compute capability; write 10.7"),
        (("--spec", "mtp_eagle"), "'mtp_eagle' is none of mtp_eagle, mtp, ngram"),
        (("--spec", "eagle3:4"), "'eagle3:4' is none of"),
        (("--spec", "mtp:0"), "'mtp:0' is none of"),
        (("--tp", "3", "--ep", "2"), "must equal tp_size 3"),
        (("--model", "/no/where"), "/no/where/config.json does not exist"),
    ],
)
def test_bad_flags_are_named(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        explain.main(["--model", str(CHECKPOINT), *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
