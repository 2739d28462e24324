"""Side streams: which lane a call is on, and order on a GPU."""

import pytest
import torch

from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.streams import (
    MAIN,
    SideStream,
    current_lane,
)

CPU = torch.device("cpu")


def test_lanes_nest_and_are_restored() -> None:
    kv, quantize = SideStream("kv", CPU), SideStream("quantize", CPU)
    seen = [current_lane()]
    with kv.beside():
        seen.append(current_lane())
        with quantize.beside():
            seen.append(current_lane())
            with kv.beside():
                seen.append(current_lane())
            seen.append(current_lane())
        seen.append(current_lane())
    seen.append(current_lane())
    assert seen == [MAIN, "kv", "quantize", "kv", "quantize", "kv", MAIN]


def test_an_error_leaves_the_lane() -> None:
    outer, inner = SideStream("outer", CPU), SideStream("inner", CPU)
    with outer.beside():
        with pytest.raises(RuntimeError, match="in a kernel"), inner.beside():
            raise RuntimeError("in a kernel")
        assert current_lane() == "outer"
    assert current_lane() == MAIN


def test_a_cpu_runs_the_written_order() -> None:
    """Joins and events are nothing there, before any work as well."""
    stream, done = SideStream("shared expert", CPU), []
    stream.join()
    with stream.beside():
        done.append("beside")
        assert stream.recorded_event() is None
    done.append("main")
    stream.join()
    assert stream.recorded_event() is None
    assert done == ["beside", "main"] and current_lane() == MAIN


@pytest.mark.gpu
def test_work_beside_follows_what_was_queued_and_a_join_waits_for_it() -> None:
    """Each stage sleeps first, so that a missing wait would read the old number."""
    device = torch.device("cuda")
    stream, x = SideStream("kv", device), torch.zeros(1, device=device)
    for _ in range(3):
        torch.cuda._sleep(10_000_000)
        x += 1
        with stream.beside():
            torch.cuda._sleep(10_000_000)
            assert torch.cuda.current_stream() != torch.cuda.default_stream()
            y = 2 * x
            event = stream.recorded_event()
        assert event
        stream.join()
        x = y + 1
    assert x.item() == 21  # x -> 2 (x + 1) + 1: 0, 3, 9, 21
