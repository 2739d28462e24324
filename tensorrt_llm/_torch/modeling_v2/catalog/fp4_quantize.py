"""Activations to NVFP4."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorrt_llm._torch.custom_ops.fp4 import NVFP4_GROUP, quantize_nvfp4
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

TILE_ROWS, TILE_SCALES = 128, 4


@define_op
class Fp4Quantize(OpWrapper):
    """Rows to NVFP4: e2m1 codes, an e4m3 scale for 16 of them along the row, for one global scale.

    `custom_ops.fp4.quantize_nvfp4` states every operation; per group of 16, in fp32 with one
    rounding to nearest each: scale = e4m3(global_scale * (max|x| / 6)), saturating at 448;
    code = e2m1(x * (global_scale / scale)), saturating at 6, ties to even, zeros with their sign; a
    scale of 0 gives codes of 0. So the result is defined to the bit, and a kernel may not replace
    the divisions by approximate reciprocals. x is about code * scale / global_scale.

    Args:
        input: bf16 [rows, columns], contiguous, columns a multiple of 16. Also fp32.
        global_scale: fp32 [1], 1 / (the checkpoint's input_scale).
        sf_vec_size: 16.
        sf_use_ue8m0: false; scales are e4m3.
        is_sf_swizzled_layout: the layout of the scales, see below.

    Returns:
        (uint8 [rows, columns / 2], element 2j in the low nibble; uint8 [n], the bits of the e4m3
        scales). Linear, as routed experts take them: n = rows * columns / 16, row-major. Swizzled,
        as dense GEMMs take them, with rows rounded up to 128 and columns / 16 to 4, the padding 0:
        the scale c of row r lies at (c % 4) + (c // 4) * 512 + (r % 32) * 16 +
        ((r % 128) // 32) * 4 + (r // 128) * 128 * (columns / 16 rounded up). The two have the same
        n where nothing is padded, so nobody notices a wrong one by its size.

    Under programmatic dependent launch the kernel reads nothing before its wait but global_scale.

    Source: the NVFP4 format as NVIDIA ModelOpt exports it.
    """

    schema = (
        "fp4_quantize(Tensor input, Tensor global_scale, int sf_vec_size, bool sf_use_ue8m0, "
        "bool is_sf_swizzled_layout) -> (Tensor, Tensor)"
    )
    CELLS = (
        Cell("GLM-5.2 routed experts' input, K 7", {"rows": 8, "columns": 6144, "swizzled": False}),
        Cell("GLM-5.2 routed experts, one row", {"rows": 1, "columns": 6144, "swizzled": False}),
        Cell("swizzled scales with padding", {"rows": 8, "columns": 6144, "swizzled": True}),
    )

    @staticmethod
    def raw_call(
        input: Tensor,
        global_scale: Tensor,
        sf_vec_size: int,
        sf_use_ue8m0: bool,
        is_sf_swizzled_layout: bool,
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.trtllm.fp4_quantize(
            input, global_scale, sf_vec_size, sf_use_ue8m0, is_sf_swizzled_layout
        )

    @staticmethod
    def reference(
        input: Tensor,
        global_scale: Tensor,
        sf_vec_size: int,
        sf_use_ue8m0: bool,
        is_sf_swizzled_layout: bool,
    ) -> tuple[Tensor, Tensor]:
        packed, scale = quantize_nvfp4(input, global_scale)
        bits = scale.view(torch.uint8)
        return packed, (_swizzled(bits) if is_sf_swizzled_layout else bits).flatten()

    @staticmethod
    def fake(
        input: Tensor,
        global_scale: Tensor,
        sf_vec_size: int,
        sf_use_ue8m0: bool,
        is_sf_swizzled_layout: bool,
    ) -> tuple[Tensor, Tensor]:
        rows, columns = input.shape
        groups = columns // NVFP4_GROUP
        if is_sf_swizzled_layout:
            scales = _rounded_up(rows, TILE_ROWS) * _rounded_up(groups, TILE_SCALES)
        else:
            scales = rows * groups
        packed = input.new_empty(rows, columns // 2, dtype=torch.uint8)
        return packed, input.new_empty(scales, dtype=torch.uint8)

    @staticmethod
    def is_valid(
        input: Tensor,
        global_scale: Tensor,
        sf_vec_size: int,
        sf_use_ue8m0: bool,
        is_sf_swizzled_layout: bool,
    ) -> None:
        if input.dim() != 2 or input.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"input is {input.dtype} {list(input.shape)}; it must be bf16 or fp32 "
                "[rows, columns]"
            )
        if not input.is_contiguous():
            raise ValueError(f"input has the strides {list(input.stride())}; it must be contiguous")
        if input.shape[1] % NVFP4_GROUP:
            raise ValueError(f"input has {input.shape[1]} columns; they must be a multiple of 16")
        if global_scale.dtype != torch.float32 or global_scale.shape != (1,):
            raise ValueError(
                f"global_scale is {global_scale.dtype} {list(global_scale.shape)}; it must be "
                "fp32 [1]"
            )
        if sf_vec_size != NVFP4_GROUP or sf_use_ue8m0:
            raise ValueError(
                f"sf_vec_size is {sf_vec_size} and sf_use_ue8m0 {sf_use_ue8m0}; NVFP4 has e4m3 "
                "scales of 16, so 16 and False"
            )

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        rows, columns = cell.spec["rows"], cell.spec["columns"]
        x = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        x.normal_(generator=generator)
        return {
            "input": x,
            # Normal numbers reach about 5 here: the range is used, with some room.
            "global_scale": torch.full((1,), 448.0, device=device),
            "sf_vec_size": NVFP4_GROUP,
            "sf_use_ue8m0": False,
            "is_sf_swizzled_layout": cell.spec["swizzled"],
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        """Without the padding."""
        x = inputs["input"]
        return x.nbytes + x.numel() // 2 + x.numel() // NVFP4_GROUP


def _rounded_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _swizzled(bits: Tensor) -> Tensor:
    """uint8 [rows, groups] in the tiled layout that `Fp4Quantize` states, as one row of bytes."""
    rows, groups = bits.shape
    padded = F.pad(bits, (0, -groups % TILE_SCALES, 0, -rows % TILE_ROWS))
    # [row tile, quarter, row of quarter, group tile, group of tile]
    tiles = padded.view(padded.shape[0] // TILE_ROWS, 4, 32, -1, TILE_SCALES)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


fp4_quantize = Fp4Quantize()
