"""Scores of paged keys against one dot product at a time, and the schedule's shares."""

from typing import Any

import pytest
import torch
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer.fp8_paged_mqa_logits import (  # noqa: E501
    Fp8PagedMqaLogits,
)

SMALL = Geometry(index_n_heads=16, index_head_dim=32)
E4M3 = torch.float8_e4m3fn
PAGE, DIM = 64, 32


def small(cell: Cell) -> Cell:
    return Cell(cell.why, {**cell.spec, "keys": cell.spec["keys"] // 41, "geometry": SMALL})


CELL, TWO = small(Fp8PagedMqaLogits.CELLS[0]), small(Fp8PagedMqaLogits.CELLS[-1])


@pytest.mark.parametrize("cell", Fp8PagedMqaLogits.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(Fp8PagedMqaLogits, small(cell))


def scores(inputs: dict[str, Any]) -> Tensor:
    return Fp8PagedMqaLogits.run(Fp8PagedMqaLogits.raw_call, inputs)[0]


def key_of(inputs: dict[str, Any], request: int, position: int) -> Tensor:
    """float64 [dim], dequantised: a page is all tokens' data, then all tokens' scales."""
    block, t = int(inputs["block_table"][request, position // PAGE]), position % PAGE
    page = inputs["index_pool"][block, inputs["layer_slot"]]
    scale = page[PAGE * DIM + 4 * t : PAGE * DIM + 4 * t + 4].clone().view(torch.float32)
    return page[t * DIM : (t + 1) * DIM].view(E4M3).double() * scale.double()


def exact(inputs: dict[str, Any], row: int, position: int) -> float:
    request, t = divmod(row, inputs["q"].shape[1])
    dots = inputs["q"][request, t].double() @ key_of(inputs, request, position)
    return float(inputs["w"][request, t].double() @ dots.clamp(min=0))


@pytest.mark.parametrize("cell", [CELL, TWO], ids=cell_id)
def test_scores_are_the_formula(cell: Cell) -> None:
    inputs = cell_inputs(Fp8PagedMqaLogits, cell)
    out = scores(inputs)
    for row, position in enumerate(inputs["position_ids"].tolist()):
        assert bool((out[row, position + 1 :] == float("-inf")).all())
        expected = torch.tensor([exact(inputs, row, c) for c in range(position + 1)])
        # Sums of 32 and 16 terms, relative to magnitudes below 16 times the largest score.
        bound = 16 * (DIM + 16) * 2.0**-24 * float(expected.abs().max())
        assert float((out[row, : position + 1].double() - expected).abs().max()) <= bound


def test_integers_are_exact() -> None:
    inputs = cell_inputs(Fp8PagedMqaLogits, CELL)
    generator = torch.Generator().manual_seed(1)
    integers = lambda t: torch.randint(-8, 9, t.shape, generator=generator)  # noqa: E731
    inputs["q"] = integers(inputs["q"]).float().to(E4M3)
    inputs["w"] = integers(inputs["w"]).float()
    pages = inputs["index_pool"][:, 1]
    data = integers(pages[:, : PAGE * DIM]).float().to(E4M3).view(torch.uint8)
    pages[:, : PAGE * DIM] = data
    pages[:, PAGE * DIM :] = torch.ones(PAGE).view(torch.uint8)
    out = scores(inputs)
    for row, position in enumerate(inputs["position_ids"].tolist()):
        expected = [exact(inputs, row, c) for c in range(position + 1)]
        assert out[row, : position + 1].tolist() == expected


def test_every_column_is_written_and_the_padding_stays() -> None:
    inputs = cell_inputs(Fp8PagedMqaLogits, CELL)
    width = inputs["logits"].shape[1]
    buffer = torch.full((8, width + 256), 7.0)
    inputs["logits"], inputs["position_ids"][3] = buffer[:, :width], -1
    Fp8PagedMqaLogits.raw_call(**inputs)
    assert bool((buffer[:, width:] == 7).all()) and not bool((buffer[:, :width] == 7).any())
    assert bool((buffer[3, :width] == float("-inf")).all())


def test_neither_the_launch_nor_other_rows_change_a_bit() -> None:
    inputs = cell_inputs(Fp8PagedMqaLogits, CELL)
    out = scores(inputs)
    assert torch.equal(scores({**inputs, "early_keys": False}), out)
    inputs["q"][0, 5] = 0
    changed = scores(inputs)
    assert torch.equal(changed[:5], out[:5]) and torch.equal(changed[6:], out[6:])


def test_guards_refuse_by_name() -> None:
    inputs = cell_inputs(Fp8PagedMqaLogits, CELL)

    def refused(message: str, **changes: Any) -> None:
        assert_refuses(Fp8PagedMqaLogits, CELL, message, **changes)

    refused("q is torch.float16", q=inputs["q"].half())
    refused("w is torch.float64", w=inputs["w"].double())
    refused(r"layer_slot 2 is not in \[0, 2\)", layer_slot=2)
    refused("positions is torch.int32", position_ids=inputs["position_ids"].int())
    refused("positions reach from 256 to 263; logits has 256", position_ids=torch.arange(256, 264))
    refused("up to its last position; index_pool has 4", block_table=inputs["block_table"] + 1)
    refused("up to its last position", block_table=torch.full_like(inputs["block_table"], -1))
    refused("each of 1 requests must be there once", row_order=torch.tensor([1]).int())
    refused("the schedule ends at", scheduler_metadata=torch.zeros(149, 2).int())
    refused("out is", logits=inputs["logits"][:, :192])
