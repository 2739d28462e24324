"""Both formats against formulas written out element by element, independent of the library code."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorrt_llm._torch.custom_ops.fp4 import dequantize_nvfp4
from tensorrt_llm._torch.models.checkpoints import CheckpointReader
from tensorrt_llm._torch.models.checkpoints.quantization import (
    declared_format,
    nvfp4_part_problem,
    read_fp8,
    read_nvfp4,
)

CPU = torch.device("cpu")
FP8_SHAPE = (300, 270)
NVFP4_SHAPE = (20, 96)
RELAXED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)


def ranges(size: int, step: int = 1) -> st.SearchStrategy[tuple[int, int]]:
    """Non-empty (start, stop) with both ends at multiples of `step`."""
    ends = st.integers(0, size // step)
    pairs = st.tuples(ends, ends).filter(lambda pair: pair[0] != pair[1])
    return pairs.map(lambda pair: (min(pair) * step, max(pair) * step))


def fp8_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(FP8_SHAPE, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand((3, 3), generator=generator) + 0.5
    return {"w.weight": weight, "w.weight_scale_inv": scales}


def fp8_by_hand() -> torch.Tensor:
    tensors = fp8_tensors()
    weight, scales = tensors["w.weight"].float().tolist(), tensors["w.weight_scale_inv"].tolist()
    values = [
        [value * scales[row // 128][col // 128] for col, value in enumerate(line)]
        for row, line in enumerate(weight)
    ]
    return torch.tensor(values, dtype=torch.float64).float()


def nvfp4_tensors() -> dict[str, torch.Tensor]:
    rows, cols = NVFP4_SHAPE
    generator = torch.Generator().manual_seed(2)
    scale = (torch.rand((rows, cols // 16), generator=generator) * 400).to(torch.float8_e4m3fn)
    return {
        "w.weight": torch.randint(0, 256, (rows, cols // 2), generator=generator).to(torch.uint8),
        "w.weight_scale": scale,
        "w.weight_scale_2": torch.tensor(0.37),
        "w.input_scale": torch.tensor(1.0),
    }


def e2m1_by_hand(code: int) -> float:
    """sign | 2 exponent bits with bias 1 | 1 mantissa bit, subnormal at exponent 0."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    size = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if sign else size


def nvfp4_by_hand() -> torch.Tensor:
    tensors = nvfp4_tensors()
    packed, scales = tensors["w.weight"].tolist(), tensors["w.weight_scale"].float().tolist()
    global_scale = float(tensors["w.weight_scale_2"])
    result = torch.empty(NVFP4_SHAPE)
    for row in range(NVFP4_SHAPE[0]):
        for col in range(NVFP4_SHAPE[1]):
            code = (packed[row][col // 2] >> (4 * (col % 2))) & 15
            result[row, col] = e2m1_by_hand(code) * scales[row][col // 16] * global_scale
    return result


FP8_EXPECTED, NVFP4_EXPECTED = fp8_by_hand(), nvfp4_by_hand()


@RELAXED
@given(rows=st.none() | ranges(300), cols=st.none() | ranges(270))
def test_any_part_of_an_fp8_matrix(write_checkpoint, rows, cols):
    reader = CheckpointReader(write_checkpoint(fp8_tensors()))
    part = read_fp8(reader, "w.weight", rows, cols, CPU)
    expected = FP8_EXPECTED[slice(*(rows or (None,))), slice(*(cols or (None,)))]
    assert part.dtype == torch.float32
    assert torch.equal(part, expected)
    assert reader.bytes_read <= expected.numel() + 9 * 4


@RELAXED
@given(rows=st.none() | ranges(20), cols=st.none() | ranges(96, step=16))
def test_any_part_of_an_nvfp4_matrix(write_checkpoint, rows, cols):
    reader = CheckpointReader(write_checkpoint(nvfp4_tensors()))
    part = read_nvfp4(reader, "w.weight", rows, cols, CPU)
    expected = NVFP4_EXPECTED[slice(*(rows or (None,))), slice(*(cols or (None,)))]
    assert part.dtype == torch.float32
    # The expectation is rounded once from float64, the product twice by the same fp32 scale.
    torch.testing.assert_close(part, expected, rtol=2**-23, atol=0)
    assert reader.bytes_read == expected.numel() * 9 // 16 + 4


def test_all_codes_low_nibble_first():
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    one = torch.ones(1, 1).to(torch.float8_e4m3fn)
    values = dequantize_nvfp4(packed, one, torch.tensor(1.0))
    assert values[0].tolist() == [e2m1_by_hand(code) for code in range(16)]


@pytest.mark.parametrize("shape", [(4, 24), (4,), (2, 4, 16)])
def test_nvfp4_needs_whole_groups(shape):
    assert "multiple of 16" in str(nvfp4_part_problem(shape, None))


def test_nvfp4_columns_are_cut_at_groups():
    assert nvfp4_part_problem((4, 64), (16, 48)) is None
    assert "(16, 40)" in str(nvfp4_part_problem((4, 64), (16, 40)))


FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
NVFP4_CONFIG = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {}}
HF_QUANT = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": []}}


@pytest.mark.parametrize(
    ("config", "hf_quant_config", "expected"),
    [
        ({}, {}, "none"),
        ({"quantization_config": None}, {}, "none"),
        ({"quantization_config": FP8_CONFIG}, {}, "fp8"),
        ({"quantization_config": NVFP4_CONFIG}, HF_QUANT, "nvfp4"),
        ({}, HF_QUANT, "nvfp4"),
    ],
)
def test_declared_format(config, hf_quant_config, expected):
    assert declared_format(config, hf_quant_config) == expected


@pytest.mark.parametrize(
    "quantization",
    [
        FP8_CONFIG | {"weight_block_size": [64, 128]},
        {"quant_method": "fp8"},
        {"quant_algo": "NVFP4", "group_size": 32},
        {"quant_method": "awq"},
    ],
)
def test_formats_that_are_not_served(quantization):
    with pytest.raises(ValueError, match="served are fp8 .* and NVFP4"):
        declared_format({"quantization_config": quantization}, {})


def test_two_files_that_disagree():
    with pytest.raises(ValueError, match="disagree"):
        declared_format({"quantization_config": FP8_CONFIG}, HF_QUANT)
