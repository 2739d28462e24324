"""The command line of trtllm-serve, up to the moment when the engine would start."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tensorrt_llm.commands.serve import ENGINE_FLAGS, UNSUPPORTED_FLAGS, main, serve
from tensorrt_llm.llmapi.llm_args import LlmArgs
from tensorrt_llm.logger import logger
from tensorrt_llm.serve import launcher


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[LlmArgs]:
    """Engine arguments of the servers that would have started."""
    args: list[LlmArgs] = []
    monkeypatch.setattr("tensorrt_llm.commands.serve._load", args.append)
    monkeypatch.setenv("TLLM_LOG_LEVEL", "info")
    monkeypatch.setattr(logger, "level", logger.level)

    def start(load, sock, name, template) -> int:  # type: ignore[no-untyped-def]
        load()
        sock.close()
        return 0

    monkeypatch.setattr(launcher, "serve", start)
    return args


def test_help_is_quick_and_names_every_flag() -> None:
    code = (
        "import sys; from tensorrt_llm.commands.serve import main\n"
        "try: main(['serve', '--help'])\n"
        "finally: assert not {'torch', 'transformers', 'fastapi'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert all(name in result.stdout for flag in ENGINE_FLAGS for name in flag.names)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model", "--prot", "1"], ["--prot", "--port"]),
        (["model", "--tpsize", "1"], ["--tpsize", "--tp_size"]),
        (["model", "--port", "x"], ["--port", "'x'"]),
        (["model", "--log_level", "loud"], ["loud", "'info'"]),
        (["model", "--tp_size", "two"], ["two", "integer"]),
        (["model", "--kv_cache_dtype", "fp4"], ["kv_cache_config.dtype", "'fp4'", "'fp8'"]),
        (["model", "--pp_size", "2"], ["pipeline_parallel_size", "2", "not supported", "only 1"]),
        (["model", "--backend", "_autodeploy"], ["backend", "_autodeploy", "pytorch"]),
        (["model", "--grpc"], ["TensorRT-LLM's --grpc is not supported by this project yet"]),
        (["model", "--config", "absent.yaml"], ["absent.yaml"]),
        (["disaggregated", "-c", "x"], ["disaggregated", "not supported by this project yet"]),
        ([], ["Usage"]),
    ],
)
def test_mistakes_say_what_would_be_right(arguments: list[str], words: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert all(word in result.output for word in words), result.output


def test_every_unsupported_flag_is_refused_as_such() -> None:
    known = {name for option in serve.params for name in option.opts}
    assert not known & UNSUPPORTED_FLAGS
    for flag in sorted(UNSUPPORTED_FLAGS):
        assert f"TensorRT-LLM's {flag} is not supported" in run("model", flag, "1").output


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("max_batch_sise: 4", ["max_batch_sise", "max_batch_size"]),
        ("max_batch_size: four", ["max_batch_size", "'four'"]),
        ("kv_cache_config: {dtyp: fp8}", ["dtyp", "'dtype'"]),
        (
            "speculative_config: {decoding_type: NGram}",
            ["speculative_config.decoding_type", "NGram"],
        ),
        ("skip_tokenizer_init: true", ["skip_tokenizer_init", "tokenizer"]),
        ("- 1", ["mapping"]),
        ("a: [", ["YAML"]),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, yaml: str, words: list[str]) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(yaml)
    result = run("model", "--config", str(file))
    assert result.exit_code == 2
    assert all(word in result.output for word in words), result.output


@pytest.mark.parametrize("command", [["serve"], []])
def test_the_file_wins_over_the_flags(
    started: list[LlmArgs], tmp_path: Path, command: list[str]
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("max_batch_size: 4\nkv_cache_config: {tokens_per_block: 64}\n")
    flags = ["--max_batch_size", "8", "--max_num_tokens", "100", "--kv_cache_dtype", "fp8"]
    result = run(*command, "model", "--port", "0", *flags, "--config", str(file))
    assert result.exit_code == 0, result.output
    args = started[0]
    assert (args.max_batch_size, args.max_num_tokens) == (4, 100)
    assert (args.kv_cache_config.dtype, args.kv_cache_config.tokens_per_block) == ("fp8", 64)


def test_without_flags_the_engine_has_its_own_defaults(started: list[LlmArgs]) -> None:
    assert run("model", "--port", "0").exit_code == 0
    assert started == [LlmArgs.create({"model": "model"})]


def test_flags_are_engine_arguments(started: list[LlmArgs]) -> None:
    values = {int: "1", float: "0.5", str: "auto", bool: None}
    given = {"backend": "pytorch"}
    arguments = [
        word
        for flag in ENGINE_FLAGS
        for word in (flag.names[-1], given.get(flag.path, values[flag.kind]))
        if word is not None
    ]
    result = run("model", "--port", "0", *arguments)
    assert result.exit_code == 0, result.output
    assert started[0].enable_chunked_prefill is True
    assert started[0].kv_cache_config.free_gpu_memory_fraction == 0.5


def test_the_log_level_reaches_the_ranks(started: list[LlmArgs]) -> None:
    assert run("model", "--port", "0", "--log_level", "error").exit_code == 0
    assert os.environ["TLLM_LOG_LEVEL"] == "error"
    assert logger.level == logging.ERROR


def test_an_address_that_cannot_be_had(started: list[LlmArgs]) -> None:
    result = run("model", "--host", "192.0.2.1", "--port", "0")
    assert result.exit_code == 1
    assert "cannot listen on 192.0.2.1:0" in result.output
