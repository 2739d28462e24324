"""glm_draft_glue_rmsnorm_cat: windows against a formula in fp64, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.numerics import assert_between, gamma, nearest_bf16, to_numpy
from helpers.op_cells import assert_refuses, cell_id, cell_inputs, check_cell

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, assert_bitwise
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.spec.draft_glue_rmsnorm_cat import (  # noqa: E501
    DraftGlueRmsnormCat,
)

FIRST = DraftGlueRmsnormCat.CELLS[0]
TINY = Geometry(hidden_size=48)


@pytest.mark.parametrize("cell", DraftGlueRmsnormCat.CELLS, ids=cell_id)
def test_cell(cell: Cell) -> None:
    check_cell(DraftGlueRmsnormCat, cell)


@pytest.mark.parametrize("rank", range(16))
def test_tiny_cell(rank: int) -> None:
    spec = {"rows": 3, "rank": rank, "geometry": TINY, "dtype": torch.float32}
    check_cell(DraftGlueRmsnormCat, Cell("tiny", spec))


def whole(inputs: dict[str, Any]) -> np.ndarray:
    """All columns in fp64, not rounded."""
    table, ids = to_numpy(inputs["embed_table"]), inputs["input_ids"].tolist()
    halves = []
    rows = [table[i] if 0 <= i < len(table) else np.zeros(table.shape[1]) for i in ids]
    for x, weight in (
        (np.stack(rows), inputs["enorm_weight"]),
        (to_numpy(inputs["hidden_states"]), inputs["hnorm_weight"]),
    ):
        mean = (x * x).sum(-1, keepdims=True) / x.shape[1]
        halves.append(x / np.sqrt(mean + inputs["eps"]) * to_numpy(weight))
    return np.concatenate(halves, axis=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [(0, 96), (0, 8), (40, 56), (48, 56), (88, 96)])
def test_a_window_is_its_part_of_the_whole(dtype, window) -> None:
    spec = {"rows": 8, "rank": 0, "outside": True, "geometry": TINY, "dtype": dtype}
    inputs = cell_inputs(DraftGlueRmsnormCat, Cell("window", spec))
    inputs["col_lo"], inputs["col_hi"] = window
    out = DraftGlueRmsnormCat.raw_call(**inputs)
    assert out.dtype == dtype and out.is_contiguous()
    exact = whole(inputs)[:, slice(*window)]
    # Mean of 48 squares, root and two products in fp32: below gamma(48).
    lowest, highest = (exact - gamma(48) * np.abs(exact), exact + gamma(48) * np.abs(exact))
    if dtype == torch.bfloat16:  # rounded once: between the roundings of both ends
        lowest, highest = nearest_bf16(lowest), nearest_bf16(highest)
    assert_between(out, (lowest, highest))


def test_the_windows_of_all_ranks_make_the_whole_bit_for_bit() -> None:
    inputs = cell_inputs(DraftGlueRmsnormCat, FIRST)
    whole = DraftGlueRmsnormCat.raw_call(**{**inputs, "col_hi": 2 * 6144})
    windows = [
        DraftGlueRmsnormCat.raw_call(**{**inputs, "col_lo": lo, "col_hi": lo + 768})
        for lo in range(0, 2 * 6144, 768)
    ]
    assert_bitwise([torch.cat(windows, dim=1)], [whole])


def test_a_half_outside_of_the_window_is_not_read() -> None:
    inputs = cell_inputs(DraftGlueRmsnormCat, FIRST)
    out = DraftGlueRmsnormCat.raw_call(**inputs)
    nan = torch.full_like(inputs["hidden_states"], torch.nan)
    assert_bitwise([DraftGlueRmsnormCat.raw_call(**{**inputs, "hidden_states": nan})], [out])


def test_ids_outside_of_the_table_give_zeros() -> None:
    inputs = cell_inputs(DraftGlueRmsnormCat, FIRST)
    inputs["input_ids"][:] = torch.tensor([-1, 64, 2**40, -(2**40), 0, 63, 1, 2])
    zero = (DraftGlueRmsnormCat.raw_call(**inputs) == 0).all(-1)
    assert zero.tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize("window", [(4, 16), (0, 12)])
def test_windows_that_no_vector_starts_are_refused(window) -> None:
    message = rf"\[{window[0]}, {window[1]}\); both must be multiples of 8"
    assert_refuses(DraftGlueRmsnormCat, FIRST, message, col_lo=window[0], col_hi=window[1])


@pytest.mark.parametrize("window", [(-8, 8), (8, 8), (0, 12296)])
def test_windows_outside_of_the_columns_are_refused(window) -> None:
    message = rf"\[{window[0]}, {window[1]}\); it must be in \[0, 12288\)"
    assert_refuses(DraftGlueRmsnormCat, FIRST, message, col_lo=window[0], col_hi=window[1])


def test_misaligned_rows_are_refused() -> None:
    shifted = torch.zeros(8 * 6144 + 1, dtype=torch.bfloat16)[1:].view(8, 6144)
    for name in ("hidden_states", "embed_table"):
        message = f"{name} begins 2 bytes past a multiple of 16"
        assert_refuses(DraftGlueRmsnormCat, FIRST, message, **{name: shifted})


def test_other_bad_arguments_are_refused() -> None:
    def refuses(message: str, **changes: object) -> None:
        assert_refuses(DraftGlueRmsnormCat, FIRST, message, **changes)

    refuses(r"input_ids is \[7\]; it must be \[8\]", input_ids=torch.zeros(7).long())
    refuses(r"input_ids is torch.float32", input_ids=torch.zeros(8))
    refuses(r"embed_table is torch.float32", embed_table=torch.zeros(4, 6144))
    refuses(r"hidden_states has the strides", hidden_states=torch.zeros(6144, 8).bfloat16().T)
    refuses(r"enorm_weight is \[4\]", enorm_weight=torch.zeros(4).bfloat16())
    refuses(r"hnorm_weight is \[4\]", hnorm_weight=torch.zeros(4).bfloat16())
