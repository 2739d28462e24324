"""glm_low_m_gemm: one rounded sum per output, and what is refused."""

import pytest
import torch
from helpers.numerics import assert_between, projection_bounds
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, assert_bitwise
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.gemm.low_m_gemm import (  # noqa: E501
    LowMGemm,
)

TINY = Geometry(hidden_size=64, moe_intermediate_size=8, vocab_size=40)
SMALL_WEIGHTS = ("gate_up", "down")


@pytest.mark.parametrize("cell", LowMGemm.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    tiny = {"geometry": TINY, "dtype": torch.float32}
    real = cell.spec["weight"] in SMALL_WEIGHTS
    check_cell(LowMGemm, cell if real else Cell(cell.why, {**cell.spec, **tiny}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cell", LowMGemm.CELLS, ids=cell_id)
def test_outputs_are_sums_that_are_rounded_once(cell: Cell, dtype: torch.dtype) -> None:
    spec = {**cell.spec, "geometry": TINY, "dtype": dtype}
    x, weight = cell_inputs(LowMGemm, Cell(cell.why, spec)).values()
    out = LowMGemm.raw_call(x, weight)
    assert out.dtype == dtype
    assert_between(out, projection_bounds(x, weight, dtype))


def test_rows_do_not_depend_on_each_other() -> None:
    x, weight = cell_inputs(LowMGemm, LowMGemm.CELLS[0]).values()
    together = LowMGemm.raw_call(x, weight)
    apart = [LowMGemm.raw_call(x[i : i + 1], weight) for i in range(8)]
    assert_bitwise([torch.cat(apart)], [together])


def test_a_parameter_that_requires_grad_is_served_without_one() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 16))
    x = torch.randn(2, 16)
    out = LowMGemm.raw_call(x, weight)
    assert_bitwise([out.detach()], [LowMGemm.raw_call(x, weight.detach())])


def test_bad_arguments_are_refused() -> None:
    def refuses(message: str, **changes: object) -> None:
        assert_refuses(LowMGemm, LowMGemm.CELLS[0], message, **changes)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    refuses("number of rows is 9; the kernel serves", x=zeros(9, 6144))
    refuses("number of rows is 0", x=zeros(0, 6144))
    refuses(r"weight is \[256, 8\]; it must be \[any, 6144\]", weight=zeros(256, 8))
    refuses("weight is torch.float32", weight=torch.zeros(256, 6144))
    refuses("x has the strides", x=zeros(6144, 8).T)
    refuses("weight has the strides", weight=zeros(6144, 256).T)
    refuses("x begins 2 bytes past", x=zeros(6145)[1:].view(1, 6144))
    refuses("rows of 24 bytes", x=zeros(8, 12), weight=zeros(256, 12))
