"""Writing token rows into the paged pools. A negative slot or offset is padding and writes
nowhere."""

import torch

from tensorrt_llm._torch.custom_ops.fp8 import saturating_cast

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installations have no Triton
    triton = None


def scatter_rows(rows: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """rows[slots[t]] = values[t].

    Args:
        rows: [num_rows, width], contiguous rows of a pool.
        slots: int64 [tokens], distinct where not negative.
        values: [tokens, width], cast to the rows' dtype; e4m3 saturates at 448.
    """
    values = saturating_cast(values, rows.dtype)
    if not rows.is_cuda and rows.dtype.itemsize > 1:  # torch has no index_copy_ for fp8
        try:
            rows.index_copy_(0, slots, values)
            return
        except (
            IndexError
        ):  # padding, which no CPU step has; what was written is written again below
            pass
    width = rows.shape[1] * rows.element_size()
    scatter_bytes(rows, torch.where(slots < 0, slots, slots * width), values)


def scatter_bytes(pool: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
    """Write the bytes of values[t] at byte offsets[t] of the pool.

    Args:
        pool: contiguous, any shape and dtype; addressed as bytes.
        offsets: int64 [tokens].
        values: [tokens, width] of any dtype.
    """
    flat, data = pool.view(torch.uint8).view(-1), values.contiguous().view(torch.uint8)
    if flat.is_cuda:
        width = data.shape[1]
        _scatter_bytes_kernel[(data.shape[0],)](
            flat, offsets, data, width, triton.next_power_of_2(width)
        )
        return
    keep = offsets >= 0
    where = offsets[keep, None] + torch.arange(data.shape[1])
    flat[where] = data[keep]


if triton is not None:

    @triton.jit
    def _scatter_bytes_kernel(  # type: ignore[no-untyped-def]
        pool, offsets, values, width, BLOCK: tl.constexpr
    ):
        """One program per token copies `width` bytes."""
        token = tl.program_id(0).to(tl.int64)
        offset = tl.load(offsets + token)
        column = tl.arange(0, BLOCK)
        keep = (column < width) & (offset >= 0)
        tl.store(
            pool + offset + column, tl.load(values + token * width + column, mask=keep), mask=keep
        )
