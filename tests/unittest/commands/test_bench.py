"""trtllm-bench: its statistics, its workloads, its mistakes, and what it finds on glm_tiny."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm.commands.bench import main
from tensorrt_llm.commands.benchmark.engine import BenchError, Run
from tensorrt_llm.commands.benchmark.latency import measure, same_outputs
from tensorrt_llm.commands.benchmark.memory import MemoryReport, peak_rss_bytes
from tensorrt_llm.commands.benchmark.peer import TransformersPeer
from tensorrt_llm.commands.benchmark.report import EngineReport, Report
from tensorrt_llm.commands.benchmark.timing import (
    Arrival,
    RequestTiming,
    Step,
    bucket_width,
    context_buckets,
    nearest_multiple,
    speedup,
    summarize,
)
from tensorrt_llm.commands.benchmark.workload import (
    BenchRequest,
    random_requests,
    read_dataset,
)
from tensorrt_llm.commands.output import table
from tensorrt_llm.llmapi import SpeculationStats

GLM_TINY = Path(__file__).parents[3] / "examples" / "glm_tiny"
CHECKPOINT = GLM_TINY / "checkpoint"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["latency", *map(str, arguments)])


def timing(*arrivals: tuple[float, int], prompt: int = 10) -> RequestTiming:
    """Arrivals as (milliseconds, tokens)."""
    return RequestTiming(prompt, tuple(Arrival(ms / 1e3, tokens) for ms, tokens in arrivals))


def steady(prompt: int, step_ms: Sequence[float], ttft_ms: float = 20.0) -> RequestTiming:
    """One token per step, each taking its time."""
    times = [ttft_ms + sum(step_ms[:i]) for i in range(len(step_ms) + 1)]
    return timing(*((ms, 1) for ms in times), prompt=prompt)


# --- statistics -----------------------------------------------------------------------------------


def test_known_numbers() -> None:
    summary = summarize([timing((30, 1), (40, 1), (50, 1), (80, 1)), timing((10, 1), (20, 1))])
    assert summary.requests == 2
    assert summary.output_tokens == 6
    assert summary.ttft_ms == pytest.approx(20)
    assert summary.itl_ms_p50 == pytest.approx(10)  # of 10, 10, 30, 10
    assert summary.itl_ms_p90 == pytest.approx(24)
    assert summary.tpot_ms == pytest.approx((50 / 3 + 10) / 2)
    assert summary.latency_ms == pytest.approx((80 + 20) / 2)
    assert summary.tokens_per_second_per_user == pytest.approx(1000 / summary.tpot_ms)
    assert summary.tokens_per_step == 1.0


def test_a_step_with_several_tokens_divides_its_time_among_them() -> None:
    summary = summarize([timing((10, 1), (22, 3), (26, 1))])
    assert summary.tokens_per_step == 2.0
    assert summary.itl_ms_p50 == pytest.approx(4)  # of 4, 4, 4, 4
    assert summary.tpot_ms == pytest.approx(4)


def test_steps_know_their_context() -> None:
    steps = timing((10, 1), (20, 3), (30, 2), prompt=7).steps
    assert [(step.context, step.tokens) for step in steps] == [(8, 3), (11, 2)]


@pytest.mark.parametrize("timings", [[], [timing((10, 1))]])
def test_no_decode_step_is_an_error(timings: list[RequestTiming]) -> None:
    with pytest.raises(ValueError, match="at least two responses"):
        summarize(timings)


def test_a_request_without_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="without a token"):
        RequestTiming(3, ())


steps_of_a_request = st.lists(
    st.tuples(st.floats(0.01, 100), st.integers(1, 8)), min_size=2, max_size=40
)


@given(st.lists(steps_of_a_request, min_size=1, max_size=5), st.floats(0.1, 10))
def test_numbers_scale_with_time(requests: list[list[tuple[float, int]]], factor: float) -> None:
    def build(scale: float) -> list[RequestTiming]:
        timings = []
        for steps in requests:
            ends = [sum(ms for ms, _ in steps[: i + 1]) * scale for i in range(len(steps))]
            arrivals = zip(ends, (tokens for _, tokens in steps), strict=True)
            timings.append(timing(*arrivals))
        return timings

    plain, scaled = build(1.0), build(factor)
    before, after = summarize(plain), summarize(scaled)
    assert before.itl_ms_p50 <= before.itl_ms_p90
    assert before.output_tokens == sum(tokens for steps in requests for _, tokens in steps)
    assert 1 <= before.tokens_per_step <= 8
    for name in ("ttft_ms", "itl_ms_p50", "itl_ms_p90", "tpot_ms", "latency_ms"):
        assert getattr(after, name) == pytest.approx(factor * getattr(before, name), rel=1e-6)
    gain = speedup(plain, scaled)
    assert (gain.ttft, gain.decode, gain.latency) == pytest.approx((factor,) * 3, rel=1e-6)


@given(st.lists(steps_of_a_request.map(lambda s: timing(*enumerate_ms(s))), min_size=1))
def test_times_of_a_request_add_up(timings: list[RequestTiming]) -> None:
    for one in timings:
        decode = sum(step.seconds for step in one.steps)
        assert one.ttft_s + decode == pytest.approx(one.latency_s)
        tokens = one.arrivals[0].tokens + sum(step.tokens for step in one.steps)
        assert tokens == one.output_tokens


def enumerate_ms(steps: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Durations as points in time."""
    return [(sum(ms for ms, _ in steps[: i + 1]), tokens) for i, (_, tokens) in enumerate(steps)]


# --- context --------------------------------------------------------------------------------------


def test_the_default_lengths_fill_the_buckets_around_64_and_448() -> None:
    steps = steady(32, [5.0] * 447).steps
    assert [bucket.context for bucket in context_buckets(steps)] == list(range(64, 449, 64))


def test_growth_compares_the_ends() -> None:
    times = [10.0 + context / 100 for context in range(33, 480)]
    summary = summarize([steady(32, times), steady(32, times)])
    assert summary.context_growth == pytest.approx((10.0 + 4.22) / (10.0 + 0.39) - 1, abs=0.01)


def test_growth_does_not_see_other_work_on_the_machine() -> None:
    times = [4.0 if i % 5 else 9.0 for i in range(447)]
    times[300:] = [1.05 * ms + (6.0 if i % 3 else 0.0) for i, ms in enumerate(times[300:])]
    assert summarize([steady(32, times)]).context_growth == pytest.approx(0.05)


def test_one_bucket_has_no_growth() -> None:
    assert summarize([steady(40, [5.0] * 20)]).context_growth is None


def test_thin_buckets_are_left_out() -> None:
    steps = [Step(60, 1, 0.01)] * 20 + [Step(130, 1, 0.01)] * 3
    assert [bucket.context for bucket in context_buckets(steps)] == [64]


@given(st.integers(0, 2**20))
def test_buckets_are_few_and_nearest(context: int) -> None:
    width = bucket_width([context])
    centre = nearest_multiple(context, width)
    assert abs(centre - context) <= width // 2
    assert centre // width <= 16


# --- memory, report -------------------------------------------------------------------------------


def test_the_memory_bound() -> None:
    memory = MemoryReport(weights_bytes=50, kv_cache_bytes=50, peak_rss_bytes=390_000_130)
    assert memory.bound_bytes == 390_000_130
    assert memory.within_bound
    assert not replace(memory, peak_rss_bytes=390_000_131).within_bound


def test_peak_memory_of_processes() -> None:
    before = peak_rss_bytes(os.getpid())
    ballast = bytearray(b"x" * (before // 2 + 50_000_000))
    assert peak_rss_bytes(os.getpid()) > len(ballast)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with pytest.raises(ProcessLookupError, match=str(process.pid)):
        peak_rss_bytes(process.pid)


def test_table_aligns() -> None:
    assert table([["", "a"], ["long", "1.0"]]) == "         a\nlong   1.0"


def make_report(peak_rss_bytes: int) -> Report:
    ours, peers = [steady(32, [5.0] * 100)], [steady(32, [15.0] * 100, ttft_ms=40.0)]
    return Report(
        settings={"device": "cpu"},
        engines={
            "tensorrt_llm": EngineReport(summarize(ours), ours, peak_rss_bytes),
            "transformers": EngineReport(summarize(peers), peers, None),
        },
        memory=MemoryReport(
            weights_bytes=10**7, kv_cache_bytes=10**6, peak_rss_bytes=peak_rss_bytes
        ),
        speedup=speedup(ours, peers),
        same_outputs=1,
    )


def test_report_for_people() -> None:
    text = make_report(200 * 10**6).as_text()
    assert "3.00x tok/s/user" in text and "2.00x first token" in text
    assert "200 MB is within the bound of 404 MB" in text
    assert "Same tokens as the peer: 1 of 1 requests" in text
    (line,) = (line for line in text.splitlines() if line.startswith("~64 tokens of context"))
    assert line.split("ms")[1].split() == ["5.00", "/", "5.00", "15.00", "/", "15.00"]
    assert "500 MB is ABOVE the bound" in make_report(500 * 10**6).as_text()


def test_report_for_programs() -> None:
    report = json.loads(json.dumps(make_report(200 * 10**6).as_dict()))
    assert report["settings"] == {"device": "cpu"}
    assert report["tensorrt_llm"]["itl_ms_p50"] == pytest.approx(5.0)
    assert report["tensorrt_llm"]["per_request"] == [
        {"prompt_tokens": 32, "output_tokens": 101, "ttft_ms": 20.0, "latency_ms": 520.0}
    ]
    assert report["memory"]["within_bound"] is True
    assert report["speedup"]["decode"] == pytest.approx(3.0)


def test_report_of_an_engine_that_drafts() -> None:
    report = make_report(200 * 10**6)
    assert "Speculation" not in report.as_text()
    ours = replace(report.engines["tensorrt_llm"], speculation=SpeculationStats(4, (3, 1)))
    report = replace(report, engines={**report.engines, "tensorrt_llm": ours})
    line = "Speculation of tensorrt_llm: acceptance length 2.00, by position 0.75 0.25"
    assert line in report.as_text().splitlines()
    assert report.as_dict()["tensorrt_llm"]["speculation"]["acceptance_length"] == 2.0
    assert report.as_dict()["transformers"]["speculation"] is None


# --- workload -------------------------------------------------------------------------------------


def test_random_requests_repeat_themselves() -> None:
    requests = random_requests(3, 5, 7, 11, seed=1)
    assert requests == random_requests(3, 5, 7, 11, seed=1)
    assert requests != random_requests(3, 5, 7, 11, seed=2)
    assert {(len(r.prompt_token_ids), r.output_tokens) for r in requests} == {(5, 7)}
    assert all(0 <= i < 11 for r in requests for i in r.prompt_token_ids)
    assert len({tuple(r.prompt_token_ids) for r in requests}) == 3


def test_dataset(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"task_id": 1, "prompt": "ab", "output_tokens": 3}\n'
        '{"task_id": 2, "input_ids": [4, 5, 6], "output_tokens": 2}\n'
    )
    requests = read_dataset(path, lambda text: [ord(c) for c in text])
    assert requests == [BenchRequest([97, 98], 3), BenchRequest([4, 5, 6], 2)]
    assert [request.total_tokens for request in requests] == [5, 5]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "list"),
        ('{"prompt": "a", "output_tokens": 2, "lora": 1}', r"unknown keys \['lora'\]"),
        ('{"prompt": "a"}', "output_tokens is None"),
        ('{"prompt": "a", "output_tokens": 1}', "output_tokens is 1"),
        ('{"prompt": "a", "output_tokens": true}', "output_tokens is True"),
        ('{"output_tokens": 2}', "either prompt"),
        ('{"prompt": "", "output_tokens": 2}', "either prompt"),
        ('{"prompt": "a", "input_ids": [1], "output_tokens": 2}', "either prompt"),
        ('{"input_ids": [], "output_tokens": 2}', "either prompt"),
        ('{"input_ids": [1, "2"], "output_tokens": 2}', "either prompt"),
    ],
)
def test_bad_dataset_lines_are_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"input_ids": [4], "output_tokens": 2}\n' + line)
    with pytest.raises(ValueError, match=words) as caught:
        read_dataset(path, lambda text: [1])
    assert f"{path}:2" in str(caught.value)


def test_an_empty_dataset_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match="no requests"):
        read_dataset(path, lambda text: [1])


# --- order of measurement -------------------------------------------------------------------------


class Recorder:
    """An engine that notes whom it ran, and generates its own name."""

    def __init__(self, name: int, log: list[tuple[int, int]]) -> None:
        self.name, self.log = name, log

    def run(self, request: BenchRequest) -> Run:
        self.log.append((self.name, request.prompt_token_ids[0]))
        return Run(steady(1, [1.0, 1.0]), [self.name, request.prompt_token_ids[0] // 2])

    def peak_rss_bytes(self) -> None:
        return None

    def close(self) -> None:
        self.log.clear()


def test_engines_take_turns_and_warmup_does_not_count() -> None:
    log: list[tuple[int, int]] = []
    engines = {"a": Recorder(0, log), "b": Recorder(1, log)}
    requests = [BenchRequest([5], 3), BenchRequest([6], 3)]
    runs = measure(engines, requests, warmup=3, progress=False)
    visits = [5, 6, 5, 5, 6]
    assert log == [(engine, prompt) for prompt in visits for engine in (0, 1)]
    assert [len(of) for of in runs.values()] == [2, 2]


def test_same_outputs_are_counted() -> None:
    one, other = Run(steady(1, [1.0]), [1, 2]), Run(steady(1, [1.0]), [1, 3])
    assert same_outputs([one, one], [one, other]) == 1


# --- the command line -----------------------------------------------------------------------------


def test_help_is_quick() -> None:
    code = (
        "import sys; from tensorrt_llm.commands.bench import main\n"
        "try: main(['latency', '--help'])\n"
        "finally: assert not {'torch', 'transformers', 'numpy', 'zmq'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--peer" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--model"]),
        (["--model", "absent"], ["absent", "does not exist"]),
        (["--model", CHECKPOINT.parent], ["no config.json"]),
        (["--model", CHECKPOINT, "--input_lenn", "5"], ["--input_lenn", "--input_len"]),
        (["--model", CHECKPOINT, "--input_len", "0"], ["--input_len", "0"]),
        (["--model", CHECKPOINT, "--output_len", "1"], ["--output_len", "x>=2"]),
        (["--model", CHECKPOINT, "--input_len", "5000"], ["5448", "4096"]),
        (["--model", CHECKPOINT, "--concurrency", "2"], ["--concurrency", "1 user"]),
        (["--model", CHECKPOINT, "--peer", "vllm"], ["vllm", "transformers"]),
        (["--model", CHECKPOINT, "--peer", "no-drafts"], ["no-drafts", "speculative_config"]),
        (["--model", CHECKPOINT, "--num_threads", "0"], ["--num_threads"]),
        (["--model", CHECKPOINT, "--tp_size", "3"], ["tensor_parallel_size 3", "heads 4"]),
        (["--model", CHECKPOINT, "--dataset", __file__], ["test_bench.py:1 is not JSON"]),
        (
            ["--model", CHECKPOINT, "--input_len", "5", "--dataset", __file__],
            ["--input_len", "dataset"],
        ),
        (["--model", CHECKPOINT, "--config", __file__], ["test_bench.py"]),
    ],
)
def test_mistakes_get_one_message(arguments: list[object], words: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert "Traceback" not in result.output
    assert all(word in result.output for word in words), result.output


def test_a_peer_that_cannot_load_says_why(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="transformers failed: .*config"):
        TransformersPeer(tmp_path, "cpu", "float32", 1)


# --- real runs ------------------------------------------------------------------------------------


def bench(directory: Path, *arguments: object) -> dict[str, Any]:
    """The report of a run on glm_tiny with one thread."""
    path = directory / "report.json"
    result = run("--model", CHECKPOINT, "--num_threads", 1, "--output_json", path, *arguments)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def write_dataset(directory: Path, *requests: dict[str, Any]) -> Path:
    path = directory / "data.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def test_a_real_run(tmp_path: Path) -> None:
    dataset = write_dataset(
        tmp_path,
        {"prompt": "What is 12 + 34?", "output_tokens": 12},
        {"input_ids": [1, 2, 3], "output_tokens": 8},
        {"input_ids": [7], "output_tokens": 5},
    )
    report = bench(
        *(tmp_path, "--peer", "transformers", "--dataset", dataset),
        *("--num_requests", 2, "--warmup", 1),
    )
    assert report["settings"]["dtype"] == "float32"
    assert report["settings"]["num_threads"] == 1
    for engine in ("tensorrt_llm", "transformers"):
        assert report[engine]["requests"] == 2
        assert [r["output_tokens"] for r in report[engine]["per_request"]] == [12, 8]
        assert report[engine]["tokens_per_step"] == 1.0
        assert 0 < report[engine]["itl_ms_p50"] <= report[engine]["itl_ms_p90"]
        assert 0 < report[engine]["ttft_ms"] < report[engine]["latency_ms"]
        assert report[engine]["peak_rss_bytes"] > 10**8
    assert report["memory"]["weights_bytes"] > 10**6
    assert report["memory"]["within_bound"], report["memory"]
    assert report["same_outputs"] <= 2


def test_a_real_run_with_drafts(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, {"prompt": "What is 12 + 34?", "output_tokens": 12})
    config = tmp_path / "config.yaml"
    config.write_text("speculative_config: {decoding_type: MTP, max_draft_len: 2}\n")
    arguments = ("--dataset", dataset, "--warmup", 1, "--config", config)
    ours = bench(tmp_path, *arguments)["tensorrt_llm"]
    speculation = ours["speculation"]
    # Of the measured request alone, whose end may cut off the last step's own token.
    made = 1 + speculation["verify_steps"] * speculation["acceptance_length"]
    assert round(made) in (12, 13)
    first, second = speculation["acceptance_per_position"]
    assert 1 >= first >= second >= 0


@pytest.mark.slow
def test_at_least_twice_as_fast_as_transformers(tmp_path: Path) -> None:
    report = bench(tmp_path, "--peer", "transformers", "--num_requests", 4, "--warmup", 0)

    def best(engine: str) -> float:  # other work on the machine only ever adds time
        return min(float(request["latency_ms"]) for request in report[engine]["per_request"])

    ours, peer = best("tensorrt_llm"), best("transformers")
    assert peer / ours >= 2.0, f"{ours:.0f} ms and {peer:.0f} ms for 448 tokens"


@pytest.mark.slow
def test_three_drafts_bring_at_least_half_as_many_tokens_again_in_the_same_time(
    tmp_path: Path,
) -> None:
    """On questions that the model can answer, one after the other with and without drafts."""
    report = bench(
        *(tmp_path, "--peer", "no-drafts", "--dataset", GLM_TINY / "bench.jsonl"),
        *("--config", GLM_TINY / "mtp.yaml"),
    )
    assert report["same_outputs"] == report["tensorrt_llm"]["requests"] == 40
    assert report["no-drafts"]["tokens_per_step"] == 1.0
    assert report["speedup"]["decode"] >= 1.5, report["speedup"]


@pytest.mark.slow
def test_time_per_token_hardly_grows_with_context(tmp_path: Path) -> None:
    """Short and long contexts in turns, so that other work on the machine hits both alike."""
    short, long = ({"input_ids": [5] * count, "output_tokens": 33} for count in (48, 432))
    dataset = write_dataset(tmp_path, *[short, long] * 20)
    ours = bench(tmp_path, "--dataset", dataset)["tensorrt_llm"]
    assert [bucket["context"] for bucket in ours["context_buckets"]] == [64, 448]
    assert ours["context_growth"] < 0.10, ours["context_buckets"]
