"""glm_dense_mlp_small_m: the chain in fp64 with its rounding points, and what is refused."""

import numpy as np
import pytest
import torch
from helpers.numerics import nearest_bf16, swiglu, to_numpy
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, assert_bitwise
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.gemm.dense_mlp_small_m import (  # noqa: E501
    DenseMlpSmallM,
    supported,
)

FULL = DenseMlpSmallM.CELLS[0]
TINY = Geometry(hidden_size=64, intermediate_size=24)


def tiny(cell: Cell, dtype: torch.dtype = torch.float32) -> Cell:
    return Cell(cell.why, {**cell.spec, "geometry": TINY, "dtype": dtype})


@pytest.mark.parametrize("cell", DenseMlpSmallM.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(DenseMlpSmallM, tiny(cell))


def test_the_real_shape() -> None:
    inputs = cell_inputs(DenseMlpSmallM, FULL)
    DenseMlpSmallM.is_valid(**inputs)
    assert [list(t.shape) for t in inputs.values()] == [[8, 6144], [1536, 6144], [6144, 768]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cell", DenseMlpSmallM.CELLS, ids=cell_id)
def test_the_chain_is_within_its_bound(cell: Cell, dtype: torch.dtype) -> None:
    inputs = cell_inputs(DenseMlpSmallM, tiny(cell, dtype))
    out = DenseMlpSmallM.raw_call(**inputs)
    assert out.dtype == dtype
    x, gate_up, down = (to_numpy(t) for t in inputs.values())
    exact, off = swiglu(x, gate_up[:24], gate_up[24:], down, dtype)
    assert (np.abs(to_numpy(out) - exact) <= off).all()


def test_bf16_rounds_gate_up_and_h_and_nothing_else() -> None:
    """Every value is far from a boundary, so that rounding at other points gives other bits."""
    inputs = cell_inputs(DenseMlpSmallM, tiny(FULL, torch.bfloat16))
    x, gate_up, down = (to_numpy(t) for t in inputs.values())
    g, u = np.split(nearest_bf16(x @ gate_up.T), 2, axis=1)
    out = nearest_bf16(nearest_bf16(g / (1 + np.exp(-g)) * u) @ down.T)
    assert np.array_equal(to_numpy(DenseMlpSmallM.raw_call(**inputs)), out)
    silu_rounded = nearest_bf16(nearest_bf16(nearest_bf16(g / (1 + np.exp(-g))) * u) @ down.T)
    assert not np.array_equal(silu_rounded, out)


def test_fp32_is_the_built_in_block() -> None:
    x, gate_up, down = cell_inputs(DenseMlpSmallM, tiny(FULL)).values()
    gate, up = torch.nn.functional.linear(x, gate_up).chunk(2, dim=-1)
    hidden = torch.nn.functional.silu(gate) * up
    expected = torch.nn.functional.linear(hidden, down)
    assert_bitwise([DenseMlpSmallM.raw_call(x, gate_up, down)], [expected])


def test_the_host_can_ask_what_is_served() -> None:
    ask = torch.ops.trtllm.glm_dense_mlp_small_m_supported
    served = [ask(rows, 6144, 768) for rows in range(10)]
    assert served == [False] + [True] * 8 + [False]
    assert not ask(8, 6144, 12288) and not ask(8, 7168, 768) and supported(8, 6144, 768)


@pytest.mark.parametrize("rows, hidden, inter", [(9, 6144, 768), (0, 6144, 768), (8, 6144, 384)])
def test_shapes_that_the_kernels_do_not_serve_are_refused(rows, hidden, inter) -> None:
    changes = {
        "x": torch.zeros(rows, hidden).bfloat16(),
        "gate_up_weight": torch.zeros(2 * inter, hidden).bfloat16(),
        "down_weight": torch.zeros(hidden, inter).bfloat16(),
    }
    message = f"{rows} rows, hidden {hidden}, intermediate {inter}; the kernels serve"
    assert_refuses(DenseMlpSmallM, FULL, message, **changes)


def test_other_bad_arguments_are_refused() -> None:
    def refuses(message: str, **changes: object) -> None:
        assert_refuses(DenseMlpSmallM, tiny(FULL), message, **changes)

    refuses(r"x is \[64\]", x=torch.zeros(64))
    refuses(r"x has the strides", x=torch.zeros(64, 8).T)
    refuses(
        r"gate_up_weight is \[24, 64\]; it must be \[48, 64\]", gate_up_weight=torch.ones(24, 64)
    )
    refuses(r"down_weight is torch.bfloat16", down_weight=torch.ones(64, 24).bfloat16())
    refuses(r"down_weight has the strides", down_weight=torch.ones(24, 64).T)
