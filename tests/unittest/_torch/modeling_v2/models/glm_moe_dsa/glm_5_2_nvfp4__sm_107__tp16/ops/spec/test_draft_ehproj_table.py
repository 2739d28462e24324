"""glm_draft_ehproj_table on real ranks, against a whole vocabulary and an unsplit eh_proj."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers.draft_ops import (
    DRAFTS,
    EPS,
    HIDDEN,
    POSITIONS,
    ROWS,
    VOCAB,
    DraftModel,
    exchange_workspace,
    first_largest,
    norm_bounds,
    shard,
    special_rows,
)
from helpers.engine import run_ranks
from helpers.numerics import assert_between, nearest_bf16, to_numpy
from helpers.op_cells import assert_refuses, cell_id, check_cell

from tensorrt_llm._torch.distributed import Payload, lamport, lamport_workspace
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, assert_bitwise
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.gemm.draft_hidden_half import (  # noqa: E501
    draft_hidden_half,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.spec._draft_token_table import (  # noqa: E501
    draft_hidden_half_weight,
    draft_token_table,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.spec.draft_ehproj_table import (  # noqa: E501
    DraftEhprojTable,
    exchange_bytes,
)
from tensorrt_llm.mapping import Mapping

DTYPES = (torch.bfloat16, torch.float32)
RANDOM_ROWS = 4
TINY = {"dtype": torch.float32, "geometry": Geometry(hidden_size=HIDDEN, vocab_size=VOCAB)}
SMALL = Cell("small", {"rows": 1, "step": 2, **TINY})


@dataclass(frozen=True)
class Case:
    """What one call takes, whole."""

    dtype: torch.dtype
    logits: torch.Tensor  # [1, VOCAB]
    hidden: torch.Tensor  # [1, HIDDEN]
    step: int
    position: int
    limit: int


def cases() -> list[Case]:
    made = []
    for dtype in DTYPES:
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randn(RANDOM_ROWS, VOCAB, generator=generator).to(dtype)
        for i, logits in enumerate(torch.cat([special_rows(dtype), drawn]).split(1)):
            hidden = torch.randn(1, HIDDEN, generator=generator).to(dtype)
            position, limit, _ = POSITIONS[i % len(POSITIONS)]
            made.append(Case(dtype, logits, hidden, i % DRAFTS, position, limit))
    return made


def buffers(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """(position_ids, draft_tokens) before the call."""
    return torch.tensor([case.position]), torch.full((1, DRAFTS), -9)


def call(case: Case, mapping: Mapping, workspace: torch.Tensor) -> list[torch.Tensor]:
    """normed, x, then what was written, then the pieces that this rank brought along."""
    model, rank, ranks = DraftModel.random(case.dtype), mapping.tp_rank, mapping.tp_size
    ids = range(rank * VOCAB // ranks, (rank + 1) * VOCAB // ranks)
    table = draft_token_table(model.embed, model.enorm, model.eh_proj, EPS, ids)
    weight = draft_hidden_half_weight(model.eh_proj, rank, ranks)
    half = draft_hidden_half(case.hidden, model.hnorm, weight, EPS)
    written = buffers(case)
    returned = DraftEhprojTable.raw_call(
        logits=shard(case.logits, mapping),
        token_table=table,
        hidden_half=half,
        gamma=model.input_norm,
        eps=EPS,
        kv_limits=torch.tensor([case.limit], dtype=torch.int32),
        workspace=workspace,
        position_ids=written[0],
        draft_tokens=written[1],
        step=case.step,
    )
    return [*returned, *written, table, half]


def out_of_order(mapping: Mapping) -> str:
    """Rank 1 has skipped a step."""
    size = exchange_bytes(HIDDEN, mapping.tp_size, torch.float32)
    workspace = exchange_workspace(mapping, "out of order", size)
    case = cases()[-2 if mapping.tp_rank == 1 else -1]
    with pytest.raises(RuntimeError) as caught:
        call(case, mapping, workspace)
    return str(caught.value)


def cells(mapping: Mapping) -> list[Cell]:
    """The kernel's own sizes, which take seconds, once, and on ranks that it serves."""
    tiny = [Cell(cell.why, {**cell.spec, **TINY}) for cell in DraftEhprojTable.CELLS]
    return {1: tiny, 2: [DraftEhprojTable.CELLS[0], *tiny[1:]]}.get(mapping.tp_size, [])


def work(mapping: Mapping) -> dict[str, Any]:
    size = exchange_bytes(HIDDEN, mapping.tp_size, torch.float32)
    workspace = exchange_workspace(mapping, f"table of {mapping.tp_size}", size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(lamport.TIMEOUT_ENV, "60")  # a loaded host
        for cell in cells(mapping):
            check_cell(DraftEhprojTable, cell)
        answer: dict[str, Any] = {"calls": [call(case, mapping, workspace) for case in cases()]}
        if mapping.tp_size > 1:
            answer["out of order"] = out_of_order(mapping)
    return answer


@pytest.fixture(scope="module", params=[1, 2, 4], ids="{}-ranks".format)
def answers(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Checks every cell on the way."""
    ranks = request.param
    return [work(Mapping())] if ranks == 1 else run_ranks(ranks, work)


def test_the_token_is_the_whole_vocabularys_argmax(answers) -> None:
    for answer in answers:
        for case, (_, _, _, tokens, *_) in zip(cases(), answer["calls"], strict=True):
            expected = [-9] * DRAFTS
            expected[case.step] = first_largest(case.logits[0].tolist())
            assert tokens.dtype == torch.int64 and tokens.tolist() == [expected]


def test_positions_advance_to_the_limit(answers) -> None:
    for answer in answers:
        for i, (_, _, position, *_) in enumerate(answer["calls"][: len(ROWS)]):
            assert position.tolist() == [POSITIONS[i % len(POSITIONS)][2]]


def test_x_is_eh_proj_of_the_token_and_the_hidden_state(answers) -> None:
    for answer in answers:
        for case, (_, x, *_) in zip(cases(), answer["calls"], strict=True):
            token = first_largest(case.logits[0].tolist())
            bounds = DraftModel.random(case.dtype).eh_proj_bounds(token, case.hidden)
            assert x.dtype == case.dtype
            assert_between(x, bounds)


def test_x_is_the_winners_row_plus_all_halves_rounded_once(answers) -> None:
    """Bit for bit, in numpy's fp32."""
    for i, case in enumerate(cases()):
        *_, tables, halves = zip(*(answer["calls"][i] for answer in answers), strict=True)
        token = first_largest(case.logits[0].tolist())
        row = torch.cat(tables)[token].float().numpy()
        exact = row + torch.cat(halves, dim=1)[0].numpy()
        assert exact.dtype == np.float32
        x = to_numpy(answers[0]["calls"][i][1])[0]
        wide = exact.astype(np.float64)
        assert np.array_equal(x, nearest_bf16(wide) if case.dtype == torch.bfloat16 else wide)


def test_the_norm_is_of_x(answers) -> None:
    for answer in answers:
        for case, (normed, x, *_) in zip(cases(), answer["calls"], strict=True):
            assert normed.dtype == case.dtype
            assert_between(normed, norm_bounds(x, DraftModel.random(case.dtype).input_norm))


def test_all_ranks_have_the_same_bits(answers) -> None:
    for answer in answers[1:]:
        for mine, first in zip(answer["calls"], answers[0]["calls"], strict=True):
            assert_bitwise(mine[:4], first[:4])


def test_another_step_on_a_rank_is_an_error_that_names_both(answers) -> None:
    last = (len(ROWS) + RANDOM_ROWS - 1) % DRAFTS
    for rank, answer in enumerate(answers if len(answers) > 1 else []):
        mine, theirs = (last - 1, last) if rank == 1 else (last, last - 1)
        assert (
            f"rank {rank} makes glm_draft_ehproj_table at step {mine} of"
            in (answer["out of order"])
        )
        assert f"makes glm_draft_ehproj_table at step {theirs} of" in answer["out of order"]


@pytest.mark.parametrize("cell", DraftEhprojTable.CELLS, ids=cell_id)
def test_nothing_but_position_and_one_token_is_written(cell: Cell) -> None:
    inputs = DraftEhprojTable.make_inputs(
        Cell(cell.why, {**cell.spec, **TINY}), torch.device("cpu"), torch.Generator()
    )
    before = inputs["draft_tokens"].clone()
    DraftEhprojTable.raw_call(**inputs)
    changed = (inputs["draft_tokens"] != before)[0].tolist()
    assert not any(changed[: inputs["step"]] + changed[inputs["step"] + 1 :])


def test_nan_weights_arrive_as_nan() -> None:
    """Words of all ones in the table's row and in the half, which the workspace changes."""
    inputs = DraftEhprojTable.make_inputs(SMALL, torch.device("cpu"), torch.Generator())
    table, half = inputs["token_table"], inputs["hidden_half"]
    table[:, 4] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    half[:, 6] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    _, x = DraftEhprojTable.raw_call(**inputs)
    assert x.isnan()[0].nonzero().flatten().tolist() == [4, 6]


@pytest.mark.parametrize(
    ("hidden", "ranks", "dtype", "expected"),
    [
        (6144, 16, torch.bfloat16, 16 * (16 + 2 * 6144 + 4 * 384)),
        (48, 4, torch.float32, 4 * (16 + 4 * 48 + 4 * 12)),
        (6, 3, torch.bfloat16, 112),  # 3 * (16 + 12 + 8) = 108
    ],
)
def test_bytes_of_the_exchange(hidden, ranks, dtype, expected) -> None:
    assert exchange_bytes(hidden, ranks, dtype) == expected


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"logits is \[2, 40\]; it must be \[1, any\]", {"logits": torch.ones(2, VOCAB)}),
        (r"token_table is \[39, 48\]; it must be \[40, any\]", {"token_table": torch.ones(39, 48)}),
        ("token_table is torch.bfloat16", {"token_table": torch.ones(VOCAB, HIDDEN).bfloat16()}),
        ("token_table has the strides", {"token_table": torch.ones(HIDDEN, VOCAB).t()}),
        (r"hidden_half is \[1, 24\]; it must be \[1, 48\]", {"hidden_half": torch.ones(1, 24)}),
        (r"hidden_half is \[2, 48\]", {"hidden_half": torch.ones(2, 48)}),
        ("hidden_half is torch.bfloat16", {"hidden_half": torch.ones(1, 48).bfloat16()}),
        (r"gamma is \[47\]", {"gamma": torch.ones(47)}),
        (r"kv_limits is torch.int64", {"kv_limits": torch.ones(1, dtype=torch.int64)}),
        (r"kv_limits is \[2\]", {"kv_limits": torch.ones(2, dtype=torch.int32)}),
        (r"position_ids is \[2\]", {"position_ids": torch.zeros(2, dtype=torch.int64)}),
        (r"position_ids is torch.int32", {"position_ids": torch.zeros(1, dtype=torch.int32)}),
        (r"draft_tokens is \[2, 7\]", {"draft_tokens": torch.zeros(2, 7, dtype=torch.int64)}),
        (r"draft_tokens is torch.int32", {"draft_tokens": torch.zeros(1, 7, dtype=torch.int32)}),
        (r"step is -1; draft_tokens has the steps \[0, 7\)", {"step": -1}),
        (r"step is 7; draft_tokens has the steps \[0, 7\)", {"step": 7}),
        ("no open Lamport workspace", {"workspace": torch.zeros(6, dtype=torch.int64)}),
        ("48, which 5 ranks do not divide", {"workspace": torch.zeros(10, dtype=torch.int64)}),
    ],
)
def test_refuses(message: str, changes: dict[str, Any]) -> None:
    assert_refuses(DraftEhprojTable, SMALL, message, **changes)


def test_refuses_a_workspace_of_another_kind_or_too_small() -> None:
    sums = lamport_workspace(Mapping(), "table guards: sums", Payload.SUM, 1024)
    small = lamport_workspace(Mapping(), "table guards: small", Payload.EXCHANGE, 384)
    needed = exchange_bytes(HIDDEN, 1, torch.float32)
    assert_refuses(DraftEhprojTable, SMALL, "is for SUM; it must be", workspace=sums.descriptor)
    message = f"has 384 bytes per buffer; the call takes {needed}"
    assert_refuses(DraftEhprojTable, SMALL, message, workspace=small.descriptor)


@pytest.mark.parametrize(
    ("message", "hidden"), [("the hidden size is 48", 48), ("ranks is 1; the kernel serves", 6144)]
)
def test_refuses_what_the_kernel_does_not_serve(message: str, hidden: int) -> None:
    geometry = Geometry(hidden_size=hidden, vocab_size=VOCAB)
    cell = Cell("bf16", {"rows": 1, "step": 0, "geometry": geometry})
    assert_refuses(DraftEhprojTable, cell, message)
