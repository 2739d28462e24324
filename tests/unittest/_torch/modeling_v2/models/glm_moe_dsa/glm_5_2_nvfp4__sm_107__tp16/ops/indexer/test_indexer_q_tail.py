"""Index queries from the raw latent against norm, projection and tail in float64; guards."""

from typing import Any

import pytest
import torch
from helpers.indexer_tails import expected_query, small
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.indexer.indexer_q_tail import (  # noqa: E501
    IndexerQTail,
)


@pytest.mark.parametrize("cell", IndexerQTail.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(IndexerQTail, small(cell))


def test_the_folded_projection_is_norm_then_wq_b() -> None:
    inputs = cell_inputs(IndexerQTail, small(IndexerQTail.CELLS[0]))
    x, weight = inputs["q_a"].double(), inputs["weight"].double()
    factor = 1 / (x.square().mean(-1, keepdim=True) + inputs["eps"]).sqrt()
    q = torch.einsum("tr,hdr->thd", x * factor, weight).bfloat16().double()
    out_q, out_w = IndexerQTail.raw_call(**inputs)
    for t in range(out_q.shape[0]):
        for h in range(out_q.shape[1]):
            values, head_weight = expected_query(inputs, q, t, h)
            assert out_q[t, h].float().tolist() == values
            assert float(out_w[t, h]) == head_weight


def test_guards_refuse_by_name() -> None:
    cell = small(IndexerQTail.CELLS[0])
    inputs = cell_inputs(IndexerQTail, cell)

    def refused(message: str, **changes: Any) -> None:
        assert_refuses(IndexerQTail, cell, message, **changes)

    refused("q_a is torch.float16", q_a=inputs["q_a"].half())
    refused(r"weight is \[3, 12, 63\]", weight=inputs["weight"][..., 1:])
    refused("weights is torch.float32", weights=inputs["weights"].float())
    refused("cos_sin rotates 14 channels; there are 12", cos_sin=torch.zeros(256, 7, 2))
    refused("256 channels have more than one scale", weight=torch.zeros(3, 256, 64).bfloat16())
