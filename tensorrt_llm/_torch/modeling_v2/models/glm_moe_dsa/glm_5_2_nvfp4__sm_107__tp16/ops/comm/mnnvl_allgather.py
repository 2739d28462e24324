"""The logits of all vocabulary shards, in fp32."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.distributed import LamportWorkspace, Payload, allgather, joined_ranks
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from .._cells import Draw, dtype_of, geometry_of
from .._checks import KERNEL_DTYPE, check_aligned, check_served, check_tensor
from ._exchange import RANKS, cell_workspace, check_workspace


@define_op
class MnnvlAllgather(OpWrapper):
    """All ranks' rows side by side, in rank order, widened to fp32:

        out[row, rank * columns + c] = fp32(input of rank [row, c])

    Bit for bit the all-gather along the last dimension, concatenation and cast of the
    vocabulary-parallel LM head's logits, -0.0, infinities and NaN payloads included, with one
    exception: a 32-bit word of all ones, two neighbouring bf16 NaNs 0xFFFF (or one fp32), arrives
    with its lowest bit cleared and so stays NaN. All ranks get the same bits.

    Args:
        input: activation dtype (bf16 for the kernel, fp32 passes through) [rows, columns],
            contiguous, this rank's shard; the same shape on all ranks. Rows are whole 16-byte
            vectors.
        workspace: descriptor of a private Lamport workspace for exchanges, never the one of the
            sums; its calls must be made in the same order on all ranks.

    Returns:
        fp32 [rows, ranks * columns]. The input stays as it is.

    In a buffer the shards lie at [row][rank][column]. A call stores its shard into the current
    buffer of every rank (once through a multicast mapping), copies the gathered rows out of its own
    buffer as words stop reading 0xFFFFFFFF, the empty word, then fills the dirty buffer with it by
    the bytes that the previous call has recorded, and rotates the flags as the hop does.

    Nothing is summed. Under programmatic dependent launch the dependents are released right after
    the kernel has waited for its producer.
    """

    schema = "glm_mnnvl_allgather(Tensor input, Tensor workspace) -> Tensor"
    CELLS = (
        Cell("K 7, a vocabulary shard", {"rows": 8}),
        Cell("no drafts, one row", {"rows": 1}),
        Cell("fp32", {"rows": 8, "dtype": torch.float32}),
    )

    @staticmethod
    def raw_call(input: Tensor, workspace: Tensor) -> Tensor:
        return torch.ops.trtllm.glm_mnnvl_allgather(input, workspace)

    @staticmethod
    def reference(input: Tensor, workspace: Tensor) -> Tensor:
        shards = LamportWorkspace.at(workspace).exchange(MnnvlAllgather.name(), input)
        return shards.flatten(1).to(input.device, torch.float32)

    @staticmethod
    def fake(input: Tensor, workspace: Tensor) -> Tensor:
        ranks = LamportWorkspace.world_size_of(workspace)
        return input.new_empty(input.shape[0], ranks * input.shape[1], dtype=torch.float32)

    @staticmethod
    def is_valid(input: Tensor, workspace: Tensor) -> None:
        check_tensor("input", input, (None, None), KERNEL_DTYPE, torch.float32)
        rows, columns = input.shape
        check_workspace(workspace, Payload.EXCHANGE, rows, columns, input.dtype)
        check_served(input, "ranks", LamportWorkspace.world_size_of(workspace), RANKS)
        check_aligned("input", input)

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        draw, ranks = Draw(device, generator), joined_ranks()
        columns = geometry_of(cell).vocab_size
        shards = draw.normal(ranks.tp_size, cell.spec["rows"], columns, dtype=dtype_of(cell))
        return {
            "input": shards[ranks.tp_rank].contiguous(),
            "workspace": cell_workspace(cell, Payload.EXCHANGE, columns),
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        """Local memory: the shard once, all shards stored and read, the rows in fp32; the refill of
        the previous call's buffer, taken as an equal call."""
        x, ranks = inputs["input"], LamportWorkspace.world_size_of(inputs["workspace"])
        return x.nbytes * (1 + 3 * ranks) + 4 * x.numel() * ranks

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        """All-gather of the process group, concatenation and cast."""
        x, ranks = inputs["input"], joined_ranks()
        return lambda: allgather(x, ranks).float()


mnnvl_allgather = MnnvlAllgather()
