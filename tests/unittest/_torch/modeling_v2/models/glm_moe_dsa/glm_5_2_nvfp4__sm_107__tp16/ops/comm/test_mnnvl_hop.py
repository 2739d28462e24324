"""glm_mnnvl_hop on real rank processes."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.engine import run_ranks
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell

from tensorrt_llm._torch.distributed import (
    AllReduce,
    LamportWorkspace,
    Payload,
    lamport,
    lamport_workspace,
)
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, assert_bitwise, assert_within_ulp
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16 import (
    geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops import (
    _numerics,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.comm import (  # noqa: E501
    _exchange,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.comm.mnnvl_hop import (  # noqa: E501
    MnnvlHop,
)
from tensorrt_llm.mapping import Mapping

RANKS, HIDDEN, EPS = 4, 48, 1e-5
ROW_COUNTS = (8, 1, 8, 2, 2, 8, 1)
DTYPES = (torch.bfloat16, torch.float32)
SMALL = Cell(
    "small", {"rows": 3, "dtype": torch.float32, "geometry": geometry.Geometry(hidden_size=HIDDEN)}
)  # noqa: E501

Pair = tuple[torch.Tensor, torch.Tensor]


def operands(call: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Addends of all ranks [RANKS, rows, HIDDEN] of unlike sizes, so that the order of additions
    shows; residual; gamma."""
    generator = torch.Generator().manual_seed(call)
    scales = torch.tensor([1.0, 300.0, 0.01, 20.0])[:, None, None]
    addends = scales * torch.randn(RANKS, rows, HIDDEN, generator=generator)
    residual, gamma = (torch.randn(n, HIDDEN, generator=generator) for n in (rows, 1))
    return addends.to(dtype), residual.to(dtype), gamma[0].to(dtype)


def expected(call: int, rows: int, dtype: torch.dtype) -> Pair:
    """The contract once more in numpy: fp32 sums in rank order, the norm in fp64."""
    addends, residual, gamma = operands(call, rows, dtype)
    total = np.zeros((rows, HIDDEN), np.float32)
    for addend in addends.float().numpy():
        total = total + addend
    rounded = torch.from_numpy(total).to(dtype).float().numpy()
    updated = torch.from_numpy(rounded + residual.float().numpy()).to(dtype)
    wide = updated.double().numpy()
    normed = np.empty_like(wide)
    for row in range(rows):
        mean_square = sum(value * value for value in wide[row]) / HIDDEN
        normed[row] = wide[row] / np.sqrt(mean_square + EPS) * gamma.double().numpy()
    return torch.from_numpy(normed).to(dtype), updated


def workspace_of(mapping: Mapping, tag: str = "model") -> torch.Tensor:
    size = 8 * RANKS * HIDDEN * 4
    return lamport_workspace(mapping, tag, Payload.SUM, size).descriptor


def sequence(mapping: Mapping) -> list[Pair]:
    """Row counts and dtypes change; in every third call a producer has published the input."""
    workspace, results = workspace_of(mapping), []
    for call, rows in enumerate(ROW_COUNTS):
        addends, residual, gamma = operands(call, rows, DTYPES[call % 2])
        mine: torch.Tensor | None = addends[mapping.rank]
        if call % 3 == 2:
            LamportWorkspace.at(workspace).publish(MnnvlHop.name(), mine)
            mine = None
        results.append(MnnvlHop.raw_call(mine, residual, gamma, EPS, workspace))
    return results


def unfused_chain(mapping: Mapping) -> list[Pair]:
    results = []
    for call, rows in enumerate(ROW_COUNTS):
        addends, residual, gamma = operands(call, rows, DTYPES[call % 2])
        updated = AllReduce(mapping)(addends[mapping.rank]) + residual
        results.append((_numerics.rms_norm_rounded_once(updated, gamma, EPS), updated))
    return results


def interleaved(mapping: Mapping) -> list[Pair]:
    """The same calls, taken in turn by two private workspaces and in another order by each rank."""
    workspaces = [workspace_of(mapping, tag) for tag in ("first", "second")]
    results: dict[int, Pair] = {}
    for call in range(0, len(ROW_COUNTS) - 1, 2):
        pair = [call, call + 1] if mapping.rank % 2 else [call + 1, call]
        for i in pair:
            opened = LamportWorkspace.at(workspaces[i % 2])
            addends = operands(i, ROW_COUNTS[i], DTYPES[i % 2])[0]
            opened.publish(MnnvlHop.name(), addends[mapping.rank])
        for i in pair:
            _, residual, gamma = operands(i, ROW_COUNTS[i], DTYPES[i % 2])
            results[i] = MnnvlHop.raw_call(None, residual, gamma, EPS, workspaces[i % 2])
    return [results[i] for i in sorted(results)]


def special_values(mapping: Mapping) -> Pair:
    """Column 0: -0.0 everywhere; column 1: NaN on one rank."""
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
    x[0, 0] = -0.0
    x[0, 1] = torch.nan if mapping.rank == 2 else 1.0
    residual = torch.full_like(x, -0.0)
    gamma = torch.ones(HIDDEN, dtype=torch.bfloat16)
    return MnnvlHop.raw_call(x, residual, gamma, EPS, workspace_of(mapping))


def other_rows(mapping: Mapping) -> str:
    """Rank 1 comes with a row less."""
    rows = 1 if mapping.rank == 1 else 2
    addends, residual, gamma = operands(0, rows, torch.bfloat16)
    workspace = workspace_of(mapping, "other rows")
    with pytest.raises(RuntimeError) as caught:
        MnnvlHop.raw_call(addends[mapping.rank], residual, gamma, EPS, workspace)
    return str(caught.value)


def refused(mapping: Mapping) -> None:
    """What the kernel's shapes exclude can be shown only with ranks that it serves."""
    assert_refuses(MnnvlHop, MnnvlHop.CELLS[0], "bytes past a multiple of 16", input=misaligned())


def misaligned() -> torch.Tensor:
    return torch.empty(8 * 6144 + 1, dtype=torch.bfloat16)[1:].view(8, 6144)


def work(mapping: Mapping) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(lamport.TIMEOUT_ENV, "20")  # a loaded host
        for cell in MnnvlHop.CELLS:
            check_cell(MnnvlHop, cell)
        refused(mapping)
        cases = (sequence, unfused_chain, interleaved, special_values)
        answers = {case.__name__: case(mapping) for case in cases}
        patch.setenv(lamport.TIMEOUT_ENV, "2")
        return {**answers, "other_rows": other_rows(mapping)}


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """Checks every cell on the way."""
    return run_ranks(RANKS, work)


@pytest.mark.parametrize("case", ["sequence", "interleaved"])
def test_numbers_are_the_contracts(answers, case: str) -> None:
    """The norm in fp32: HIDDEN squares summed in any order are off by HIDDEN half ulp at most, and
    the root halves that; the root and two products round once each."""
    for answer in answers:
        for call, (normed, updated) in enumerate(answer[case]):
            normed_ref, updated_ref = expected(call, ROW_COUNTS[call], DTYPES[call % 2])
            assert_bitwise([updated], [updated_ref])
            if normed.dtype == torch.bfloat16:
                _numerics.assert_rounded_once(normed, normed_ref)
            else:
                ulp = HIDDEN / 4 + 1.5
                assert_within_ulp(normed, normed_ref, element_ulp=ulp, rms_ulp=ulp)


@pytest.mark.parametrize("case", ["sequence", "interleaved", "special_values"])
def test_all_ranks_have_the_same_bits(answers, case: str) -> None:
    for answer in answers[1:]:
        for mine, first in zip(answer[case], answers[0][case], strict=True):
            assert_bitwise([*mine], [*first])


def test_the_unfused_chain_has_the_same_bits(answers) -> None:
    for answer in answers:
        for fused, chain in zip(answer["sequence"], answer["unfused_chain"], strict=True):
            assert_bitwise(fused, chain)


def test_another_order_of_ranks_would_give_other_bits() -> None:
    addends = operands(0, 8, torch.bfloat16)[0]
    backwards = _exchange.sum_of_ranks(addends.flip(0))
    assert not torch.equal(_exchange.sum_of_ranks(addends), backwards)


def test_minus_zeros_sum_to_plus_zero_and_a_nan_arrives(answers) -> None:
    for answer in answers:
        _, updated = answer["special_values"]
        assert updated[0, 0] == 0 and not updated[0, 0].signbit()
        assert updated[0, 1].isnan()
        assert (updated[0, 2:] == RANKS).all()


def test_unequal_rows_are_an_error_that_names_both_calls(answers) -> None:
    for rank, answer in enumerate(answers):
        assert (
            f"rank {rank} makes glm_mnnvl_hop of {1 if rank == 1 else 2} rows"
            in (answer["other_rows"])
        )
        assert f"but rank {0 if rank == 1 else 1} makes glm_mnnvl_hop of" in answer["other_rows"]


def test_sixteen_ranks_are_two_halves() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = 10.0 ** torch.arange(-8, 8)[:, None] * torch.randn(16, 50, generator=generator)
    halves = []
    for half in parts.numpy().reshape(2, 8, 50):
        total = np.zeros(50, np.float32)
        for part in half:
            total = total + part
        halves.append(total)
    assert torch.equal(_exchange.sum_of_ranks(parts), torch.from_numpy(halves[0] + halves[1]))


@pytest.mark.parametrize(
    ("world_size", "rows", "hidden", "served"),
    [
        (16, 8, 6144, True),  # exactly 1.5 MiB
        (16, 9, 6144, False),
        (8, 10, 6144, True),
        (8, 11, 6144, False),  # over 1 MiB
        (4, 1, 8192, True),  # 8 CTAs of 128 vectors
        (4, 1, 8320, False),
        (2, 1, 16, True),  # 2 CTAs of one vector
        (2, 1, 8, False),
        (2, 1, 20, False),  # rows of 40 bytes
        (1, 1, 6144, False),
        (3, 1, 6144, False),
    ],
)
def test_served_shapes(world_size: int, rows: int, hidden: int, served: bool) -> None:
    assert _exchange.hop_supported(world_size, rows, hidden) is served


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"input is \[3, 47\]", {"input": torch.ones(3, 47)}),
        ("input is torch.bfloat16", {"input": torch.ones(3, HIDDEN).bfloat16()}),
        ("input has the strides", {"input": torch.ones(HIDDEN, 3).t()}),
        (r"residual is \[48\]", {"residual": torch.ones(HIDDEN)}),
        (r"gamma is \[3\]", {"gamma": torch.ones(3)}),
        ("no open Lamport workspace", {"workspace": torch.zeros(6, dtype=torch.int64)}),
        ("workspace is torch.int32", {"workspace": torch.zeros(6, dtype=torch.int32)}),
    ],
)
def test_refuses(message: str, changes: dict[str, Any]) -> None:
    assert_refuses(MnnvlHop, SMALL, message, **changes)


def test_refuses_a_workspace_of_another_kind_or_too_small() -> None:
    exchange = lamport_workspace(Mapping(), "hop guards: exchange", Payload.EXCHANGE, 1024)
    small = lamport_workspace(Mapping(), "hop guards: small", Payload.SUM, 16)
    assert_refuses(MnnvlHop, SMALL, "is for EXCHANGE; it must be", workspace=exchange.descriptor)
    assert_refuses(MnnvlHop, SMALL, "has 16 bytes per buffer", workspace=small.descriptor)


@pytest.mark.parametrize("cell", MnnvlHop.CELLS[:1], ids=cell_id)
def test_refuses_a_single_rank_for_the_kernel(cell: Cell) -> None:
    assert_refuses(MnnvlHop, cell, "8 rows of 6144 on 1 ranks")


def test_a_published_input_needs_no_tensor() -> None:
    inputs = cell_inputs(MnnvlHop, SMALL)
    MnnvlHop.is_valid(**{**inputs, "input": None})
