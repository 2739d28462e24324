"""glm_draft_hidden_half: the norm and the sum in fp64, and what is refused."""

import numpy as np
import pytest
import torch
from helpers.numerics import gamma, nearest_bf16, to_numpy
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.gemm.draft_hidden_half import (  # noqa: E501
    DraftHiddenHalf,
)

FULL = DraftHiddenHalf.CELLS[0]
TINY = Geometry(hidden_size=64)


@pytest.mark.parametrize("cell", DraftHiddenHalf.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(DraftHiddenHalf, cell)


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_tiny_cell(ranks: int) -> None:
    spec = {"rows": 1, "ranks": ranks, "geometry": TINY, "dtype": torch.float32}
    check_cell(DraftHiddenHalf, Cell("tiny", spec))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [1, 16])
def test_the_share_is_a_sum_over_the_normed_row(ranks: int, dtype: torch.dtype) -> None:
    spec = {"rows": 1, "ranks": ranks, "geometry": TINY, "dtype": dtype}
    inputs = cell_inputs(DraftHiddenHalf, Cell("share", spec))
    x, norm, weight = (to_numpy(inputs[k]) for k in ("hidden_states", "hnorm_weight", "weight"))
    normed = x / np.sqrt((x * x).sum() / x.size + inputs["eps"]) * norm
    if dtype == torch.bfloat16:
        normed = nearest_bf16(normed)
    out = DraftHiddenHalf.raw_call(**inputs)
    assert out.dtype == torch.float32 and out.shape == (1, 64 // ranks)
    # Below gamma(64) for the norm, if not rounded to bf16, and again for the sum.
    off = gamma(2 * 64) * (np.abs(normed) @ np.abs(weight).T)
    assert (np.abs(to_numpy(out) - normed @ weight.T) <= off).all()


def test_bad_arguments_are_refused() -> None:
    def refuses(message: str, **changes: object) -> None:
        assert_refuses(DraftHiddenHalf, FULL, message, **changes)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    refuses(r"hidden_states is \[2, 6144\]; it must be \[1, any\]", hidden_states=zeros(2, 6144))
    refuses(r"hidden_states is \[6144\]", hidden_states=zeros(6144))
    refuses(r"hnorm_weight is \[64\]", hnorm_weight=zeros(64))
    refuses(r"hnorm_weight is torch.float32", hnorm_weight=torch.zeros(6144))
    refuses(r"weight is \[384, 64\]", weight=zeros(384, 64))
    refuses(r"weight has the strides", weight=zeros(6144, 384).T)
    refuses(r"weight has 385 rows; it must be a rank's equal part of 6144", weight=zeros(385, 6144))
    narrow = {"hidden_states": zeros(1, 64), "hnorm_weight": zeros(64), "weight": zeros(4, 64)}
    refuses(r"hidden size is 64", **narrow)
