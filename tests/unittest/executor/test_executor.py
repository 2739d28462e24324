"""The executor against real rank processes: responses, cancelling, dying, shutting down."""

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tensorrt_llm._torch.pyexecutor.messages import FinishReason, LlmResponse, NewRequest
from tensorrt_llm.executor import EngineDeadError, GenerationExecutor
from tensorrt_llm.sampling_params import SamplingParams

START_S = 60.0
MakeExecutor = Callable[..., GenerationExecutor]
News = LlmResponse | EngineDeadError


def request(request_id: int, last_token: int = 1, max_tokens: int = 3) -> NewRequest:
    return NewRequest(request_id, [7, last_token], SamplingParams(max_tokens=max_tokens))


def collect(news: "queue.Queue[News]") -> list[News]:
    """Everything up to the last response, or up to the engine's death."""
    got: list[News] = []
    while True:
        got.append(news.get(timeout=20))
        if isinstance(got[-1], EngineDeadError) or got[-1].finish_reason is not None:
            return got


def run_one(executor: GenerationExecutor, new: NewRequest) -> list[News]:
    news: queue.Queue[News] = queue.Queue()
    executor.submit([new], news.put)
    return collect(news)


def living_ranks(executor: GenerationExecutor) -> list[int]:
    return [process.pid for process in executor._ranks._processes if process.poll() is None]


def test_responses_arrive_in_order(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    assert not executor.is_healthy()
    ready = executor.wait_ready(START_S)
    assert (ready.max_seq_len, ready.vocab_size) == (64, 512)
    assert executor.is_healthy()
    news = run_one(executor, request(1, last_token=10, max_tokens=4))
    assert [r.token_ids for r in news] == [[11], [12], [13], [14]]
    assert [r.finish_reason for r in news] == [None, None, None, FinishReason.LENGTH]


def test_many_requests_at_once_on_two_ranks(make_executor: MakeExecutor) -> None:
    executor = make_executor(world_size=2)
    executor.wait_ready(START_S)
    boxes: list[queue.Queue[News]] = [queue.Queue() for _ in range(20)]
    for i, box in enumerate(boxes):
        executor.submit([request(i, last_token=i, max_tokens=1 + i % 5)], box.put)
    for i, box in enumerate(boxes):
        tokens = [token for r in collect(box) for token in r.token_ids]
        assert tokens == list(range(i + 1, i + 2 + i % 5))


def test_abort_ends_one_request_and_is_harmless_afterwards(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.wait_ready(START_S)
    news: queue.Queue[News] = queue.Queue()
    executor.submit([request(1, max_tokens=10_000)], news.put)
    news.get(timeout=10)
    executor.abort([1])
    assert collect(news)[-1].finish_reason is FinishReason.CANCELLED
    executor.abort([1])
    executor.abort([99])
    assert len(run_one(executor, request(2))) == 3
    assert news.empty()


def test_statistics(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.wait_ready(START_S)
    heard: list[int] = []
    executor.add_stats_listener(lambda stats: heard.append(stats.iter))
    executor.add_stats_listener(lambda stats: 1 // 0)
    assert executor.take_stats(0.0) == []
    run_one(executor, request(1, max_tokens=3))
    taken = executor.take_stats(5.0)
    while len(taken) < 3:
        taken += executor.take_stats(5.0)
    assert [stats.iter for stats in taken] == [1, 2, 3] == heard
    assert executor.latest_stats == taken[-1]


def test_failed_start_raises_with_the_traceback(make_executor: MakeExecutor) -> None:
    executor = make_executor(world_size=2, model="/fails/to/start")
    with pytest.raises(EngineDeadError, match="rank 1 died: Traceback(.|\n)*no such weights"):
        executor.wait_ready(START_S)
    assert not executor.is_healthy()
    assert living_ranks(executor) == []


def test_ready_in_time(make_executor: MakeExecutor) -> None:
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        make_executor().wait_ready(0.01)


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        (1001, "asked to fail on rank 1"),
        (2001, "rank 1 died: killed by SIGKILL"),
        (2000, "SIGKILL"),
    ],
)
def test_dead_rank_fails_everything(
    make_executor: MakeExecutor, trouble: int, message: str
) -> None:
    """The pending request, the one that did it, and the next one get the error; nothing hangs."""
    executor = make_executor(world_size=2)
    executor.wait_ready(START_S)
    obituaries: list[EngineDeadError] = []
    executor.add_death_listener(obituaries.append)
    news: queue.Queue[News] = queue.Queue()
    executor.submit([request(1, max_tokens=100_000), request(2, max_tokens=100_000)], news.put)
    culprit = run_one(executor, request(3, last_token=trouble))[-1]
    assert isinstance(culprit, EngineDeadError) and message in str(culprit)
    while not isinstance(error := news.get(timeout=5), EngineDeadError):
        pass
    assert error is culprit
    with pytest.raises(EngineDeadError, match=message):
        executor.submit([request(4)], news.put)
    assert not executor.is_healthy()
    assert living_ranks(executor) == []
    executor.add_death_listener(obituaries.append)
    assert obituaries == [culprit, culprit]


def test_unknown_message_fails_everything(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.wait_ready(START_S)
    error = run_one(executor, request(1, last_token=4000, max_tokens=100_000))[-1]
    assert isinstance(error, EngineDeadError) and "unknown message from the engine" in str(error)
    assert not executor.is_healthy() and living_ranks(executor) == []


def test_shutdown_is_quick_and_complete(make_executor: MakeExecutor) -> None:
    executor = make_executor(world_size=2)
    executor.wait_ready(START_S)
    directory = Path(executor._directory.name)
    news: queue.Queue[News] = queue.Queue()
    executor.submit([request(1, max_tokens=100_000)], news.put)
    start = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - start < 2.0
    assert living_ranks(executor) == [] and not directory.exists()
    assert isinstance(collect(news)[-1], EngineDeadError)
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.submit([request(2)], news.put)
    executor.shutdown()


def test_shutdown_kills_what_does_not_leave(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.wait_ready(START_S)
    executor.submit([request(1, last_token=3000)], lambda news: None)
    start = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - start < 4.0
    assert living_ranks(executor) == []


def test_ranks_ignore_ctrl_c_and_follow_a_killed_parent() -> None:
    """A server process that is killed leaves no ranks behind."""
    script = (
        "from tests.unittest.executor.conftest import FAKE_ENGINE, executor_config\n"
        "from tensorrt_llm.executor import GenerationExecutor\n"
        "from tensorrt_llm.executor.ranks import python_command\n"
        "code = f'import runpy; runpy.run_path({str(FAKE_ENGINE)!r}, run_name=\"__main__\")'\n"
        "executor = GenerationExecutor(executor_config(2), worker_command=python_command(code))\n"
        "executor.wait_ready(60)\n"
        "print('ready', flush=True)\n"
        "executor.submit([], print)\n"
        "import time; time.sleep(60)\n"
    )
    root = Path(__file__).parents[3]
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=root)
    assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
    ranks = psutil.Process(parent.pid).children()
    assert len(ranks) == 2
    for rank in ranks:
        os.kill(rank.pid, signal.SIGINT)
    assert psutil.wait_procs(ranks, timeout=0.5)[0] == []
    parent.kill()
    parent.wait()
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
