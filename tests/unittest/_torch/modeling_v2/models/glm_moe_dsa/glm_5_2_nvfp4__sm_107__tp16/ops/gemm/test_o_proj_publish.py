"""glm_o_proj_publish and the hop that collects it, on real rank processes."""

from typing import Any

import pytest
import torch
from helpers.engine import run_ranks
from helpers.numerics import assert_between, projection_bounds
from helpers.op_cells import assert_refuses, check_cell

from tensorrt_llm._torch.distributed import LamportWorkspace, Payload, lamport, lamport_workspace
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, assert_bitwise
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.comm.mnnvl_hop import (  # noqa: E501
    MnnvlHop,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.gemm.low_m_gemm import (  # noqa: E501
    LowMGemm,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.gemm.o_proj_publish import (  # noqa: E501
    OProjPublish,
)
from tensorrt_llm.mapping import Mapping

HIDDEN, INPUTS, EPS = 48, 32, 1e-5
ROW_COUNTS = (8, 1, 8, 3, 3, 1)
DTYPES = (torch.bfloat16, torch.float32)
CALLS = [(rows, dtype) for rows in ROW_COUNTS for dtype in DTYPES]
TINY = Geometry(hidden_size=HIDDEN, heads=2, v_head_dim=INPUTS // 2)
SMALL = Cell("small", {"rows": 3, "dtype": torch.float32, "geometry": TINY})

Pair = tuple[torch.Tensor, torch.Tensor]


def operands(call: int, rank: int) -> Pair:
    """A rank's (x, weight)."""
    rows, dtype = CALLS[call]
    generator = torch.Generator().manual_seed(100 * call + rank)
    x = torch.randn(rows, INPUTS, generator=generator)
    weight = torch.randn(HIDDEN, INPUTS, generator=generator)
    return x.to(dtype), weight.to(dtype)


def hop(call: int, addend: torch.Tensor | None, workspace: torch.Tensor) -> Pair:
    rows, dtype = CALLS[call]
    generator = torch.Generator().manual_seed(call)
    residual, gamma = (torch.randn(n, HIDDEN, generator=generator).to(dtype) for n in (rows, 1))
    return MnnvlHop.raw_call(addend, residual, gamma[0], EPS, workspace)


def workspace_of(mapping: Mapping, tag: str = "model") -> torch.Tensor:
    size = 8 * mapping.tp_size * HIDDEN * 4
    return lamport_workspace(mapping, f"o_proj {tag}", Payload.SUM, size).descriptor


def published(mapping: Mapping) -> list[Pair]:
    results, workspace = [], workspace_of(mapping)
    for call in range(len(CALLS)):
        OProjPublish.raw_call(*operands(call, mapping.rank), workspace)
        results.append(hop(call, None, workspace))
    return results


def chain(mapping: Mapping) -> list[Pair]:
    """The two calls that it takes the place of, on the same workspace."""
    workspace = workspace_of(mapping)
    return [
        hop(call, LowMGemm.raw_call(*operands(call, mapping.rank)), workspace)
        for call in range(len(CALLS))
    ]


def arrived(mapping: Mapping) -> list[torch.Tensor]:
    """What lies in this rank's buffer after a call [rows, ranks, HIDDEN], in the hop's place."""
    results, opened = [], LamportWorkspace.at(workspace_of(mapping, "arrived"))
    for call, (rows, dtype) in enumerate(CALLS):
        before = opened.flags.clone()
        OProjPublish.raw_call(*operands(call, mapping.rank), opened.descriptor)
        assert torch.equal(opened.flags, before)
        results.append(opened.collect(MnnvlHop.name(), rows, HIDDEN, dtype))
    return results


def nothing_published(mapping: Mapping) -> str:
    """The last rank forgets its projection."""
    workspace = workspace_of(mapping, "nothing published")
    with pytest.raises(RuntimeError) as caught:
        if mapping.rank < mapping.tp_size - 1:
            OProjPublish.raw_call(*operands(0, mapping.rank), workspace)
        hop(0, None, workspace)
    return str(caught.value)


def work(mapping: Mapping) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(lamport.TIMEOUT_ENV, "20")  # a loaded host
        for cell in OProjPublish.CELLS if mapping.tp_size == 2 else ():
            check_cell(OProjPublish, cell)
        answers = {case.__name__: case(mapping) for case in (published, chain, arrived)}
        patch.setenv(lamport.TIMEOUT_ENV, "2")
        return {**answers, "nothing_published": nothing_published(mapping)}


@pytest.fixture(scope="module", params=[1, 2, 4])
def answers(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """One rank needs no process group; two check every cell on the way."""
    return [work(Mapping())] if request.param == 1 else run_ranks(request.param, work)


def test_a_published_projection_is_the_unfused_pair_bit_for_bit(answers) -> None:
    for answer in answers:
        for fused, pair in zip(answer["published"], answer["chain"], strict=True):
            assert_bitwise(fused, pair)


def test_every_ranks_rows_arrive_in_its_slot_rounded_once(answers) -> None:
    for answer in answers:
        for call, slots in enumerate(answer["arrived"]):
            for rank in range(len(answers)):
                x, weight = operands(call, rank)
                assert slots.dtype == x.dtype
                assert_between(slots[:, rank], projection_bounds(x, weight, x.dtype))


def test_all_ranks_have_the_same_bits(answers) -> None:
    for answer in answers[1:]:
        for mine, first in zip(answer["published"], answers[0]["published"], strict=True):
            assert_bitwise(mine, first)


def test_a_hop_with_nothing_published_is_an_error_that_names_both_calls(answers) -> None:
    last, name = len(answers) - 1, "glm_mnnvl_hop of 8 rows of 96 bytes"
    for rank, answer in enumerate(answers[:last]):
        waiting = f"rank {rank} waits in {name}, but rank {last} has made no call"
        assert waiting in answer["nothing_published"]
    assert f"is to collect {name}; published is nothing" in answers[last]["nothing_published"]


def test_a_publish_without_a_hop_is_an_error_that_names_both_calls() -> None:
    workspace = workspace_of(Mapping(), "no hop")
    OProjPublish.raw_call(*operands(0, 0), workspace)
    waiting = "nothing has collected yet: glm_mnnvl_hop of 8 rows of 96 bytes"
    with pytest.raises(RuntimeError, match=f"to publish glm_mnnvl_hop of 1 rows .* {waiting}"):
        OProjPublish.raw_call(*operands(2, 0), workspace)
    with pytest.raises(RuntimeError, match="to publish glm_other of 8 rows .* yet: glm_mnnvl_hop"):
        LamportWorkspace.at(workspace).exchange("glm_other", torch.ones(8, HIDDEN))
    with pytest.raises(
        RuntimeError, match="hop of 1 rows of 96 .* published is glm_mnnvl_hop of 8"
    ):
        hop(2, None, workspace)
    hop(0, None, workspace)


def test_a_parameter_that_requires_grad_is_served_without_one() -> None:
    x, weight = operands(1, 0)
    workspace = workspace_of(Mapping(), "grad")
    OProjPublish.raw_call(x, torch.nn.Parameter(weight), workspace)
    assert not hop(1, None, workspace)[1].requires_grad


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("x has the strides", {"x": torch.zeros(INPUTS, 3).T}),
        (r"weight is \[48, 8\]; it must be \[any, 32\]", {"weight": torch.zeros(HIDDEN, 8)}),
        ("weight is torch.bfloat16", {"weight": torch.zeros(HIDDEN, INPUTS).bfloat16()}),
        ("bytes per buffer; the call takes", {"x": torch.zeros(9, INPUTS)}),
        ("no open Lamport workspace", {"workspace": torch.zeros(6, dtype=torch.int64)}),
    ],
)
def test_refuses(message: str, changes: dict[str, Any]) -> None:
    assert_refuses(OProjPublish, SMALL, message, **changes)


def test_refuses_what_the_kernel_does_not_serve() -> None:
    def refused(message: str, rows: int) -> None:
        x, weight = torch.zeros(rows, INPUTS), torch.zeros(HIDDEN, INPUTS)
        changes = {"x": x.bfloat16(), "weight": weight.bfloat16()}
        assert_refuses(OProjPublish, SMALL, message, **changes)

    refused("number of rows is 9; the kernel serves", 9)
    refused("8 rows of 48 on 1 ranks", 8)


def test_refuses_a_workspace_for_exchanges() -> None:
    exchange = lamport_workspace(Mapping(), "o_proj guards", Payload.EXCHANGE, 1024)
    assert_refuses(OProjPublish, SMALL, "is for EXCHANGE; it must", workspace=exchange.descriptor)
