"""Exact choice with ties on one rank and on several, against Python's sort of (value, position)."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from helpers.engine import run_ranks
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.distributed import Payload, lamport, lamport_workspace
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.comm.mnnvl_allgather import (  # noqa: E501
    MnnvlAllgather,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer.hist_shard_meta import (  # noqa: E501
    HistShardMeta,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer.hist_topk import (  # noqa: E501
    HistTopK,
    exchange_bytes,
)
from tensorrt_llm.mapping import Mapping

CELL = HistTopK.CELLS[0]
SHARDED = [cell for cell in HistTopK.CELLS if "exchange" in cell.spec]
INF, NAN = math.inf, math.nan
MAX_TOPK = 2048

# (keys, tokens of a page): on 2, 3 and 4 ranks shards are uneven, of the last ranks some have no
# key, or a single rank has all of them, or nobody has any.
SIZES = ((37, 4), (8, 2), (9, 2), (12, 2), (3, 4), (1, 1), (0, 4))
SETS: dict[str, list[float]] = {
    "ties": [0.0, -0.0, 1.0],
    "equal": [2.0],
    "special": [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, -NAN, 1e-45],
    "nan": [NAN],
    "no key": [-INF],
    "any": [],
}
SMALL = [(*size, topk, kind, 2) for size, topk, kind in product(SIZES, (1, 5, 16), SETS)]
LARGE = [(8000, 64, MAX_TOPK, kind, 8) for kind in ("ties", "any")]
CASES = SMALL + LARGE


@pytest.mark.parametrize("cell", HistTopK.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    """Those with a workspace on a single rank, which exchanges with itself."""
    check_cell(HistTopK, cell)


def best(row: list[float], length: int, topk: int) -> list[int]:
    """The contract, key by key: NaN above all, the larger column of equals, in rising order."""
    keys = [c for c in range(length) if row[c] != -INF]
    keys.sort(key=lambda c: (math.isnan(row[c]), 0.0 if math.isnan(row[c]) else row[c], c))
    chosen = sorted(keys[max(0, len(keys) - topk) :])
    return chosen + [-1] * (topk - len(chosen))


def scalar(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


def choose(
    logits: torch.Tensor,
    length: int,
    topk: int,
    start: int = 0,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.full((len(logits), topk), -9, dtype=torch.int32)
    arguments = (logits, scalar(length), scalar(start), workspace, out)
    HistTopK.is_valid(*arguments)
    HistTopK.raw_call(*arguments)
    return out


def chosen_of(rows: list[list[float]], length: int, topk: int) -> list[list[int]]:
    return choose(torch.tensor(rows), length, topk).tolist()


values = st.one_of(st.sampled_from([*SETS["special"]]), st.floats(width=32))


@given(st.data(), st.integers(1, 12), st.integers(1, 3), st.integers(1, 9))
def test_every_choice_is_the_sorted_one(
    data: st.DataObject, columns: int, rows: int, topk: int
) -> None:
    row = st.lists(values, min_size=columns, max_size=columns)
    logits = data.draw(st.lists(row, min_size=rows, max_size=rows))
    length = data.draw(st.integers(0, columns))
    assert chosen_of(logits, length, topk) == [best(row, length, topk) for row in logits]


@pytest.mark.parametrize("cell", [HistTopK.CELLS[i] for i in (1, 3)], ids=cell_id)
def test_cells_at_full_size_are_the_sorted_choice(cell: Cell) -> None:
    inputs = cell_inputs(HistTopK, cell)
    out = HistTopK.run(HistTopK.raw_call, inputs)[0]
    for row, chosen in zip(inputs["logits"].tolist(), out.tolist(), strict=True):
        assert chosen == best(row, 8192, 2048)


def test_the_larger_of_equals_wins() -> None:
    assert chosen_of([[2.0, 1.0, 1.0, 1.0, 3.0, 1.0]], 6, 4) == [[0, 3, 4, 5]]
    assert chosen_of([[0.0, -0.0, 0.0, -1.0]], 4, 2) == [[1, 2]]
    assert chosen_of([[NAN, INF, NAN, 1.0]], 4, 1) == [[2]]


def test_a_short_row_is_padded_and_no_key_is_chosen_twice() -> None:
    assert chosen_of([[-INF, 5.0, -INF, 4.0, NAN]], 4, 6) == [[1, 3, -1, -1, -1, -1]]
    assert chosen_of([[1.0, 2.0]], 0, 2) == [[-1, -1]]


def request(case: int) -> torch.Tensor:
    """fp32 [rows, keys]: all scores of a case. NaNs are words of all ones in part."""
    keys, _, _, kind, rows = CASES[case]
    generator = torch.Generator().manual_seed(case)
    drawn = torch.randn(rows, keys, generator=generator)
    if SETS[kind]:
        picks = torch.randint(len(SETS[kind]), (rows, keys), generator=generator)
        drawn = torch.tensor(SETS[kind])[picks]
    ones = drawn.isnan() & (torch.rand(rows, keys, generator=generator) < 0.5)
    return drawn.view(torch.int32).masked_fill(ones, -1).view(torch.float32)


def shard_of(keys: int, page: int, mapping: Mapping) -> tuple[int, int]:
    """(keys, position of the first) of this rank, from the op that cuts a request."""
    pages = max(1, -(-keys // page))
    length, start = scalar(-9), scalar(-9)
    HistShardMeta.raw_call(
        scalar(keys),
        torch.arange(pages, dtype=torch.int32),
        page,
        mapping.tp_rank,
        mapping.tp_size,
        length,
        start,
        torch.empty(1, pages, dtype=torch.int32),
    )
    return int(length), int(start)


def workspace_of(mapping: Mapping, tag: str = "topk") -> torch.Tensor:
    size = exchange_bytes(8, MAX_TOPK, mapping.tp_size)
    return lamport_workspace(mapping, tag, Payload.EXCHANGE, size).descriptor


def sharded(mapping: Mapping) -> tuple[list[int], list[torch.Tensor]]:
    """Every case on one workspace: keys of this rank, and what it writes."""
    lengths, results, workspace = [], [], workspace_of(mapping)
    for case, (keys, page, topk, _, _) in enumerate(CASES):
        length, start = shard_of(keys, page, mapping)
        mine = request(case)[:, start : start + length]
        logits = torch.nn.functional.pad(mine, (0, 3), value=NAN)  # must not be read
        lengths.append(length)
        results.append(choose(logits, length, topk, start, workspace))
    return lengths, results


def other_rows(mapping: Mapping) -> str:
    """The last rank comes with a row less."""
    rows = 2 - (mapping.rank == mapping.tp_size - 1)
    with pytest.raises(RuntimeError) as caught:
        choose(torch.ones(rows, 4), 4, 2, 4 * mapping.rank, workspace_of(mapping, "other rows"))
    return str(caught.value)


def other_op(mapping: Mapping) -> str:
    """The last rank gathers where the others choose."""
    workspace = workspace_of(mapping, "other op")
    with pytest.raises(RuntimeError) as caught:
        if mapping.rank == mapping.tp_size - 1:
            MnnvlAllgather.raw_call(torch.ones(2, 4), workspace)
        else:
            choose(torch.ones(2, 4), 4, 2, 4 * mapping.rank, workspace)
    return str(caught.value)


def work(mapping: Mapping) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(lamport.TIMEOUT_ENV, "20")  # a loaded host
        for cell in SHARDED if mapping.tp_size == 2 else ():
            check_cell(HistTopK, cell)
        answer = {"sharded": sharded(mapping)}
        patch.setenv(lamport.TIMEOUT_ENV, "2")
        return {**answer, "rows": other_rows(mapping), "op": other_op(mapping)}


@pytest.fixture(scope="module", params=[2, 3, 4])
def answers(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Two ranks check the cells with shards on the way."""
    return run_ranks(request.param, work)


def test_all_ranks_write_what_one_rank_does_with_all_keys(answers) -> None:
    for case, (keys, _, topk, _, _) in enumerate(CASES):
        whole = choose(request(case), keys, topk)
        for answer in answers:
            assert torch.equal(answer["sharded"][1][case], whole), CASES[case]


def test_shards_give_the_sorted_choice(answers) -> None:
    for case, (keys, _, topk, _, _) in enumerate(SMALL):
        expected = [best(row, keys, topk) for row in request(case).tolist()]
        assert answers[0]["sharded"][1][case].tolist() == expected, CASES[case]


def test_the_cases_have_uneven_and_empty_shards(answers) -> None:
    by_case = list(zip(*(answer["sharded"][0] for answer in answers), strict=True))
    assert [sum(lengths) for lengths in by_case] == [case[0] for case in CASES]
    assert any(lengths[-1] == 0 < lengths[-2] for lengths in by_case)
    assert any(0 < lengths[-1] < lengths[0] for lengths in by_case)


def test_another_call_on_a_rank_is_an_error_that_names_both(answers) -> None:
    last = len(answers) - 1
    mine = "glm_dsa_hist_topk of 2 rows of 16 bytes"
    for answer in answers[:last]:
        assert f"makes {mine}, but rank {last} makes glm_dsa_hist_topk of 1 rows" in answer["rows"]
        assert f"makes {mine}, but rank {last} makes glm_mnnvl_allgather of" in answer["op"]
    assert f"rank {last} makes glm_dsa_hist_topk of 1 rows of" in answers[last]["rows"]
    gathering = f"rank {last} makes glm_mnnvl_allgather of 2 rows of 16 bytes"
    assert f"{gathering}, but rank 0 makes {mine}" in answers[last]["op"]


def test_a_buffer_holds_pairs_or_histograms_of_all_ranks() -> None:
    assert exchange_bytes(8, 2048, 16) == 8 * 16 * 2 * 2048 * 4
    assert exchange_bytes(1, 5, 2) == 2 * 2048 * 4
    assert exchange_bytes(1, 1025, 1) == 8208  # 8200, in whole vectors


def test_guards_refuse_by_name() -> None:
    inputs = cell_inputs(HistTopK, CELL)

    def refused(message: str, **changes: Any) -> None:
        assert_refuses(HistTopK, CELL, message, **changes)

    refused("logits is torch.bfloat16", logits=inputs["logits"].bfloat16())
    refused("logits has the strides", logits=torch.zeros(8192, 8).T)
    refused("shard_len is 9000; logits has 8256", shard_len=scalar(9000))
    refused("shard_len is -1", shard_len=scalar(-1))
    refused(r"shard_start is \[2\]", shard_start=torch.zeros(2, dtype=torch.int32))
    refused("shard_start is 64 without a workspace", shard_start=scalar(64))
    refused(r"topk_indices is \[7, 2048\]", topk_indices=inputs["topk_indices"][:7])
    refused("topk_indices is torch.int64", topk_indices=inputs["topk_indices"].long())


def test_guards_refuse_a_workspace_that_does_not_fit() -> None:
    def refused(message: str, payload: Payload, size: int, **changes: Any) -> None:
        tag = f"topk guards: {payload.name} {size}"
        workspace = lamport_workspace(Mapping(), tag, payload, size).descriptor
        assert_refuses(HistTopK, SHARDED[0], message, workspace=workspace, **changes)

    needed = exchange_bytes(8, 2048, 1)
    refused("is for SUM; it must be for EXCHANGE", Payload.SUM, needed)
    refused(f"the call takes {needed}", Payload.EXCHANGE, needed - 16)
    refused("shard_start is -1; it must", Payload.EXCHANGE, needed, shard_start=scalar(-1))
