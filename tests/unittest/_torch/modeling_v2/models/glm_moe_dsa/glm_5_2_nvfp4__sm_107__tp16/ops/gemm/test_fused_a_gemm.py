"""glm_fused_a_gemm: one rounded sum per output, a hint that changes nothing, and what is
refused."""

import pytest
import torch
from helpers.numerics import assert_between, projection_bounds
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, assert_bitwise
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.gemm.fused_a_gemm import (  # noqa: E501
    FusedAGemm,
)

FULL = FusedAGemm.CELLS[0]
TINY = Geometry(
    hidden_size=96,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    index_head_dim=16,
    index_n_heads=4,
)


def tiny(cell: Cell) -> Cell:
    return Cell(cell.why, {**cell.spec, "geometry": TINY, "dtype": torch.float32})


@pytest.mark.parametrize("cell", FusedAGemm.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(FusedAGemm, tiny(cell))


def test_cells_have_the_outputs_of_both_kinds_of_layers() -> None:
    outputs = [cell_inputs(FusedAGemm, cell)["weight"].shape[0] for cell in FusedAGemm.CELLS[:2]]
    assert outputs == [2784, 2624]
    tiny_outputs = [
        cell_inputs(FusedAGemm, tiny(cell))["weight"].shape[0] for cell in FusedAGemm.CELLS[:2]
    ]
    assert tiny_outputs == [24 + 16 + 8 + 16 + 4, 24 + 16 + 8]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_outputs_are_sums_that_are_rounded_once(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 96).to(dtype), torch.randn(68, 96).to(dtype)
    out = FusedAGemm.raw_call(x, weight, [])
    assert out.dtype == dtype
    assert_between(out, projection_bounds(x, weight, dtype))


def test_outputs_depend_neither_on_the_indexers_rows_nor_on_other_rows() -> None:
    inputs = cell_inputs(FusedAGemm, FULL)
    whole = FusedAGemm.raw_call(**inputs)
    attention = FusedAGemm.raw_call(inputs["hidden_states"], inputs["weight"][:2624], [])
    one_row = FusedAGemm.raw_call(inputs["hidden_states"][5:6], inputs["weight"], [])
    assert_bitwise([attention, one_row], [whole[:, :2624].contiguous(), whole[5:6]])


def test_prefetching_changes_nothing() -> None:
    inputs = cell_inputs(FusedAGemm, tiny(FULL))
    ahead = [torch.randn(3), torch.zeros(2, 2, dtype=torch.int32)]
    before = [t.clone() for t in ahead]
    out = FusedAGemm.raw_call(**{**inputs, "l2_prefetch": ahead})
    assert_bitwise([out, *ahead], [FusedAGemm.raw_call(**{**inputs, "l2_prefetch": []}), *before])


@pytest.mark.parametrize(
    "message, x, weight",
    [
        (r"number of rows is 9; the kernel serves", (9, 6144), (2624, 6144)),
        (r"number of rows is 0", (0, 6144), (2624, 6144)),
        (r"hidden size is 7168", (1, 7168), (2112, 7168)),
        (r"weight rows is 2112; .* \(2624, 2784\)", (1, 6144), (2112, 6144)),
        (r"weight is \[2624, 8\]; it must be \[any, 6144\]", (1, 6144), (2624, 8)),
    ],
)
def test_shapes_that_the_kernel_does_not_run_are_refused(message, x, weight) -> None:
    x, weight = torch.zeros(x).bfloat16(), torch.zeros(weight).bfloat16()
    assert_refuses(FusedAGemm, FULL, message, hidden_states=x, weight=weight)


def test_other_bad_arguments_are_refused() -> None:
    def refuses(message: str, **changes: object) -> None:
        assert_refuses(FusedAGemm, tiny(FULL), message, **changes)

    refuses("weight is torch.bfloat16", weight=torch.zeros(68, 96).bfloat16())
    refuses("weight has the strides", weight=torch.zeros(96, 68).T)
    refuses("hidden_states has the strides", hidden_states=torch.zeros(96, 8).T)
    refuses("l2_prefetch has 5 tensors; at most 4", l2_prefetch=[torch.zeros(1)] * 5)
    refuses(r"l2_prefetch\[1\] is strided", l2_prefetch=[torch.zeros(2), torch.zeros(4)[::2]])
