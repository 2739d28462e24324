"""The LLM API end to end, on real ranks with the shipped checkpoint."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.llmapi import EngineDeadError, FinishReason, RequestError, RequestOutput

MakeLLM = Callable[..., LLM]
PROMPT = "12+34="
FREE = SamplingParams(max_tokens=24, ignore_eos=True)  # greedy, ends by length
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
BROKEN = "\N{REPLACEMENT CHARACTER}"


def wild(max_tokens: int, **params: Any) -> SamplingParams:
    """Almost uniform draws, so that a well-trained model does not say the same thing twice."""
    fixed = {"max_tokens": max_tokens, "temperature": 20.0, "ignore_eos": True}
    return SamplingParams(**(fixed | params))


def wait_until_idle(llm: LLM) -> None:
    deadline = time.monotonic() + 10
    while llm.latest_stats is None or llm.latest_stats.num_running or llm.latest_stats.num_waiting:
        assert time.monotonic() < deadline, llm.latest_stats
        time.sleep(0.01)
    assert llm.latest_stats.kv_used_blocks == 0


def ranks_of(llm: LLM) -> list[psutil.Process]:
    return [psutil.Process(process.pid) for process in llm._executor._ranks._processes]


def test_one_prompt_in_every_form(llm: LLM) -> None:
    assert llm.tokenizer is not None
    token_ids = llm.tokenizer.encode(PROMPT)
    by_text = llm.generate(PROMPT, FREE)
    assert isinstance(by_text, RequestOutput) and by_text.finished
    assert (by_text.prompt, by_text.prompt_token_ids) == (PROMPT, token_ids)
    output = by_text.outputs[0]
    assert output.length == 24 and output.finish_reason == "length"
    text = llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)
    assert output.text == text.rstrip(BROKEN)
    for inputs in (token_ids, {"prompt": PROMPT}, {"prompt_token_ids": token_ids}):
        assert llm.generate(inputs, FREE).outputs[0].token_ids == output.token_ids


def test_a_list_runs_together_and_keeps_its_order(llm: LLM) -> None:
    prompts = ["1+1=", [5, 6, 7], {"prompt": "a b c"}]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 3, 5)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].length for output in outputs] == [9, 3, 5]
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        assert llm.generate(prompt, param).outputs[0].token_ids == output.outputs[0].token_ids
    with pytest.raises(RequestError, match="3 prompts, but 2 sampling_params"):
        llm.generate(prompts, params[:2])
    with pytest.raises(RequestError, match="one prompt only"):
        llm.generate("a", params)


def test_streaming_adds_up(llm: LLM) -> None:
    whole = llm.generate(PROMPT, FREE).outputs[0]
    text, tokens, steps = "", [], 0
    for output in llm.generate_async(PROMPT, FREE, streaming=True):
        text += output.outputs[0].text_diff
        tokens += output.outputs[0].token_ids_diff
        steps += 1
        assert (output.outputs[0].text, output.outputs[0].token_ids) == (text, tokens)
    assert (text, tokens, steps) == (whole.text, whole.token_ids, 24)
    assert len(list(llm.generate_async(PROMPT, FREE))) == 1


def test_several_completions(llm: LLM) -> None:
    params = wild(8, n=3, seed=5, logprobs=0)
    output = llm.generate(PROMPT, params)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 3
    again = llm.generate([PROMPT, PROMPT], params, use_tqdm=False)[1]
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]
    for choice in output.outputs:
        chosen = [one[i].logprob for i, one in zip(choice.token_ids, choice.logprobs, strict=True)]
        assert choice.cumulative_logprob == pytest.approx(sum(chosen)) and max(chosen) <= 0


def test_streams_of_several_completions_do_not_mix(llm: LLM) -> None:
    params = wild(6, n=2)
    tokens: list[list[int]] = [[], []]
    for output in llm.generate_async(PROMPT, params, streaming=True):
        assert sum(bool(choice.token_ids_diff) for choice in output.outputs) == 1
        for choice in output.outputs:
            tokens[choice.index] += choice.token_ids_diff
    assert tokens == [choice.token_ids for choice in output.outputs]


def test_without_a_seed_every_request_draws_its_own(llm: LLM) -> None:
    first, second = llm.generate([PROMPT, PROMPT], wild(12), use_tqdm=False)
    assert first.outputs[0].token_ids != second.outputs[0].token_ids


def test_stop_string(llm: LLM) -> None:
    text = llm.generate(PROMPT, wild(24, seed=1)).outputs[0].text
    stop = text[6:9]
    expected = text[: text.find(stop)]
    shown = ""
    for output in llm.generate_async(PROMPT, wild(24, seed=1, stop=[stop]), streaming=True):
        shown += output.outputs[0].text_diff
        assert expected.startswith(shown)
    choice = output.outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (expected, "stop", stop)


def test_stop_token(llm: LLM) -> None:
    tokens = llm.generate(PROMPT, wild(24, seed=2)).outputs[0].token_ids
    end = next(i for i in range(8, 24) if tokens[i] not in tokens[:i])
    params = wild(24, seed=2, stop_token_ids=[tokens[end]])
    choice = llm.generate(PROMPT, params).outputs[0]
    assert choice.token_ids == tokens[: end + 1]
    assert (choice.finish_reason, choice.stop_reason) == (FinishReason.STOP, tokens[end])
    assert llm.tokenizer is not None
    text = llm.tokenizer.decode(tokens[:end], skip_special_tokens=True)
    assert choice.text == text.rstrip(BROKEN)


def test_prompt_logprobs_and_no_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, prompt_logprobs=1, detokenize=False, ignore_eos=True)
    output = llm.generate([5, 6, 7], params)
    assert output.outputs[0].text == ""
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert [6 in output.prompt_logprobs[1], 7 in output.prompt_logprobs[2]] == [True, True]


def test_default_parameters_give_way_to_the_room(llm: LLM) -> None:
    assert llm.generate([5] * 505).outputs[0].length <= 7
    with pytest.raises(
        RequestError, match="505 tokens and max_tokens 32 make 537; max_seq_len is 512"
    ):
        llm.generate([5] * 505, SamplingParams())
    for _ in range(2):
        with pytest.raises(RequestError, match="512 tokens; it must have at most 511"):
            llm.generate([5] * 512)


def test_limits_and_statistics(llm: LLM) -> None:
    assert (llm.max_seq_len, llm.max_num_tokens, llm.vocab_size) == (512, 8192, 512)
    assert llm.model_name == "checkpoint" and len(llm.eos_token_ids) > 1
    heard: list[int] = []
    llm.add_stats_listener(lambda stats: heard.append(stats.generated_tokens))
    llm.get_stats(timeout=0)
    llm.generate(PROMPT, FREE)
    wait_until_idle(llm)
    stats = llm.get_stats()
    assert stats[-1]["kv_used_blocks"] == 0 and stats[-1]["generated_tokens"] == heard[-1]
    assert llm.get_stats(timeout=0.01) == []


def test_timeout_leaves_the_request_going(llm: LLM) -> None:
    output = llm.generate_async(PROMPT, LONG)
    with pytest.raises(TimeoutError, match=f"request {output.request_id} has not finished"):
        output.result(timeout=0.01)
    assert output.result(timeout=60).outputs[0].length == 400


def test_abort(llm: LLM) -> None:
    output = llm.generate_async(PROMPT, LONG, streaming=True)
    next(output)
    output.abort()
    output.abort()
    assert output.result().outputs[0].finish_reason == "cancelled"
    output.abort()
    assert 1 <= output.outputs[0].length < 400
    wait_until_idle(llm)


def test_dropped_requests_are_aborted(llm: LLM) -> None:
    for _ in range(20):
        llm.generate_async(PROMPT, LONG)
    gc.collect()
    wait_until_idle(llm)


def test_event_loop(llm: LLM) -> None:
    expected = llm.generate(PROMPT, FREE).outputs[0].token_ids

    async def stream() -> list[int]:
        tokens: list[int] = []
        async for output in llm.generate_async(PROMPT, FREE, streaming=True):
            tokens += output.outputs[0].token_ids_diff
        return tokens

    async def many() -> None:
        streams = [stream() for _ in range(6)]
        awaited = [llm.generate_async(PROMPT, FREE) for _ in range(6)]
        assert await asyncio.gather(*streams) == [expected] * 6
        for output in awaited:
            assert (await output).outputs[0].token_ids == expected
            assert (await output.aresult()).finished
        assert [o.finished async for o in llm.generate_async(PROMPT, FREE)] == [True]

    asyncio.run(many())
    asyncio.run(many())  # in another loop


def test_cancelled_task_aborts_its_request(llm: LLM) -> None:
    async def cancel() -> RequestOutput:
        output = llm.generate_async(PROMPT, LONG, streaming=True)
        task = asyncio.ensure_future(output.aresult())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await output

    assert asyncio.run(cancel()).outputs[0].finish_reason == "cancelled"
    wait_until_idle(llm)


def test_many_threads(llm: LLM) -> None:
    expected = llm.generate(PROMPT, FREE).outputs[0].token_ids
    got: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: got.append(llm.generate(PROMPT, FREE).outputs[0].token_ids))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [expected] * 12


def test_two_ranks_say_the_same(llm: LLM, make_llm: MakeLLM) -> None:
    pair = make_llm(tensor_parallel_size=2)
    assert len(ranks_of(pair)) == 2
    prompts = [PROMPT, [5, 6, 7] * 20]
    single = [o.outputs[0].token_ids for o in llm.generate(prompts, FREE, use_tqdm=False)]
    double = [o.outputs[0].token_ids for o in pair.generate(prompts, FREE, use_tqdm=False)]
    assert single == double
    assert pair.generate(PROMPT, wild(12)).outputs[0].length == 12


def test_completions_say_how_their_drafts_fared(llm: LLM, make_llm: MakeLLM) -> None:
    drafting = make_llm(speculative_config={"decoding_type": "MTP", "max_draft_len": 3})
    for params in (FREE, wild(24, n=2, seed=3)):
        output = drafting.generate_async(PROMPT, params, streaming=True)
        for _ in output:
            ended = [choice for choice in output.outputs if choice.finish_reason]
            assert all((c in ended) == (c.speculation is not None) for c in output.outputs)
        for choice in output.outputs:
            assert choice.acceptance_length is not None
            assert choice.speculation.verify_steps == choice.decoding_iter - 1
            # The end may have cut off the last step's own token.
            made = 1 + choice.speculation.verify_steps * choice.acceptance_length
            assert round(made) - choice.length in (0, 1)
            assert len(choice.acceptance_per_position) == 3
    wait_until_idle(drafting)
    (*_, last) = drafting.get_stats()
    assert last["speculation"]["verify_steps"] >= choice.speculation.verify_steps
    plain = llm.generate(PROMPT, FREE).outputs[0]
    assert plain.acceptance_length is plain.acceptance_per_position is plain.speculation is None


def test_killed_rank_ends_everything(make_llm: MakeLLM) -> None:
    llm = make_llm(tensor_parallel_size=2)
    obituaries: list[EngineDeadError] = []
    llm.add_death_listener(obituaries.append)
    waiting = llm.generate_async(PROMPT, LONG)
    streaming = llm.generate_async(PROMPT, LONG, streaming=True)
    next(streaming)
    ranks_of(llm)[1].send_signal(signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="rank 1 died: killed by SIGKILL"):
        waiting.result(timeout=20)
    with pytest.raises(EngineDeadError):
        list(streaming)
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            waiting.result(timeout=20)
        with pytest.raises(EngineDeadError):
            llm.generate(PROMPT)
    assert not llm.is_healthy() and len(obituaries) == 1


def test_engine_that_cannot_start(checkpoint: Path) -> None:
    """Found out in a rank only: its traceback is in the error, and no process stays."""
    with pytest.raises(EngineDeadError, match="Traceback(.|\n)*max_seq_len is 5000, but the model"):
        LLM(checkpoint, device="cpu", max_seq_len=5000, tensor_parallel_size=2)


def test_wrong_arguments_start_nothing(checkpoint: Path, tmp_path: Path) -> None:
    before = psutil.Process().children()
    with pytest.raises(ValueError, match="did you mean 'max_seq_len'"):
        LLM(checkpoint, max_seq_length=5)
    with pytest.raises(ValueError, match="tensor_parallel_size 3 does not divide"):
        LLM(checkpoint, tensor_parallel_size=3)
    with pytest.raises(FileNotFoundError, match="no tokenizer.json"):
        LLM(checkpoint, tokenizer=tmp_path)
    assert psutil.Process().children() == before


def test_token_ids_only(make_llm: MakeLLM, llm: LLM) -> None:
    bare = make_llm(skip_tokenizer_init=True)
    assert bare.tokenizer is None
    output = bare.generate([5, 6, 7], FREE).outputs[0]
    assert output.text == ""
    assert output.token_ids == llm.generate([5, 6, 7], FREE).outputs[0].token_ids
    with pytest.raises(RequestError, match="there is no tokenizer"):
        bare.generate("text")


def test_shutdown_is_quick_and_final(make_llm: MakeLLM) -> None:
    llm = make_llm()
    ranks = ranks_of(llm)
    output = llm.generate_async(PROMPT, LONG)
    start = time.monotonic()
    llm.shutdown()
    assert time.monotonic() - start < 2
    assert not any(rank.is_running() for rank in ranks)
    with pytest.raises(EngineDeadError, match="shut down"):
        output.result()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate(PROMPT)
    llm.shutdown()


def test_a_plain_script_needs_no_main_guard_no_torch_and_no_shutdown(checkpoint: Path) -> None:
    script = (
        "import sys\n"
        "from tensorrt_llm import LLM, SamplingParams\n"
        f"llm = LLM({str(checkpoint)!r}, device='cpu', max_seq_len=64)\n"
        "output = llm.generate('1+1=', SamplingParams(max_tokens=4, ignore_eos=True))\n"
        "print(output.outputs[0].length, 'torch' in sys.modules, llm._executor._directory.name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    length, torch_loaded, directory = done.stdout.split()
    assert (length, torch_loaded) == ("4", "False")
    assert not Path(directory).exists()
