"""flashinfer_silu_and_mul: one rounding of the float64 value, what is let through and refused."""

import math

import numpy as np
import pytest
import torch
from helpers.numerics import assert_between, gamma, nearest_bf16, to_numpy
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.catalog.silu_and_mul import SiluAndMul

each_cell = pytest.mark.parametrize("cell", SiluAndMul.CELLS, ids=cell_id)
FULL = SiluAndMul.CELLS[0]


@each_cell
def test_cell(cell: Cell) -> None:
    check_cell(SiluAndMul, cell)


@each_cell
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_the_value_is_rounded_once(cell: Cell, dtype: torch.dtype, scale: float) -> None:
    x = (scale * cell_inputs(SiluAndMul, cell)["x"]).to(dtype)
    out = SiluAndMul.raw_call(x)
    gate, up = np.split(to_numpy(x), 2, axis=1)
    exact = gate / (1 + np.exp(-gate)) * up
    # An exponential within one ulp (two roundings), a sum, a division and a product.
    off = gamma(5) * np.abs(exact)
    low, high = exact - off, exact + off
    if dtype == torch.bfloat16:
        low, high = nearest_bf16(low), nearest_bf16(high)
    assert out.dtype == dtype
    assert_between(out, (low, high))


def test_gate_stands_before_up() -> None:
    x = torch.tensor([[0.0, 30.0, 5.0, -7.0]])
    assert SiluAndMul.raw_call(x).tolist() == [[0.0, -210.0]]  # 1 + exp(-30) rounds to 1


def test_nan_and_infinity_stay() -> None:
    x = torch.tensor([[math.nan, 1.0, math.inf, 1.0, math.nan, 2.0]], dtype=torch.bfloat16)
    out = SiluAndMul.raw_call(x)[0]
    assert out[:2].isnan().all()
    assert out[2] == math.inf


def test_a_fast_sigmoid_passes_and_a_rounding_before_the_product_does_not() -> None:
    """An exponential that is off by CUDA's bound, always upwards."""
    for cell in SiluAndMul.CELLS:
        x = cell_inputs(SiluAndMul, cell)["x"]
        ref = SiluAndMul.raw_call(x)
        gate, up = x.double().chunk(2, dim=-1)
        off = 1 + (2 + 1.16 * gate.abs()) * 2.0**-23
        fast = (gate / (1 + torch.exp(-gate) * off)).float() * up.float()
        SiluAndMul.compare([fast.to(x.dtype)], [ref])
    x = cell_inputs(SiluAndMul, FULL)["x"]
    gate, up = x.chunk(2, dim=-1)
    with pytest.raises(AssertionError, match="elements differ"):
        SiluAndMul.compare([torch.nn.functional.silu(gate) * up], [SiluAndMul.raw_call(x)])


def test_bad_arguments_are_refused() -> None:
    def refuses(message: str, x: torch.Tensor) -> None:
        assert_refuses(SiluAndMul, FULL, message, x=x)

    refuses(r"x is torch.float16", torch.zeros(8, 256, dtype=torch.float16))
    refuses(r"x is torch.float32 \[256\]", torch.zeros(256))
    refuses("x has 255 columns", torch.zeros(8, 255))
    refuses("x has the strides", torch.zeros(256, 8).mT)
