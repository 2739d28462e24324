"""glm_mnnvl_moe_finalize_hop on real rank processes."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.engine import run_ranks
from helpers.op_cells import assert_refuses, cell_inputs, check_cell

from tensorrt_llm._torch.distributed import lamport
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, assert_bitwise
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.comm.mnnvl_hop import (  # noqa: E501
    MnnvlHop,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.comm.mnnvl_moe_finalize_hop import (  # noqa: E501
    MnnvlMoeFinalizeHop,
)
from tensorrt_llm.mapping import Mapping

RANKS = 2
TINY = Geometry(hidden_size=32, num_experts_per_tok=3)
SPECS: tuple[dict[str, Any], ...] = tuple(
    {"rows": rows, "dtype": dtype, **absent}
    for rows in (8, 1, 4)
    for dtype in (torch.bfloat16, torch.float32)
    for absent in ({}, {"absent": True})
)
SMALL = Cell("small", {"rows": 3, "dtype": torch.float32, "geometry": TINY})


def tiny(spec: dict[str, Any]) -> Cell:
    return Cell("tiny", {**spec, "geometry": TINY})


def addend(inputs: dict[str, Any]) -> torch.Tensor:
    """What one rank brings: the contract in numpy loops."""
    dtype = inputs["shared"].dtype
    expert_rows, weights = (inputs[name].float().numpy() for name in ("expert_rows", "weights"))
    routed = np.zeros(inputs["shared"].shape, np.float32)
    for row, places in enumerate(inputs["places"].tolist()):
        for k, place in enumerate(places):
            if place >= 0:
                routed[row] = routed[row] + weights[row, k] * expert_rows[place]
    rounded = torch.from_numpy(routed).to(dtype)
    return (rounded.double() + inputs["shared"].double()).to(dtype)


def work(mapping: Mapping) -> list[dict[str, Any]]:
    """Fused, and its finalize step followed by a plain hop on the same workspace, in turn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(lamport.TIMEOUT_ENV, "20")  # a loaded host
        for cell in MnnvlMoeFinalizeHop.CELLS:
            check_cell(MnnvlMoeFinalizeHop, cell)
        answers = []
        for spec in SPECS:
            inputs = cell_inputs(MnnvlMoeFinalizeHop, tiny(spec))
            mine = addend(inputs)
            fused = MnnvlMoeFinalizeHop.raw_call(**inputs)
            common = {name: inputs[name] for name in ("residual", "gamma", "eps", "workspace")}
            chain = MnnvlHop.raw_call(input=mine, **common)
            answers.append({"mine": mine, "fused": fused, "chain": chain, **common})
        patch.setenv(lamport.TIMEOUT_ENV, "2")
        return [*answers, {"wrong": wrong_order(mapping)}]


def wrong_order(mapping: Mapping) -> str:
    """Rank 0 takes the MoE layer's hop where rank 1 takes a dense layer's."""
    inputs = cell_inputs(MnnvlMoeFinalizeHop, tiny(SPECS[0]))
    common = {name: inputs[name] for name in ("residual", "gamma", "eps", "workspace")}
    with pytest.raises(RuntimeError) as caught:
        if mapping.rank == 0:
            MnnvlMoeFinalizeHop.raw_call(**inputs)
        else:
            MnnvlHop.raw_call(input=inputs["shared"], **common)
    return str(caught.value)


@pytest.fixture(scope="module")
def answers() -> list[list[dict[str, Any]]]:
    """Checks every cell on the way."""
    return run_ranks(RANKS, work)


def test_the_fused_call_is_finalize_then_hop_bit_for_bit(answers) -> None:
    for answer in answers:
        for case in answer[:-1]:
            assert_bitwise(case["fused"], case["chain"])


def test_the_updated_residual_is_the_contracts_sum(answers) -> None:
    for first, second in zip(answers[0][:-1], answers[1][:-1], strict=True):
        dtype = first["residual"].dtype
        total = (first["mine"].double() + second["mine"].double()).to(dtype)
        updated = (total.double() + first["residual"].double()).to(dtype)
        assert_bitwise([first["fused"][1]], [updated])


def test_all_ranks_have_the_same_bits(answers) -> None:
    for first, second in zip(answers[0][:-1], answers[1][:-1], strict=True):
        assert not torch.equal(first["mine"], second["mine"])
        assert_bitwise(first["fused"], second["fused"])


def test_a_hop_in_its_place_on_another_rank_is_an_error_that_names_both(answers) -> None:
    names = ("glm_mnnvl_moe_finalize_hop", "glm_mnnvl_hop")
    for rank, answer in enumerate(answers):
        mine, theirs = names[rank], names[1 - rank]
        assert f"rank {rank} makes {mine} of 8 rows of 64 bytes" in answer[-1]["wrong"]
        assert f"but rank {1 - rank} makes {theirs} of 8 rows of 64 bytes" in answer[-1]["wrong"]


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"expert_rows is \[4, 31\]", {"expert_rows": torch.ones(4, 31)}),
        ("weights is torch.bfloat16", {"weights": torch.ones(3, 3).bfloat16()}),
        (r"places is \[3, 2\]", {"places": torch.zeros(3, 2, dtype=torch.int32)}),
        ("places is torch.int64", {"places": torch.zeros(3, 3, dtype=torch.int64)}),
        (r"shared is \[2, 32\]", {"shared": torch.ones(2, 32)}),
        (r"gamma is \[3\]", {"gamma": torch.ones(3)}),
        ("no open Lamport workspace", {"workspace": torch.zeros(6, dtype=torch.int64)}),
    ],
)
def test_refuses(message: str, changes: dict[str, Any]) -> None:
    assert_refuses(MnnvlMoeFinalizeHop, SMALL, message, **changes)


def test_refuses_a_single_rank_for_the_kernel() -> None:
    assert_refuses(MnnvlMoeFinalizeHop, tiny(SPECS[0]), "8 rows of 32 on 1 ranks")
