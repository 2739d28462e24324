"""What the collective records share: their workspace argument, its cells and the sum of a hop.

An op takes a workspace as the descriptor of a `LamportWorkspace`, an int64 tensor on the host, and
a kernel's host side passes what it holds by value: rank, bytes per buffer, flags, the address of
the multicast mapping or of each rank's buffers. What these addresses point to is state of the
ranks, not an argument: a call needs every rank, and its order among the calls on the workspace.
"""

from collections.abc import Iterable

import torch

from tensorrt_llm._torch.distributed import (
    LamportWorkspace,
    Payload,
    joined_ranks,
    lamport_workspace,
)
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell

from .._cells import dtype_of, geometry_of
from .._checks import KERNEL_DTYPE, VECTOR_BYTES, check_tensor, require
from .._numerics import rms_norm_rounded_once

RANKS = (2, 4, 8, 16)  # that the kernels serve
RANKS_PER_SUM = 8  # ranks whose rows are added one by one before the sums are
CLUSTER_CTAS = range(2, 9)  # that share one row of a hop
CTA_VECTORS = 128  # threads of a CTA at most, one 16-byte vector of the row each


def one_shot_bytes(world_size: int) -> int:
    """What all ranks' rows of one hop may take in a buffer."""
    return 3 << 19 if world_size == 16 else 1 << 20


def hop_supported(world_size: int, rows: int, hidden: int) -> bool:
    """Whether the hop kernels serve this shape in bf16.

    They are one-shot, for 2, 4, 8 or 16 ranks with 1 MiB of rows in a buffer (1.5 MiB for 16
    ranks); a cluster of 2 to 8 CTAs of at most 128 threads covers a row with one 16-byte vector per
    thread.
    """
    vectors, rest = divmod(hidden * KERNEL_DTYPE.itemsize, VECTOR_BYTES)
    covered = any(vectors % ctas == 0 and vectors // ctas <= CTA_VECTORS for ctas in CLUSTER_CTAS)
    fits = rows * world_size * hidden * KERNEL_DTYPE.itemsize <= one_shot_bytes(world_size)
    return world_size in RANKS and not rest and covered and fits


def check_hop_served(rows: int, hidden: int, dtype: torch.dtype, workspace: torch.Tensor) -> None:
    """Raises ValueError if the hop kernels, which run in bf16, do not serve the shape."""
    world_size = LamportWorkspace.world_size_of(workspace)
    require(
        dtype != KERNEL_DTYPE or hop_supported(world_size, rows, hidden),
        f"{rows} rows of {hidden} on {world_size} ranks; the kernel serves {RANKS} ranks, "
        f"{one_shot_bytes(world_size)} bytes of all ranks' rows, and rows that 2 to 8 CTAs of at "
        f"most {CTA_VECTORS} {VECTOR_BYTES}-byte vectors cover",
    )


def check_workspace(
    workspace: torch.Tensor, payload: Payload, rows: int, columns: int, dtype: torch.dtype
) -> None:
    """Raises ValueError unless it is open, of this kind, and has room for all ranks' rows."""
    check_tensor("workspace", workspace, (None,), torch.int64)
    require(workspace.is_cpu, f"workspace is on {workspace.device}; it must be on the host")
    opened = LamportWorkspace.at(workspace)
    require(
        opened.payload is payload,
        f"workspace {opened.tag!r} is for {opened.payload.name}; it must be for {payload.name}",
    )
    needed = rows * opened.world_size * columns * dtype.itemsize
    require(
        needed <= opened.bytes_per_buffer,
        f"workspace {opened.tag!r} has {opened.bytes_per_buffer} bytes per buffer; the call takes "
        f"{needed}",
    )


def cell_workspace(cell: Cell, payload: Payload, columns: int) -> torch.Tensor:
    """The descriptor of a workspace with room for the cell's rows, over the joined ranks.

    Cells of equal needs share one, as the layers of a model do.
    """
    ranks = joined_ranks()
    needed = geometry_of(cell).max_rows * ranks.tp_size * columns * dtype_of(cell).itemsize
    size = -(-needed // VECTOR_BYTES) * VECTOR_BYTES
    return lamport_workspace(ranks, f"cells {payload.name} {size}", payload, size).descriptor


def sum_of_ranks(shards: Iterable[torch.Tensor]) -> torch.Tensor:
    """The ranks' tensors, in rank order, summed in fp32.

    Eight ranks at a time are added to zero one after the other, then their sums. Up to eight ranks
    that is the sum of `AllReduce`, except that it is never -0.0.
    """
    total: torch.Tensor | None = None
    parts = [shard.float() for shard in shards]
    for first in range(0, len(parts), RANKS_PER_SUM):
        chunk = torch.zeros_like(parts[0])
        for part in parts[first : first + RANKS_PER_SUM]:
            chunk = chunk + part
        total = chunk if total is None else total + chunk
    assert total is not None
    return total


def add_norm(
    shards: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a hop does with the rows that have arrived, as `MnnvlHop` says.

    Args:
        shards: [rows, ranks, hidden].
        residual: [rows, hidden].
        gamma: [hidden].

    Returns:
        (normed, updated residual), residual's shape and dtype.
    """
    updated = sum_of_ranks(shards.unbind(1)).to(residual) + residual
    return rms_norm_rounded_once(updated, gamma, eps), updated
