"""Scattering rows and bytes into a pool, against a bytearray written one token at a time."""

import pytest
import torch
from helpers.numerics import DEVICES
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.custom_ops.cache_ops import scatter_bytes, scatter_rows

ROW_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
RERUNS = 20


def random_bytes(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(
        256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def written_by_hand(pool: torch.Tensor, offsets: list[int], values: torch.Tensor) -> bytes:
    """The pool's bytes after values[t] went to offsets[t], except where that is negative."""
    memory = bytearray(as_bytes(pool))
    for offset, value in zip(offsets, values, strict=True):
        data = as_bytes(value)
        if offset >= 0:
            memory[offset : offset + len(data)] = data
    return bytes(memory)


def as_bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


@st.composite
def slots_among(draw: st.DrawFn, num_rows: int = 12) -> list[int]:
    """Distinct rows in any order, with padding of any negative number between them."""
    chosen = draw(st.lists(st.integers(0, num_rows - 1), unique=True, max_size=num_rows))
    for _ in range(draw(st.integers(0 if chosen else 1, 3))):
        chosen.insert(draw(st.integers(0, len(chosen))), draw(st.sampled_from([-1, -1, -7])))
    return chosen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@given(slots=slots_among(), width=st.integers(1, 40), value_dtype=st.sampled_from(ROW_DTYPES[:2]))
def test_rows_arrive_and_all_other_bytes_stay(dtype, device, slots, width, value_dtype) -> None:
    """Rows that begin inside a larger pool, as those of every layer but the first do."""
    pool = random_bytes(14 * width * dtype.itemsize, seed=width).to(device)
    skipped = 2 * width * dtype.itemsize
    rows = pool[skipped:].view(dtype).view(12, width)
    values = torch.randn(len(slots), width, generator=torch.Generator().manual_seed(len(slots)))
    values = values.to(device, value_dtype)
    offsets = [s if s < 0 else skipped + s * width * dtype.itemsize for s in slots]
    expected = written_by_hand(pool, offsets, values.to(dtype))
    scatter_rows(rows, torch.tensor(slots, dtype=torch.int64, device=device), values)
    assert as_bytes(pool) == expected


@pytest.mark.parametrize("device", DEVICES)
@given(slots=slots_among(), width=st.integers(1, 9), gap=st.integers(0, 5))
def test_bytes_go_to_any_offset(device, slots, width, gap) -> None:
    """Offsets need no alignment: scales lie behind the data of a whole page."""
    stride = 4 * width + gap
    pool = random_bytes(12, stride, seed=gap).to(device)
    values = torch.randn(len(slots), width, device=device)
    offsets = [s if s < 0 else s * stride + gap for s in slots]
    expected = written_by_hand(pool, offsets, values)
    scatter_bytes(pool, torch.tensor(offsets, dtype=torch.int64, device=device), values)
    assert as_bytes(pool) == expected


def test_values_need_not_be_contiguous() -> None:
    pool, values = torch.zeros(4, 3), torch.arange(6.0).view(3, 2).t()
    scatter_bytes(pool, torch.tensor([24, 0]), values)
    assert pool.tolist() == [[1, 3, 5], [0, 0, 0], [0, 2, 4], [0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_a_slot_outside_the_pool_is_an_error(dtype) -> None:
    rows = torch.zeros(4, 3).to(dtype)
    with pytest.raises(IndexError):
        scatter_rows(rows, torch.tensor([0, 4]), torch.ones(2, 3))


def test_large_values_saturate_in_fp8_rows() -> None:
    rows = torch.zeros(2, 3).to(torch.float8_e4m3fn)
    scatter_rows(rows, torch.tensor([1]), torch.tensor([[500.0, -1e6, 447.0]]))
    assert rows.float().tolist() == [[0, 0, 0], [448, -448, 448]]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [576, 132, 4, 640])
def test_cuda_repeats_bitwise_and_equals_the_cpu(width) -> None:
    """A decode batch with padding, over and over on fresh copies of one pool."""
    start = random_bytes(64, width, seed=0)
    slots = torch.tensor([5, -1, 63, 0, -1, 17, 18, -1])
    values = random_bytes(len(slots), width, seed=1)
    expected = start.clone()
    scatter_rows(expected, slots, values)
    for _ in range(RERUNS):
        pool = start.cuda()
        scatter_rows(pool, slots.cuda(), values.cuda())
        assert torch.equal(pool.cpu(), expected)


@pytest.mark.gpu
def test_cuda_offsets_beyond_32_bits() -> None:
    """A pool of more than 4 GiB: the last row is written, and no row that a wrapped offset hits."""
    width, rows = 4096, (1 << 20) + 8
    pool = torch.zeros(rows, width, dtype=torch.uint8, device="cuda")
    scatter_rows(
        pool,
        torch.tensor([rows - 1], device="cuda"),
        torch.full((1, width), 7, dtype=torch.uint8, device="cuda"),
    )
    assert bool((pool[-1] == 7).all())
    assert int(pool.count_nonzero()) == width
