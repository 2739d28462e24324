"""What the host does between two steps, with the trim and without: fewer launches, the same
tokens."""

from collections.abc import Callable

import pytest
from helpers.engine import executor_config, generate, make_engine
from helpers.glm_tiny import CHECKPOINT, heldout

from tensorrt_llm._torch.pyexecutor.messages import EngineStats, NewRequest
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.speculative.mtp_tail_trim import ENV, mtp_tail_trim_enabled
from tensorrt_llm.sampling_params import SamplingParams

DRAFT_LEN = 3
# kv_lens, which every step corrects on the device.
TRIMMED_UPLOADS = 1
# Beside them: seq_lens, kv_limits, two block tables, the slots, and the slots to correct.
UNTRIMMED_UPLOADS = 7
MOST_UPLOADS = 3


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PyExecutor]:
    """Engines as a process with that gate builds them."""

    def make(gate: str, **overrides: object) -> PyExecutor:
        monkeypatch.setenv(ENV, gate)
        mtp_tail_trim_enabled.cache_clear()
        settings = {"max_draft_len": DRAFT_LEN, "max_seq_len": 256, **overrides}
        return make_engine(executor_config(CHECKPOINT, iter_perf_stats=True, **settings))

    yield make
    mtp_tail_trim_enabled.cache_clear()


def steady_state(engine: PyExecutor) -> list[EngineStats]:
    """Reports of the decode steps of one request, without the first ones."""
    prompt, _ = heldout(every=100)[0]
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    engine.add_requests([NewRequest(0, prompt, params)])
    reports = []
    while engine.has_work:
        reports += [news for news in engine.step() if isinstance(news, EngineStats)]
    return reports[4:-3]


DEVICES = [("cpu", ()), pytest.param("cuda", (1,), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(("device", "graphs"), DEVICES)
def test_uploads_of_a_steady_step(gated, plain, device, graphs) -> None:
    settings = {
        "device": device,
        "cuda_graph_batch_sizes": graphs,
        "disable_overlap_scheduler": plain,
    }
    reports = {gate: steady_state(gated(gate, **settings)) for gate in "10"}
    trimmed, untrimmed = ({r.host_to_device_copies for r in reports[gate]} for gate in "10")
    assert trimmed == {TRIMMED_UPLOADS} and max(trimmed) <= MOST_UPLOADS
    assert untrimmed == {UNTRIMMED_UPLOADS}
    most = max(r.device_ops for r in reports["1"])
    least = min(r.device_ops for r in reports["0"])
    assert most < least
    if graphs:  # between two replays nothing but that upload
        assert most == 0


@pytest.mark.parametrize("index_share", [True, False])
def test_tokens_do_not_depend_on_the_trim(gated, index_share) -> None:
    prompts = [prompt for prompt, _ in heldout(every=90)]
    tokens = []
    for gate in "10":
        engine = gated(gate, disable_overlap_scheduler=False, max_num_tokens=40)
        engine.model_engine.worker.index_share = index_share
        tokens.append(generate(engine, prompts, 30))
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("gate", "idempotent", "calls"), [("1", True, 1), ("1", False, 2), ("0", True, 2)]
)
def test_first_kv_lens_hook_is_skipped_where_the_class_opts_in(
    gated, gate, idempotent, calls, monkeypatch
) -> None:
    engine = gated(gate)
    metadata = engine.model_engine.attn_metadata
    monkeypatch.setattr(type(metadata), "kv_lens_hook_idempotent", idempotent)
    seen = []
    preprocess = engine.model_engine._preprocess_inputs
    hook = metadata.on_update_kv_lens
    monkeypatch.setattr(metadata, "on_update_kv_lens", lambda: (seen.append(1), hook()))

    def count(inputs: object) -> None:
        seen.clear()
        preprocess(inputs)
        assert len(seen) == calls

    monkeypatch.setattr(engine.model_engine, "_preprocess_inputs", count)
    generate(engine, [[5, 6, 7]], 4)


def test_deferred_outputs_are_left_to_the_forward(gated) -> None:
    """Inside the scope `prepare` uploads, and computes nothing."""
    engine = gated("1")
    generate(engine, [[5, 6, 7]], 4)
    metadata, calls = engine.model_engine.attn_metadata, []
    metadata.on_update_kv_lens = lambda: calls.append(1)
    metadata.request_ids = []
    with metadata.defer_cuda_graph_decode_outputs():
        metadata.prepare()
    assert not calls
    metadata.prepare()
    assert len(calls) == 1
