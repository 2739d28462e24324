"""trtllm-llmapi-launch: alone, and under a real mpirun with two ranks."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tensorrt_llm.commands.launch import environment_of_command, started_tasks

ROOT = Path(__file__).parents[3]
CHECKPOINT = ROOT / "examples" / "glm_tiny" / "checkpoint"
LAUNCH = [sys.executable, "-m", "tensorrt_llm.commands.launch"]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
ENVIRON = {
    **{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
GENERATE = f"""
import os, sys
from tensorrt_llm import LLM, SamplingParams

def new_llm(**args):
    return LLM({str(CHECKPOINT)!r}, device="cpu", max_seq_len=128, **args)

def tokens_of(llm):
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    return llm.generate("1+1=", params).outputs[0].token_ids
"""


def run(
    command: list[str], timeout: float = 120, **environ: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        cwd=ROOT,
        env=ENVIRON | environ,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def mpirun(script: str) -> "subprocess.CompletedProcess[str]":
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    if MPIRUN is None:
        pytest.skip("there is no mpirun")
    return run([MPIRUN, "--oversubscribe", "-n", "2", *LAUNCH, sys.executable, "-c", script])


@pytest.mark.parametrize(
    ("environ", "tasks"),
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_NTASKS": "2"}, 4),
        ({"PMI_SIZE": "3"}, 3),
        ({"SLURM_NTASKS": "16"}, 16),
    ],
)
def test_started_tasks(environ: dict[str, str], tasks: int) -> None:
    assert started_tasks(environ) == tasks


def test_the_command_knows_nothing_of_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID", "UCX_TLS"):
        monkeypatch.setenv(name, "1")
    environ = environment_of_command(4, "tcp://127.0.0.1:5", b"\x01\xff")
    assert not [k for k in environ if k.startswith(("OMPI_", "PMIX_", "SLURM_"))]
    assert environ["UCX_TLS"] == "1" and environ["PATH"] == os.environ["PATH"]
    assert environ["TLLM_SPAWN_PROXY_PROCESS"] == "1"
    assert environ["tllm_mpi_size"] == "4"
    assert environ["TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"] == "tcp://127.0.0.1:5"
    assert environ["TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY"] == "01ff"


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ([], 1, "usage: trtllm-llmapi-launch COMMAND"),
        (["/no/such/command"], 127, "cannot run /no/such/command: No such file"),
        (["sh", "-c", "echo said >&2; exit 7"], 7, "said"),
        (["sh", "-c", "kill -9 $$"], 137, ""),
    ],
)
def test_exit_codes(command: list[str], code: int, message: str) -> None:
    done = run([*LAUNCH, *command])
    assert done.returncode == code and message in done.stderr


def test_mpi4py_is_asked_for_only_when_needed() -> None:
    code = (
        "import sys; sys.modules['mpi4py'] = None; "
        "from tensorrt_llm.commands.launch import main; main()"
    )
    alone = run([sys.executable, "-c", code, "true"])
    assert alone.returncode == 0, alone.stderr
    several = run([sys.executable, "-c", code, "true"], PMI_SIZE="2")
    assert several.returncode == 1
    assert "2 tasks were started, and they need mpi4py" in several.stderr


def test_signals_reach_the_command() -> None:
    launch = subprocess.Popen(
        [*LAUNCH, "sh", "-c", "trap 'exit 5' TERM; echo up; while :; do sleep 0.1; done"],
        cwd=ROOT,
        env=ENVIRON,
        stdout=subprocess.PIPE,
    )
    assert launch.stdout is not None and launch.stdout.readline() == b"up\n"
    launch.send_signal(signal.SIGTERM)
    assert launch.wait(10) == 5


def test_alone_two_engines_and_a_command_that_dies() -> None:
    """One engine after another, a wrong size is refused, and a killed command ends everything."""
    script = GENERATE + (
        "for _ in range(2):\n"
        "    with new_llm() as llm:\n"
        "        print(tokens_of(llm))\n"
        "try:\n"
        "    new_llm(tensor_parallel_size=2)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "llm = new_llm()\n"
        "print('up', flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    start = time.monotonic()
    done = run([*LAUNCH, sys.executable, "-c", script])
    assert done.returncode == 137, done.stderr
    first, second, error, up = done.stdout.splitlines()
    assert first == second and len(first.split()) == 6 and up == "up"
    assert error.startswith("trtllm-llmapi-launch runs 1 ranks, but the configuration needs 2")
    assert time.monotonic() - start < 60


def test_two_mpi_ranks_are_one_engine() -> None:
    script = GENERATE + (
        "for _ in range(2):\n"
        "    with new_llm(tensor_parallel_size=2) as llm:\n"
        "        print(tokens_of(llm), flush=True)\n"
        "sys.exit(3)\n"
    )
    done = mpirun(script)
    alone = run([sys.executable, "-c", GENERATE + "print(tokens_of(new_llm()))"])
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines()[:2] == [alone.stdout.strip()] * 2


def test_an_mpi_rank_that_cannot_start_ends_the_job() -> None:
    script = GENERATE + (
        "try:\n"
        "    new_llm(tensor_parallel_size=2, max_seq_len=5000)\n"
        "except RuntimeError as error:\n"
        "    print('told:', error, flush=True)\n"
        "    sys.exit(4)\n"
    )
    done = mpirun(script.replace("max_seq_len=128, **args", "**args"))
    assert done.returncode != 0
    assert "told: rank" in done.stdout and "max_seq_len is 5000" in done.stdout
    assert "died: Traceback" in done.stderr
