"""glm_router_gemm: fp32 logits within the bounds of a sum, and what is refused."""

import pytest
import torch
from helpers.numerics import assert_between, projection_bounds
from helpers.op_cells import assert_refuses, cell_id, check_cell

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, assert_bitwise
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.gemm.router_gemm import (  # noqa: E501
    RouterGemm,
)

FULL = RouterGemm.CELLS[-1]
TINY = Geometry(hidden_size=96, n_routed_experts=20)


@pytest.mark.parametrize("cell", RouterGemm.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    tiny = {"geometry": TINY, "dtype": torch.float32}
    check_cell(RouterGemm, cell if cell is FULL else Cell(cell.why, {**cell.spec, **tiny}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_logits_are_fp32_sums(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    x, weight = torch.randn(tokens, 96).to(dtype), torch.randn(20, 96).to(dtype)
    logits = RouterGemm.raw_call(x, weight)
    assert logits.dtype == torch.float32
    assert_between(logits, projection_bounds(x, weight, torch.float32))


def test_logits_are_not_rounded_to_bf16() -> None:
    x = torch.tensor([[256.0, 1.0]]).bfloat16()
    assert RouterGemm.raw_call(x, torch.ones(1, 2).bfloat16()).item() == 257


def test_fp32_logits_are_those_of_the_built_in_router() -> None:
    x, weight = torch.randn(5, 96), torch.randn(20, 96)
    assert_bitwise([RouterGemm.raw_call(x, weight)], [torch.nn.functional.linear(x, weight)])


@pytest.mark.parametrize(
    "message, x, weight",
    [
        (r"number of tokens is 17; the kernel serves", (17, 6144), (256, 6144)),
        (r"number of tokens is 0", (0, 6144), (256, 6144)),
        (r"hidden size is 7168; .* \(6144,\)", (1, 7168), (256, 7168)),
        (r"number of experts is 128; .* \(256,\)", (1, 6144), (128, 6144)),
        (r"weight is \[256, 8\]; it must be \[any, 6144\]", (1, 6144), (256, 8)),
        (r"hidden_states is \[6144\]", (6144,), (256, 6144)),
    ],
)
def test_shapes_that_the_kernel_does_not_run_are_refused(message, x, weight) -> None:
    x, weight = torch.zeros(x).bfloat16(), torch.zeros(weight).bfloat16()
    assert_refuses(RouterGemm, FULL, message, hidden_states=x, weight=weight)


def test_other_dtypes_and_strides_are_refused() -> None:
    assert_refuses(RouterGemm, FULL, "weight is torch.float32", weight=torch.zeros(256, 6144))
    strided = torch.zeros(6144, 256).bfloat16().T
    assert_refuses(RouterGemm, FULL, r"weight has the strides \[1, 256\]", weight=strided)
