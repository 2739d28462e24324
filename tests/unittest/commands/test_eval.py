"""trtllm-eval: its samples, its counting, its mistakes, and what it finds on glm_tiny."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tensorrt_llm.commands.eval import main
from tensorrt_llm.commands.evaluation import TASK_FILES, Sample, read_samples, same_length_batches
from tensorrt_llm.commands.evaluation import Result as EvalResult

CHECKPOINT = Path(__file__).parents[3] / "examples" / "glm_tiny" / "checkpoint"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def sample(question: str, answer: str) -> Sample:
    return Sample([{"role": "user", "content": question}], answer)


# --- samples --------------------------------------------------------------------------------------


@pytest.fixture
def heldout(tmp_path: Path) -> Path:
    """A directory with six samples."""
    lines = (
        json.dumps({"messages": [{"role": "user", "content": f"{i}?"}], "answer": f"{i}\u2028日本"})
        for i in range(6)
    )
    (tmp_path / "heldout.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_all_samples(heldout: Path) -> None:
    samples = read_samples("glm_tiny", heldout, None)
    assert samples == [sample(f"{i}?", f"{i}\u2028日本") for i in range(6)]


def test_a_part_is_spread_evenly(heldout: Path) -> None:
    samples = read_samples("glm_tiny", heldout, 3)
    assert [s.messages[0]["content"] for s in samples] == ["0?", "2?", "4?"]


def test_more_samples_than_there_are(heldout: Path) -> None:
    with pytest.raises(ValueError, match="has 6 samples; 7 are wanted"):
        read_samples("glm_tiny", heldout, 7)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"answer": "x"}',
        '{"messages": [], "answer": "x"}',
        '{"messages": [{"role": "user"}], "answer": "x"}',
        '{"messages": [{"role": "user", "content": "a"}], "answer": 1}',
    ],
)
def test_bad_lines_are_named(heldout: Path, line: str) -> None:
    with (heldout / "heldout.jsonl").open("a") as file:
        file.write(line)
    with pytest.raises(ValueError, match=r"heldout\.jsonl:7 "):
        read_samples("glm_tiny", heldout, None)


def test_prompts_are_batched_by_length() -> None:
    prompts = [[1, 2], [3], [4, 5], [6, 7, 8], [9]]
    batches = list(same_length_batches(prompts))
    assert batches == [([1, 4], [[3], [9]]), ([0, 2], [[1, 2], [4, 5]]), ([3], [[6, 7, 8]])]


# --- counting -------------------------------------------------------------------------------------

SAMPLES = [sample("a", "1"), sample("b", "2"), sample("c", "3"), sample("d", "4")]


def test_result() -> None:
    answers = {"tensorrt_llm": ["1", " 2\n", "x", "5"], "transformers": ["1", " 2\n", "3", "5"]}
    result = EvalResult(SAMPLES, answers)
    assert (result.correct("tensorrt_llm"), result.correct("transformers")) == (2, 3)
    rows = [line.split() for line in result.as_text().splitlines()]
    assert rows == [
        ["correct", "accuracy"],
        ["tensorrt_llm", "2/4", "50.0%"],
        ["transformers", "3/4", "75.0%"],
        ["same", "answers", "3/4", "75.0%"],
    ]
    found = result.as_dict()
    assert found["tensorrt_llm"] == {"correct": 2, "accuracy": 0.5}
    assert found["transformers"]["accuracy"] == 0.75
    assert [mistake["messages"][0]["content"] for mistake in found["mistakes"]] == ["c", "d"]
    assert found["mistakes"][0]["tensorrt_llm"] == "x"


def test_result_without_a_peer() -> None:
    result = EvalResult(SAMPLES, {"tensorrt_llm": ["1", "2", "3", "4"]})
    assert "same answers" not in result.as_text()
    assert result.as_dict()["mistakes"] == []


def test_case_and_inner_white_space_count() -> None:
    assert EvalResult([sample("a", "x y")], {"e": ["x  y"]}).correct("e") == 0
    assert EvalResult([sample("a", "x y")], {"e": ["X y"]}).correct("e") == 0


# --- the command line -----------------------------------------------------------------------------


def test_help_is_quick() -> None:
    code = (
        "import sys; from tensorrt_llm.commands.eval import main\n"
        "try: main(['--help'])\n"
        "finally: assert not {'torch', 'transformers', 'numpy', 'zmq'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert all(task in result.stdout for task in TASK_FILES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "glm_tiny"], ["--model"]),
        (["--model", CHECKPOINT], ["--task", "glm_tiny"]),
        (["--model", CHECKPOINT, "--task", "gsm8k"], ["gsm8k", "glm_tiny"]),
        (
            ["--model", CHECKPOINT.parent, "--task", "glm_tiny"],
            ["heldout.jsonl does not exist", "glm_tiny"],
        ),
        (["--model", CHECKPOINT, "--task", "glm_tiny", "--samples", "3"], ["--num_samples"]),
        (["--model", CHECKPOINT, "--task", "glm_tiny", "--num_samples", "0"], ["x>=1"]),
        (["--model", CHECKPOINT, "--task", "glm_tiny", "--num_samples", "99999"], ["99999"]),
        (["--model", CHECKPOINT, "--task", "glm_tiny", "--tp_size", "3"], ["tensor_parallel_size"]),
    ],
)
def test_mistakes_get_one_message(arguments: list[object], words: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert "Traceback" not in result.output
    assert all(word in result.output for word in words), result.output


def test_no_tokenizer_no_evaluation(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("skip_tokenizer_init: true\n")
    result = run("--model", CHECKPOINT, "--task", "glm_tiny", "--config", config)
    assert result.exit_code == 1
    assert "needs the tokenizer" in result.output


# --- real runs ------------------------------------------------------------------------------------


def evaluate(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    """The JSON of a run on glm_tiny with transformers' epsilon, so that both compute the same."""
    config, report = tmp_path / "config.yaml", tmp_path / "report.json"
    config.write_text("latent_norm_eps: 1.0e-6\nnum_threads: 1\n")
    result = run(
        *("--model", CHECKPOINT, "--task", "glm_tiny", "--config", config),
        *("--output_json", report, *arguments),
    )
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def test_a_real_run_agrees_with_transformers(tmp_path: Path) -> None:
    found = evaluate(tmp_path, "--num_samples", 6)
    assert found["num_samples"] == found["same_answers"] == 6
    assert found["tensorrt_llm"] == found["transformers"]
    assert found["settings"]["task"] == "glm_tiny"


@pytest.mark.slow
def test_glm_tiny_is_right_nine_times_out_of_ten(tmp_path: Path) -> None:
    found = evaluate(tmp_path, "--no-peer")
    assert found["num_samples"] >= 200
    assert found["tensorrt_llm"]["accuracy"] >= 0.9
