"""What the step's exchanges take, against sizes counted by hand."""

from dataclasses import fields, replace

import pytest
import torch

from tensorrt_llm._torch.distributed import LamportWorkspace, Payload
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    GLM_5_2_TP16,
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.comm import (  # noqa: E501
    _exchange,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.workspaces import (  # noqa: E501
    Workspaces,
    buffer_sizes,
)
from tensorrt_llm.mapping import Mapping

SUM, EXCHANGE = Payload.SUM, Payload.EXCHANGE


def test_glm_5_2_on_16_ranks() -> None:
    """8 verify rows of each of 16 ranks, in bf16.

    hops: 8 * 16 rows of 6144 * 2 B = 12,288 B.
    logits: 8 * 16 rows of 9680 * 2 B = 19,360 B.
    topk: 8 * 16 rows of 2048 pairs of an fp32 value and an int32 position, 16,384 B.
    ehproj_table: from each rank an id, a value and 2 words of padding, 16 B; a bf16 row of the
        table, 12,288 B; its 6144 / 16 = 384 fp32 outputs of the hidden half, 1536 B: 13,840 B.
    sample_glue: from each rank an id and a value, 8 B.
    """
    assert buffer_sizes(GLM_5_2_TP16, torch.bfloat16) == {
        "hops": (SUM, 1_572_864),
        "logits": (EXCHANGE, 2_478_080),
        "topk": (EXCHANGE, 2_097_152),
        "ehproj_table": (EXCHANGE, 221_440),
        "sample_glue": (EXCHANGE, 128),
    }


def test_the_hops_of_16_ranks_are_one_shot() -> None:
    _, hops = buffer_sizes(GLM_5_2_TP16, torch.bfloat16)["hops"]
    assert hops == _exchange.one_shot_bytes(16)


def test_fp32_takes_twice_the_rows_and_as_many_words() -> None:
    """The table's packet is 16 + 24,576 + 1536 = 26,128 B; pairs do not depend on the dtype."""
    assert buffer_sizes(GLM_5_2_TP16, torch.float32) == {
        "hops": (SUM, 3_145_728),
        "logits": (EXCHANGE, 4_956_160),
        "topk": (EXCHANGE, 2_097_152),
        "ehproj_table": (EXCHANGE, 418_048),
        "sample_glue": (EXCHANGE, 128),
    }


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_buffers_are_whole_vectors(ranks) -> None:
    """Also of sizes that are not."""
    odd = replace(GLM_5_2_TP16, tp_size=ranks, vocab_size=13, max_rows=3, hidden_size=48)
    sizes = buffer_sizes(odd, torch.bfloat16)
    assert all(nbytes > 0 and nbytes % 16 == 0 for _, nbytes in sizes.values())
    needed = 3 * ranks * 13 * 2
    assert needed <= sizes["logits"][1] < needed + 16


def test_one_rank_makes_what_it_needs() -> None:
    """All keys are its own, so that there is nothing to agree on."""
    geometry = Geometry(tp_size=1, hidden_size=32, vocab_size=40, max_rows=2)
    made = Workspaces.create(Mapping(), geometry, torch.float32)
    sizes = buffer_sizes(geometry, torch.float32)
    opened = {
        field.name: LamportWorkspace.at(descriptor)
        for field in fields(made)
        if (descriptor := getattr(made, field.name)) is not None
    }
    assert made.topk is None and opened.keys() == sizes.keys() == {
        "hops",
        "logits",
        "ehproj_table",
        "sample_glue",
    }
    for purpose, workspace in opened.items():
        assert (workspace.payload, workspace.bytes_per_buffer) == sizes[purpose]
    assert len({id(workspace) for workspace in opened.values()}) == len(opened)
    again = Workspaces.create(Mapping(), geometry, torch.float32)
    assert torch.equal(again.hops, made.hops)
