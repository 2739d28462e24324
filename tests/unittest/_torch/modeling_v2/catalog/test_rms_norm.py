"""flashinfer_rmsnorm: one rounding of the float64 value, rows for themselves, what is refused."""

import numpy as np
import pytest
import torch
from helpers.numerics import gamma, nearest_bf16, to_numpy
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.catalog.rms_norm import RmsNorm

each_cell = pytest.mark.parametrize("cell", RmsNorm.CELLS, ids=cell_id)
FULL = RmsNorm.CELLS[0]


@each_cell
def test_cell(cell: Cell) -> None:
    check_cell(RmsNorm, cell)


@each_cell
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_value_is_rounded_once(cell: Cell, dtype: torch.dtype) -> None:
    inputs = cell_inputs(RmsNorm, cell)
    x, weight = inputs["input"].to(dtype), inputs["weight"].to(dtype)
    out = RmsNorm.raw_call(x, weight, inputs["eps"])
    wide = to_numpy(x)
    mean = (wide * wide).mean(axis=1, keepdims=True)
    exact = wide / np.sqrt(mean + inputs["eps"]) * to_numpy(weight)
    # The square root halves the error of a sum of squares and its division; five more roundings.
    off = gamma(x.shape[1] / 2 + 5) * np.abs(exact)
    low, high = exact - off, exact + off
    if dtype == torch.bfloat16:
        low, high = nearest_bf16(low), nearest_bf16(high)
    assert out.dtype == dtype
    assert ((low <= to_numpy(out)) & (to_numpy(out) <= high)).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    inputs = cell_inputs(RmsNorm, FULL)
    alone = RmsNorm.raw_call(inputs["input"][3:4], inputs["weight"], inputs["eps"])
    assert torch.equal(RmsNorm.raw_call(**inputs)[3:4], alone)


def test_bad_arguments_are_refused() -> None:
    def refuses(message: str, **changes: object) -> None:
        assert_refuses(RmsNorm, FULL, message, **changes)

    refuses(r"input is torch.float16", input=torch.zeros(8, 6144, dtype=torch.float16))
    refuses(r"input is torch.bfloat16 \[6144\]", input=torch.zeros(6144).bfloat16())
    refuses(r"input has the strides", input=torch.zeros(6144, 8).bfloat16().mT)
    refuses(r"weight is torch.float32", weight=torch.zeros(6144))
    refuses(r"weight is torch.bfloat16 \[6143\]", weight=torch.zeros(6143).bfloat16())
