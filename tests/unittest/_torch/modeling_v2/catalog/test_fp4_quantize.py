"""fp4_quantize: codes and scales by search over all values, the layouts' formulas, refusals."""

import numpy as np
import pytest
import torch
from helpers.numerics import nearest_e4m3, to_numpy
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.custom_ops.fp4 import dequantize_nvfp4, quantize_nvfp4
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell
from tensorrt_llm._torch.modeling_v2.catalog.fp4_quantize import Fp4Quantize

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FULL, SWIZZLED = Fp4Quantize.CELLS[0], Fp4Quantize.CELLS[2]


@pytest.mark.parametrize("cell", Fp4Quantize.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(Fp4Quantize, cell)


def nearest_code(x: np.float32) -> int:
    """By search; of two equally near values the one with the even code."""
    size = abs(float(x))
    code = min(range(8), key=lambda i: (abs(VALUES[i] - size), i % 2))
    return code + 8 * bool(np.signbit(x))


def quantised_by_hand(group: np.ndarray, scale: np.float32) -> tuple[list[int], float]:
    """(16 codes, e4m3 value) of 16 fp32 numbers."""
    wanted = scale * np.float32(np.abs(group).max() / np.float32(6))
    block = np.float32(nearest_e4m3(np.float64(wanted)))
    inverse = np.float32(0) if block == 0 else np.float32(scale / block)
    return [nearest_code(np.float32(x * inverse)) for x in group], float(block)


# Halves and quarters hit ties; tiny numbers make scales of 0; large ones saturate.
numbers = st.one_of(
    st.floats(-8, 8, width=32),
    st.integers(-48, 48).map(lambda i: i / 8),
    st.floats(-(2.0**-20), 2.0**-20, width=32),
    st.floats(-1e9, 1e9, width=32),
)


@given(st.lists(numbers, min_size=16, max_size=16), st.sampled_from([1.0, 0.37, 448.0, 2688.0]))
def test_groups_are_quantised_as_stated(values: list[float], scale: float) -> None:
    group = np.array(values, dtype=np.float32)
    packed, block = quantize_nvfp4(torch.from_numpy(group)[None], torch.tensor([scale]))
    codes, expected = quantised_by_hand(group, np.float32(scale))
    assert [int(b) >> shift & 0xF for b in packed[0] for shift in (0, 4)] == codes
    assert float(block[0, 0].float()) == expected


def test_every_code_is_reached_and_read_back() -> None:
    x = torch.tensor([VALUES + tuple(-v for v in VALUES)])
    packed, block = quantize_nvfp4(x, torch.ones(1))
    assert packed[0].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert torch.equal(dequantize_nvfp4(packed, block, torch.tensor(1.0)), x)


def test_what_is_representable_comes_back_unchanged() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (4, 24), dtype=torch.uint8, generator=generator)
    codes[:, ::8] |= 0x07  # each group reaches 6, so its scale is found again
    scale = torch.tensor([[0.5, 1.0, 448.0]]).expand(4, -1).to(torch.float8_e4m3fn)
    x = dequantize_nvfp4(codes, scale, torch.tensor(1.0))
    again, found = quantize_nvfp4(x, torch.ones(1))
    assert torch.equal(again, codes) and torch.equal(found.float(), scale.float())


def test_infinities_saturate_and_nan_spoils_its_group_alone() -> None:
    x = torch.ones(1, 48)
    x[0, 3], x[0, 20] = torch.inf, torch.nan
    packed, scale = quantize_nvfp4(x, torch.ones(1))
    assert scale[0, 0].float() == 448 and scale[0, 1].isnan() and scale[0, 2].float() > 0
    values = dequantize_nvfp4(packed, scale, torch.tensor(1.0))
    assert values[0, 3] == 6 * 448 and values[0, 16:32].isnan().all()
    assert values[0, 32:].isfinite().all()


def test_scales_lie_where_the_layouts_say() -> None:
    torch.manual_seed(2)
    x = torch.randn(130, 16 * 6)
    linear = Fp4Quantize.raw_call(x, torch.full((1,), 300.0), 16, False, False)[1].view(130, 6)
    swizzled = Fp4Quantize.raw_call(x, torch.full((1,), 300.0), 16, False, True)[1]
    expected = torch.zeros(256 * 8, dtype=torch.uint8)
    for r in range(130):
        for c in range(6):
            quarter = r % 128 // 32 * 4
            at = c % 4 + c // 4 * 512 + r % 32 * 16 + quarter + r // 128 * 128 * 8
            expected[at] = linear[r, c]
    assert torch.equal(swizzled, expected)


def test_codes_do_not_depend_on_the_layout() -> None:
    inputs = cell_inputs(Fp4Quantize, FULL)
    swizzled = {**inputs, "is_sf_swizzled_layout": True}
    codes = (Fp4Quantize.raw_call(**arguments)[0] for arguments in (inputs, swizzled))
    assert torch.equal(*codes)


def test_the_cells_scale_keeps_normal_numbers_in_range() -> None:
    inputs = cell_inputs(Fp4Quantize, FULL)
    packed, bits = Fp4Quantize.raw_call(**inputs)
    scale = bits.view(torch.float8_e4m3fn).view(8, -1)
    off = dequantize_nvfp4(packed, scale, 1 / inputs["global_scale"]) - inputs["input"].float()
    # Half of the widest step, 4 to 6, and half a step of the scale, on the group's largest.
    largest = to_numpy(inputs["input"].float().unflatten(1, (-1, 16)).abs().amax(-1))
    worst = to_numpy(off.unflatten(1, (-1, 16)).abs().amax(-1))
    assert (worst <= largest * (1 / 6 + 2**-4)).all()


def test_bad_arguments_are_refused() -> None:
    def refuses(message: str, **changes: object) -> None:
        assert_refuses(Fp4Quantize, FULL, message, **changes)

    refuses(r"input is torch.float16", input=torch.zeros(8, 16, dtype=torch.float16))
    refuses(r"24 columns; they must be a multiple of 16", input=torch.zeros(8, 24))
    refuses(r"input has the strides", input=torch.zeros(32, 16).mT)
    refuses(r"global_scale is torch.float32 \[\]", global_scale=torch.tensor(1.0))
    refuses(r"sf_vec_size is 32", sf_vec_size=32)
    refuses(r"sf_use_ue8m0 True", sf_use_ue8m0=True)
