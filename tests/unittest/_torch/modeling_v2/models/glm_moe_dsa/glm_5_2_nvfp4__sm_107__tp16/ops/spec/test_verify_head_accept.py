"""glm_verify_head_accept: the counts by a loop, the engine's own chain, and what is refused."""

from typing import Any

import pytest
import torch
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, assert_bitwise
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.spec.verify_head_accept import (  # noqa: E501
    VerifyHeadAccept,
)
from tensorrt_llm._torch.speculative.forced_acceptance import (
    ENV,
    POOL_SIZE,
    SLOT_STRIDE,
    STEP_STRIDE,
    ForcedAcceptance,
)
from tensorrt_llm._torch.speculative.interface import SpecMetadata, SpecWorkerBase
from tensorrt_llm.mapping import Mapping

FORCED = VerifyHeadAccept.CELLS[0]
STRICT = VerifyHeadAccept.CELLS[1]
NOT_FORCED = {
    "slot_ids": None,
    "force_pool": None,
    "force_counter": None,
    "counter_stride": STEP_STRIDE,
    "slot_stride": SLOT_STRIDE,
    "forced_tokens": 0,
    "forced_fraction": 0.0,
}


@pytest.mark.parametrize("cell", VerifyHeadAccept.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(VerifyHeadAccept, cell)


def leading_run(drafts: list[int], targets: list[int]) -> int:
    for i, draft in enumerate(drafts):
        if draft != targets[i]:
            return i
    return len(drafts)


@given(
    contexts=st.integers(0, 3),
    generations=st.integers(0, 4),
    k=st.integers(0, 7),
    target_dtype=st.sampled_from([torch.int32, torch.int64]),
    draft_dtype=st.sampled_from([torch.int32, torch.int64]),
    data=st.data(),
)
def test_a_draft_counts_while_it_and_all_before_agree(
    contexts, generations, k, target_dtype, draft_dtype, data
) -> None:
    def tokens(n: int) -> list[int]:  # of two, so that runs of all lengths happen
        return data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))

    of_contexts = tokens(contexts)
    rows = [tokens(k + 1) for _ in range(generations)]
    drafts = [tokens(k) for _ in range(generations)]
    buffer = torch.full((contexts + generations + 1, k + 1), -7, dtype=target_dtype)
    counts = VerifyHeadAccept.raw_call(
        target_tokens=torch.tensor(of_contexts + sum(rows, []), dtype=target_dtype),
        draft_tokens=torch.tensor(drafts, dtype=draft_dtype).view(generations, k),
        num_contexts=contexts,
        accepted_tokens=buffer,
        **NOT_FORCED,
    )
    runs = [1 + leading_run(d, r) for d, r in zip(drafts, rows, strict=True)]
    assert counts.dtype == target_dtype
    assert counts.tolist() == [1] * contexts + runs
    padded = [[token] + [0] * k for token in of_contexts]
    assert buffer.tolist() == padded + rows + [[-7] * (k + 1)]


@pytest.mark.parametrize("value", ["0", "2", "2.91", "0.5", "12"])
@pytest.mark.parametrize("contexts", [0, 2])
def test_counts_are_those_of_the_engine_over_consecutive_steps(
    value: str, contexts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, value)
    k, generations = 7, 3
    worker = SpecWorkerBase(k, Mapping())
    own = ForcedAcceptance.from_env()
    pool, counter = own.state(torch.device("cpu"))
    slots = torch.tensor([4, 0, 9, 2, 7])[: contexts + generations]
    torch.manual_seed(0)
    for _ in range(6):
        target = torch.randint(2, (contexts + generations * (k + 1),))
        drafts = torch.randint(2, (generations, k))
        following = torch.full((contexts,), -1)
        metadata = SpecMetadata(k, contexts, generations, drafts, following, slots)
        accepted, expected = worker.accept_draft_tokens(target, metadata)
        buffer = torch.empty_like(accepted)
        counts = VerifyHeadAccept.raw_call(
            target_tokens=target,
            draft_tokens=drafts,
            num_contexts=contexts,
            slot_ids=slots,
            force_pool=pool,
            force_counter=counter,
            counter_stride=STEP_STRIDE,
            slot_stride=SLOT_STRIDE,
            forced_tokens=own.whole + 1 if own.active else 0,
            forced_fraction=own.fraction,
            accepted_tokens=buffer,
        )
        assert_bitwise([counts, buffer], [expected, accepted])
    assert torch.equal(counter, worker.forced.state(torch.device("cpu"))[1])


def test_each_request_draws_its_place_of_the_pool_with_the_counter_before() -> None:
    (cell,) = (cell for cell in VerifyHeadAccept.CELLS if cell.spec["generations"] == 33)
    inputs: dict[str, Any] = cell_inputs(VerifyHeadAccept, cell)
    pool, start = inputs["force_pool"].tolist(), int(inputs["force_counter"])
    for step in range(3):
        counts = VerifyHeadAccept.raw_call(**inputs)
        for slot, count in zip(inputs["slot_ids"].tolist(), counts.tolist(), strict=True):
            place = ((start + step) * STEP_STRIDE + slot * SLOT_STRIDE) % POOL_SIZE
            assert count == 3 + (pool[place] < 0.5)
        assert int(inputs["force_counter"]) == start + step + 1


@pytest.mark.parametrize("contexts, generations", [(0, 1), (3, 0)])
def test_a_call_that_does_not_draw_leaves_the_counter(contexts, generations) -> None:
    inputs = cell_inputs(VerifyHeadAccept, FORCED)
    fraction = 0.0 if generations else 0.5
    counter = inputs["force_counter"]
    before = counter.clone()
    rows = contexts + generations * 8
    VerifyHeadAccept.raw_call(
        **{
            **inputs,
            "num_contexts": contexts,
            "target_tokens": torch.zeros(rows, dtype=torch.int32),
            "draft_tokens": torch.zeros(generations, 7, dtype=torch.int32),
            "slot_ids": torch.zeros(contexts + generations, dtype=torch.int64),
            "forced_fraction": fraction,
            "accepted_tokens": None,
        }
    )
    assert torch.equal(counter, before)


@pytest.mark.parametrize(
    "message, changes",
    [
        (r"target_tokens is \[7\]; it must be \[8\]", {"target_tokens": torch.zeros(7).int()}),
        (r"target_tokens is torch.int16", {"target_tokens": torch.zeros(8, dtype=torch.int16)}),
        (r"target_tokens has the strides \[2\]", {"target_tokens": torch.zeros(16).int()[::2]}),
        (r"draft_tokens is \[7\]; it must be \[any, any\]", {"draft_tokens": torch.zeros(7).int()}),
        (r"num_contexts is -1", {"num_contexts": -1}),
        (r"forced_tokens is -1", {"forced_tokens": -1}),
        (r"forced_fraction is 1.0; it must be in \[0, 1\)", {"forced_fraction": 1.0}),
        (r"0.91 with strict acceptance", {"forced_tokens": 0}),
        (r"without slot_ids, force_pool", {"slot_ids": None, "force_pool": None}),
        (r"slot_ids is \[2\]; it must be \[1\]", {"slot_ids": torch.zeros(2, dtype=torch.int64)}),
        (r"force_pool has 100 entries; it must have a power", {"force_pool": torch.zeros(100)}),
        (r"force_counter is torch.int32", {"force_counter": torch.tensor(0).int()}),
        (r"accepted_tokens is torch.int64", {"accepted_tokens": torch.zeros(1, 8).long()}),
        (r"accepted_tokens has 0 rows", {"accepted_tokens": torch.zeros(0, 8).int()}),
    ],
)
def test_bad_arguments_are_refused(message: str, changes: dict[str, Any]) -> None:
    assert_refuses(VerifyHeadAccept, FORCED, message, **changes)
