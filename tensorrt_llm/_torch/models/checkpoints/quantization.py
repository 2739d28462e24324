"""How quantised checkpoint tensors turn back into numbers: one record per format.

FP8 blocks (zai-org's export): `X.weight` e4m3 [out, in] with `X.weight_scale_inv` fp32
[ceil(out/128), ceil(in/128)]; W = weight * weight_scale_inv[row // 128, col // 128].

NVFP4 (NVIDIA ModelOpt's export): `X.weight` uint8 [out, in/2], two e2m1 codes a byte, element 2j in
the low nibble; `X.weight_scale` e4m3 [out, in/16], `X.weight_scale_2` fp32 [], `X.input_scale`
fp32 []; W = e2m1 * weight_scale[row, col // 16] * weight_scale_2. `input_scale` belongs to the
activations: it is checked here and read by nobody who multiplies in higher precision.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tensorrt_llm._torch.custom_ops.fp4 import NVFP4_GROUP, dequantize_nvfp4
from tensorrt_llm._torch.models.checkpoints.reader import CheckpointReader, Range

FP8_BLOCK = 128


@dataclass(frozen=True)
class StoredTensor:
    """Shape and dtype (safetensors' name) that a tensor must have in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def fp8_tensors(name: str, shape: tuple[int, ...]) -> list[StoredTensor]:
    """The stored tensors of one FP8 block matrix of logical shape (out, in)."""
    blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
    return [
        StoredTensor(name, shape, "F8_E4M3"),
        StoredTensor(f"{name}_scale_inv", blocks, "F32"),
    ]


def nvfp4_tensors(name: str, shape: tuple[int, ...]) -> list[StoredTensor]:
    """The stored tensors of one NVFP4 matrix of logical shape (out, in)."""
    out, columns = shape
    return [
        StoredTensor(name, (out, columns // 2), "U8"),
        StoredTensor(f"{name}_scale", (out, columns // NVFP4_GROUP), "F8_E4M3"),
        StoredTensor(f"{name}_scale_2", (), "F32"),
        StoredTensor(f"{name.removesuffix('weight')}input_scale", (), "F32"),
    ]


def dequantize_fp8(
    weight: torch.Tensor, scale_inv: torch.Tensor, first_row: int = 0, first_col: int = 0
) -> torch.Tensor:
    """fp32 [rows, cols] from any part of an FP8 block matrix.

    Args:
        weight: e4m3 [rows, cols], the part that starts at (first_row, first_col) of the matrix.
        scale_inv: fp32, the scales of the 128x128 blocks that the part touches.
    """
    row_blocks = _block_numbers(first_row, weight.shape[0], weight.device)
    col_blocks = _block_numbers(first_col, weight.shape[1], weight.device)
    return weight.float() * scale_inv[row_blocks][:, col_blocks]


def read_fp8(
    reader: CheckpointReader, name: str, rows: Range, cols: Range, device: torch.device
) -> torch.Tensor:
    """The part (rows, cols) of an FP8 block matrix as fp32 on `device`; no alignment is needed."""
    rows, cols = _bounds(reader.tensors[name].shape, rows, cols)
    weight = reader.read(name, rows, cols).to(device)
    blocks = [(start // FP8_BLOCK, -(-stop // FP8_BLOCK)) for start, stop in (rows, cols)]
    scale_inv = reader.read(f"{name}_scale_inv", *blocks).to(device)
    return dequantize_fp8(weight, scale_inv, rows[0], cols[0])


def read_nvfp4(
    reader: CheckpointReader, name: str, rows: Range, cols: Range, device: torch.device
) -> torch.Tensor:
    """The part (rows, cols) of an NVFP4 matrix as fp32 on `device`; see `nvfp4_part_problem`."""
    packed_cols, scale_cols = None, None
    if cols:
        packed_cols = (cols[0] // 2, cols[1] // 2)
        scale_cols = (cols[0] // NVFP4_GROUP, cols[1] // NVFP4_GROUP)
    packed = reader.read(name, rows, packed_cols).to(device)
    scale = reader.read(f"{name}_scale", rows, scale_cols).to(device)
    return dequantize_nvfp4(packed, scale, reader.read(f"{name}_scale_2").to(device))


def nvfp4_part_problem(shape: tuple[int, ...], cols: Range) -> str | None:
    """Why these columns of a logical (out, in) shape cannot be NVFP4 groups, None when they can."""
    if len(shape) != 2 or shape[1] % NVFP4_GROUP:
        return f"NVFP4 needs (out, in) with in a multiple of {NVFP4_GROUP}, found shape {shape}"
    if cols and any(bound % NVFP4_GROUP for bound in cols):
        return f"columns {cols} of an NVFP4 tensor must be cut at multiples of {NVFP4_GROUP}"
    return None


def declared_format(config: dict[str, Any], hf_quant_config: dict[str, Any]) -> str:
    """The format that the config files announce: "fp8", "nvfp4" or "none".

    Args:
        config: config.json; its `quantization_config` is looked at.
        hf_quant_config: hf_quant_config.json, {} when there is none.

    Raises:
        ValueError: a format or block size that is not served, or two files that disagree.
    """
    sources = {
        "config.json": config.get("quantization_config") or {},
        "hf_quant_config.json": hf_quant_config.get("quantization") or {},
    }
    found = {file: _format_of(file, source) for file, source in sources.items() if source}
    if len(set(found.values())) > 1:
        raise ValueError(f"the quantization formats disagree: {found}")
    return next(iter(found.values()), "none")


def _format_of(file: str, source: dict[str, Any]) -> str:
    algorithm = str(source.get("quant_algo") or source.get("quant_method")).lower()
    if algorithm == "fp8" and source.get("weight_block_size") == [FP8_BLOCK, FP8_BLOCK]:
        return "fp8"
    if algorithm == "nvfp4" and source.get("group_size", NVFP4_GROUP) == NVFP4_GROUP:
        return "nvfp4"
    raise ValueError(
        f"{file} declares quantization {source}; served are fp8 with weight_block_size "
        f"[{FP8_BLOCK}, {FP8_BLOCK}] and NVFP4 with group_size {NVFP4_GROUP}"
    )


def _block_numbers(first: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first, first + count, device=device) // FP8_BLOCK - first // FP8_BLOCK


def _bounds(
    shape: tuple[int, ...], rows: Range, cols: Range
) -> tuple[tuple[int, int], tuple[int, int]]:
    return rows or (0, shape[0]), cols or (0, shape[1])
