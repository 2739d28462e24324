"""glm_draft_sample_glue on real ranks, and whole draft loops of both ops at a step's end."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.draft_ops import (
    DRAFTS,
    EPS,
    HIDDEN,
    POSITIONS,
    VOCAB,
    DraftModel,
    exchange_workspace,
    first_largest,
    shard,
    special_rows,
)
from helpers.engine import run_ranks
from helpers.numerics import to_numpy
from helpers.op_cells import assert_refuses, cell_inputs, check_cell

from tensorrt_llm._torch.distributed import (
    AllReduce,
    Payload,
    lamport,
    lamport_workspace,
)
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, assert_bitwise
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.gemm.draft_hidden_half import (  # noqa: E501
    draft_hidden_half,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.spec import (  # noqa: E501
    draft_ehproj_table,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.spec._draft_token_table import (  # noqa: E501
    draft_hidden_half_weight,
    draft_token_table,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.spec.draft_glue_rmsnorm_cat import (  # noqa: E501
    DraftGlueRmsnormCat,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.spec.draft_sample_glue import (  # noqa: E501
    DraftSampleGlue,
    exchange_bytes,
)
from tensorrt_llm.mapping import Mapping

DTYPES = (torch.bfloat16, torch.float32)
TINY = {"dtype": torch.float32, "geometry": Geometry(hidden_size=HIDDEN, vocab_size=VOCAB)}
REQUESTS = 3
STARTS = torch.tensor([50, 97, -1])  # of the window loop: far from the limit, near it, padding
LIMITS = torch.tensor([100, 100, 100])


def rows_of(dtype: torch.dtype) -> torch.Tensor:
    """Logits [requests, VOCAB]: rows that a careless argmax gets wrong, and random ones."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(4, VOCAB, generator=generator).to(dtype)
    return torch.cat([special_rows(dtype), drawn])


def verified(requests: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(accepted_tokens, num_accepted)."""
    generator = torch.Generator().manual_seed(4)
    accepted = torch.randint(VOCAB, (requests, DRAFTS + 1), generator=generator)
    return accepted, torch.arange(requests) % (DRAFTS + 1) + 1


def positions_of(requests: int) -> list[tuple[int, int, int]]:
    return [POSITIONS[i % len(POSITIONS)] for i in range(requests)]


def drafts_before(requests: int) -> torch.Tensor:
    return -100 - torch.arange(requests * DRAFTS).view(requests, DRAFTS)


def everything(mapping: Mapping, workspace: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """The last step with all that can be asked for, then one that asks for the token alone."""
    answers = []
    for dtype in DTYPES:
        logits, model = shard(rows_of(dtype), mapping), DraftModel.random(dtype)
        requests, columns = logits.shape[0], 2 * HIDDEN // mapping.tp_size
        accepted, counts = verified(requests)
        places = torch.tensor(positions_of(requests))
        written = {
            "position_ids": places[:, 0].clone(),
            "draft_tokens": drafts_before(requests),
            "next_new_tokens": torch.full((requests, DRAFTS + 1), -9),
        }
        window = DraftSampleGlue.raw_call(
            logits=logits,
            accepted_tokens=accepted,
            num_accepted=counts,
            kv_limits=places[:, 1].int(),
            embed_table=model.embed,
            hidden_states=model.embed[:requests].flip(1).contiguous(),
            enorm_weight=model.enorm,
            hnorm_weight=model.hnorm,
            eps=EPS,
            col_lo=mapping.tp_rank * columns,
            col_hi=(mapping.tp_rank + 1) * columns,
            workspace=workspace,
            step=DRAFTS - 1,
            **written,
        )
        alone = drafts_before(requests)
        empty = DraftSampleGlue.raw_call(logits, workspace, alone, step=2)
        answers.append({**written, "window": window, "alone": alone, "empty": empty})
    return answers


def tables_loop(mapping: Mapping, tables: torch.Tensor, glue: torch.Tensor) -> dict[str, Any]:
    """One request: DRAFTS - 1 table steps, then the step that ends the loop."""
    model, rank, ranks = DraftModel.random(torch.float32), mapping.tp_rank, mapping.tp_size
    ids = range(rank * VOCAB // ranks, (rank + 1) * VOCAB // ranks)
    table = draft_token_table(model.embed, model.enorm, model.eh_proj, EPS, ids)
    weight = draft_hidden_half_weight(model.eh_proj, rank, ranks)
    hidden, positions = first_hidden(1), STARTS[1:2].clone()
    drafts, following, seen = drafts_before(1), torch.full((1, DRAFTS + 1), -9), []
    for step in range(DRAFTS - 1):
        seen.append(hidden)
        normed, x = draft_ehproj_table.DraftEhprojTable.raw_call(
            logits=shard(model.logits(hidden), mapping),
            token_table=table,
            hidden_half=draft_hidden_half(hidden, model.hnorm, weight, EPS),
            gamma=model.input_norm,
            eps=EPS,
            kv_limits=LIMITS[1:2].int(),
            workspace=tables,
            position_ids=positions,
            draft_tokens=drafts,
            step=step,
        )
        hidden = model.layer(normed, x, positions)
    seen.append(hidden)
    accepted, counts = verified(1)
    DraftSampleGlue.raw_call(
        shard(model.logits(hidden), mapping),
        glue,
        drafts,
        step=DRAFTS - 1,
        accepted_tokens=accepted,
        num_accepted=counts,
        next_new_tokens=following,
    )
    return {"drafts": drafts, "hidden": torch.stack(seen), "next": following}


def windows_loop(mapping: Mapping, workspace: torch.Tensor) -> dict[str, Any]:
    """Several requests: every step gives this rank's columns of the next eh_proj input."""
    model, columns = DraftModel.random(torch.float32), 2 * HIDDEN // mapping.tp_size
    lo, hi = mapping.tp_rank * columns, (mapping.tp_rank + 1) * columns
    weight, reduce = model.eh_proj[:, lo:hi], AllReduce(mapping)
    hidden, positions = first_hidden(REQUESTS), STARTS.clone()
    drafts, seen = drafts_before(REQUESTS), []
    for step in range(DRAFTS):
        seen.append(hidden)
        window = DraftSampleGlue.raw_call(
            shard(model.logits(hidden), mapping),
            workspace,
            drafts,
            step,
            position_ids=positions,
            kv_limits=LIMITS.int(),
            embed_table=model.embed,
            hidden_states=hidden,
            enorm_weight=model.enorm,
            hnorm_weight=model.hnorm,
            eps=EPS,
            col_lo=lo,
            col_hi=hi,
        )
        x = reduce(window @ weight.T)
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        hidden = model.layer(x * scale * model.input_norm, x, positions)
    return {"drafts": drafts, "hidden": torch.stack(seen)}


def first_hidden(rows: int) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(5))


def out_of_order(mapping: Mapping) -> str:
    """Rank 1 ends its loop a step early, on a workspace that both ops use."""
    size = draft_ehproj_table.exchange_bytes(HIDDEN, mapping.tp_size, torch.float32)
    workspace = exchange_workspace(mapping, "both ops", size)
    inputs = cell_inputs(
        draft_ehproj_table.DraftEhprojTable, Cell("table", {"rows": 1, "step": 5, **TINY})
    )
    with pytest.raises(RuntimeError) as caught:
        if mapping.tp_rank == 1:
            DraftSampleGlue.raw_call(inputs["logits"], workspace, inputs["draft_tokens"], step=6)
        else:
            draft_ehproj_table.DraftEhprojTable.raw_call(**{**inputs, "workspace": workspace})
    return str(caught.value)


def cells(mapping: Mapping) -> list[Cell]:
    """The kernel's own sizes on ranks that it serves."""
    tiny = [Cell(cell.why, {**cell.spec, **TINY}) for cell in DraftSampleGlue.CELLS]
    return {1: tiny, 2: list(DraftSampleGlue.CELLS)}.get(mapping.tp_size, [])


def work(mapping: Mapping) -> dict[str, Any]:
    ranks = mapping.tp_size
    glue = exchange_workspace(mapping, f"glue of {ranks}", exchange_bytes(32, ranks))
    size = draft_ehproj_table.exchange_bytes(HIDDEN, ranks, torch.float32)
    tables = exchange_workspace(mapping, f"tables of {ranks}", size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(lamport.TIMEOUT_ENV, "60")  # a loaded host
        for cell in cells(mapping):
            check_cell(DraftSampleGlue, cell)
        answer = {
            "everything": everything(mapping, glue),
            "tables": tables_loop(mapping, tables, glue),
            "windows": windows_loop(mapping, glue),
        }
        if ranks > 1:
            answer["out of order"] = out_of_order(mapping)
    return answer


@pytest.fixture(scope="module", params=[1, 2, 4], ids="{}-ranks".format)
def answers(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Checks every cell on the way."""
    ranks = request.param
    return [work(Mapping())] if ranks == 1 else run_ranks(ranks, work)


def each(answers: list[dict[str, Any]]) -> list[tuple[torch.dtype, dict[str, torch.Tensor]]]:
    return [pair for a in answers for pair in zip(DTYPES, a["everything"], strict=True)]


def tokens_of(dtype: torch.dtype) -> list[int]:
    return [first_largest(row) for row in rows_of(dtype).tolist()]


def test_tokens_are_the_whole_vocabularys_argmax_and_only_their_column_is_written(answers) -> None:
    for dtype, got in each(answers):
        for name, step in (("draft_tokens", DRAFTS - 1), ("alone", 2)):
            expected = drafts_before(len(got[name])).tolist()
            for row, token in zip(expected, tokens_of(dtype), strict=True):
                row[step] = token
            assert got[name].tolist() == expected
        assert got["empty"].shape == (len(got["alone"]), 0) and got["empty"].dtype == dtype


def test_positions_advance_to_each_requests_limit(answers) -> None:
    for _, got in each(answers):
        expected = [after for _, _, after in positions_of(len(got["alone"]))]
        assert got["position_ids"].tolist() == expected


def test_the_next_tokens_are_the_last_accepted_and_all_drafts(answers) -> None:
    for dtype, got in each(answers):
        accepted, counts = (x.tolist() for x in verified(len(got["alone"])))
        earlier = drafts_before(len(accepted)).tolist()
        expected = [
            [row[count - 1], *before[:-1], token]
            for row, count, before, token in zip(
                accepted, counts, earlier, tokens_of(dtype), strict=True
            )
        ]
        assert got["next_new_tokens"].tolist() == expected


def test_the_windows_are_the_draft_glues_of_the_tokens(answers) -> None:
    """Bit for bit; that op's own test has the formula."""
    for i, dtype in enumerate(DTYPES):
        model, ids = DraftModel.random(dtype), torch.tensor(tokens_of(dtype))
        hidden = model.embed[: len(ids)].flip(1).contiguous()
        whole = DraftGlueRmsnormCat.raw_call(
            ids, model.embed, hidden, model.enorm, model.hnorm, EPS, 0, 2 * HIDDEN
        )
        windows = [answer["everything"][i]["window"] for answer in answers]
        assert_bitwise([torch.cat(windows, dim=1)], [whole])


def assert_loop(got: dict[str, Any], rows: slice) -> None:
    """The tokens are the plain loop's, and the hidden states are so close to its that no choice can
    differ: a logit moves by the sum of magnitudes of its row of the head, times their distance."""
    model, hidden = DraftModel.random(torch.float32), first_hidden(len(STARTS[rows]))
    tokens, states, gaps = model.plain_loop(hidden, STARTS[rows], LIMITS[rows])
    assert got["drafts"].tolist() == tokens
    distance = np.abs(to_numpy(got["hidden"]) - states).max(axis=-1)
    reach = np.abs(to_numpy(model.head)).sum(axis=1).max()
    assert (2 * reach * distance < gaps).all()


def test_table_steps_and_a_last_step_are_the_plain_loop(answers) -> None:
    for answer in answers:
        got = answer["tables"]
        assert_loop(got, slice(1, 2))
        accepted, counts = verified(1)
        last = accepted[0, counts[0] - 1].item()
        assert got["next"].tolist() == [[last, *got["drafts"][0].tolist()]]


def test_steps_with_windows_are_the_plain_loop(answers) -> None:
    for answer in answers:
        assert_loop(answer["windows"], slice(0, REQUESTS))


def test_all_ranks_write_the_same(answers) -> None:
    for mine in answers[1:]:
        for got, first in zip(mine["everything"], answers[0]["everything"], strict=True):
            names = ("position_ids", "draft_tokens", "next_new_tokens", "alone")
            assert_bitwise([got[name] for name in names], [first[name] for name in names])
        for loop in ("tables", "windows"):
            assert_bitwise([*mine[loop].values()], [*answers[0][loop].values()])


def test_another_op_on_a_rank_is_an_error_that_names_both(answers) -> None:
    names = ("glm_draft_ehproj_table at step 5", "glm_draft_sample_glue at step 6")
    for rank, answer in enumerate(answers if len(answers) > 1 else []):
        mine, theirs = names[::-1] if rank == 1 else names
        assert f"rank {rank} makes {mine} of 1 rows" in answer["out of order"]
        assert f"makes {theirs} of 1 rows" in answer["out of order"]


@pytest.mark.parametrize(
    ("rows", "ranks", "expected"), [(1, 16, 128), (8, 16, 1024), (1, 1, 16), (3, 3, 80)]
)
def test_bytes_of_the_exchange(rows: int, ranks: int, expected: int) -> None:
    """8 for each row and rank."""
    assert exchange_bytes(rows, ranks) == expected


ALL = {"rows": 4, "step": 6, "positions": True, "next": True, "window": 0, **TINY}
FULL = Cell("all that can be asked for", ALL)
LONG = torch.int64


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"logits is \[40\]", {"logits": torch.ones(VOCAB)}),
        ("logits has the strides", {"logits": torch.ones(VOCAB, 4).t()}),
        (r"draft_tokens is \[3, 7\]; it must be \[4, any\]", {"draft_tokens": torch.ones(3, 7)}),
        ("draft_tokens is torch.int32", {"draft_tokens": torch.ones(4, 7).int()}),
        (r"step is 7; draft_tokens has the steps \[0, 7\)", {"step": 7}),
        (r"step is -1", {"step": -1}),
        ("step 5; the drafts are complete in step 6", {"step": 5}),
        ("kv_limits is None", {"kv_limits": None}),
        (r"kv_limits is \[3\]", {"kv_limits": torch.ones(3).int()}),
        ("kv_limits is torch.int64", {"kv_limits": torch.ones(4, dtype=LONG)}),
        (r"position_ids is \[3\]", {"position_ids": torch.ones(3, dtype=LONG)}),
        ("position_ids is torch.int32", {"position_ids": torch.ones(4).int()}),
        (r"next_new_tokens is \[4, 7\]", {"next_new_tokens": torch.ones(4, 7, dtype=LONG)}),
        ("next_new_tokens is torch.int32", {"next_new_tokens": torch.ones(4, 8).int()}),
        ("accepted_tokens is None", {"accepted_tokens": None}),
        (r"accepted_tokens is \[4, 7\]", {"accepted_tokens": torch.ones(4, 7, dtype=LONG)}),
        ("num_accepted is None", {"num_accepted": None}),
        ("num_accepted is torch.int32", {"num_accepted": torch.ones(4).int()}),
        (r"num_accepted is \[0, 1, 1, 9\]", {"num_accepted": torch.tensor([0, 1, 1, 9])}),
        ("hidden_states is None", {"hidden_states": None}),
        (r"hidden_states is \[3, 48\]; it must be \[4", {"hidden_states": torch.ones(3, HIDDEN)}),
        (r"embed_table is \[40, 47\]", {"embed_table": torch.ones(VOCAB, 47)}),
        ("enorm_weight is None", {"enorm_weight": None}),
        (r"hnorm_weight is \[47\]", {"hnorm_weight": torch.ones(47)}),
        (r"the window is \[0, 97\)", {"col_hi": 97}),
        ("no open Lamport workspace", {"workspace": torch.zeros(6, dtype=LONG)}),
    ],
)
def test_refuses(message: str, changes: dict[str, Any]) -> None:
    assert_refuses(DraftSampleGlue, FULL, message, **changes)


def test_refuses_a_workspace_of_another_kind_or_too_small() -> None:
    sums = lamport_workspace(Mapping(), "glue guards: sums", Payload.SUM, 1024)
    small = lamport_workspace(Mapping(), "glue guards: small", Payload.EXCHANGE, 16)
    assert_refuses(DraftSampleGlue, FULL, "is for SUM; it must be", workspace=sums.descriptor)
    message = "has 16 bytes per buffer; the call takes 32"
    assert_refuses(DraftSampleGlue, FULL, message, workspace=small.descriptor)


def test_refuses_a_single_rank_for_the_kernel() -> None:
    assert_refuses(DraftSampleGlue, DraftSampleGlue.CELLS[0], "ranks is 1; the kernel serves")


def test_what_is_not_asked_for_is_not_needed() -> None:
    inputs = cell_inputs(DraftSampleGlue, FULL)
    names = ("logits", "workspace", "draft_tokens", "step")
    DraftSampleGlue.is_valid(**{name: inputs[name] for name in names})
