"""All-reduce, residual add and RMSNorm in one call."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.distributed import LamportWorkspace, Payload, allgather, joined_ranks
from tensorrt_llm._torch.modeling_v2.catalog._op import (
    Cell,
    OpWrapper,
    assert_bitwise,
    define_op,
)

from .._cells import Draw, dtype_of, geometry_of
from .._checks import check_aligned, check_tensor
from .._numerics import assert_rounded_once
from ._exchange import add_norm, cell_workspace, check_hop_served, check_workspace


@define_op
class MnnvlHop(OpWrapper):
    """The sum of all ranks' rows, added to the residual, and its RMSNorm:

        total    = input of rank 0 + input of rank 1 + ...      fp32, rounded to activation dtype
        residual' = total + residual                            rounded to activation dtype
        normed   = residual' * rsqrt(mean(residual'^2) + eps) * gamma     fp32, rounded once

    The order of the sum is fixed: ranks 0 to 7 are added to +0.0 one after the other in fp32, ranks
    8 to 15 likewise, then the two sums. An input of -0.0 counts as +0.0, and total is never -0.0.
    The norm takes the rounded residual' and squares it in fp32.

    All ranks get the same bits as long as residual, gamma and eps are the same on them. total and
    residual' are, up to 8 ranks, bit for bit those of the unfused chain (sum in rank order in fp32,
    rounding, add), except that total is +0.0 where all addends are -0.0.

    Args:
        input: activation dtype [rows, hidden], contiguous, this rank's addend. None: a producer has
            already published it, that is stored it into the current buffer of every rank in the
            form below, without touching the flags.
        residual: activation dtype [rows, hidden], contiguous.
        gamma: activation dtype [hidden].
        eps: added to the mean square.
        workspace: descriptor of a Lamport workspace for sums. The model's own; its calls must be
            made in the same order on all ranks.

    Returns:
        (normed, residual'), activation dtype [rows, hidden] each. Arguments stay as they are.

    Activation dtype is bf16 for the kernel. With fp32 only the fp32 additions round.

    In a buffer the ranks' rows lie at [row][rank][column]. A call stores its rows into the current
    buffer of every rank (once through a multicast mapping), -0.0 replaced by +0.0, so that no
    32-bit word of two elements reads 0x80000000, the empty word. It clears the dirty buffer by the
    bytes that the previous call has recorded, which may be more than its own, and polls its own
    current buffer until no word is empty. Then it rotates the flags: the current buffer becomes
    the dirty one, the next of three the current one, one stage of rows * ranks * hidden * itemsize
    bytes to clear. Flags and rotation are those of the built-in MNNVL all-reduce, so both may
    follow each other on one workspace. In a kernel each CTA counts its arrival in the last flag,
    and one thread rotates once all have read the flags and its own poll has ended.

    Under programmatic dependent launch the dependents are released right after the kernel has
    waited for its producer. With a published input it polls, and reads flags and residual with
    volatile loads, before any wait, and waits for its producer at its end.
    """

    schema = (
        "glm_mnnvl_hop(Tensor? input, Tensor residual, Tensor gamma, float eps, Tensor workspace) "
        "-> (Tensor, Tensor)"
    )
    CELLS = (
        Cell("K 7", {"rows": 8}),
        Cell("one row, a draft step", {"rows": 1}),
        Cell("rows between", {"rows": 5}),
        Cell("fp32", {"rows": 8, "dtype": torch.float32}),
    )

    @staticmethod
    def raw_call(
        input: Tensor | None, residual: Tensor, gamma: Tensor, eps: float, workspace: Tensor
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.trtllm.glm_mnnvl_hop(input, residual, gamma, eps, workspace)

    @staticmethod
    def reference(
        input: Tensor | None, residual: Tensor, gamma: Tensor, eps: float, workspace: Tensor
    ) -> tuple[Tensor, Tensor]:
        opened = LamportWorkspace.at(workspace)
        if input is not None:
            opened.publish(MnnvlHop.name(), input)
        rows, hidden = residual.shape
        shards = opened.collect(MnnvlHop.name(), rows, hidden, residual.dtype)
        return add_norm(shards.to(residual.device), residual, gamma, eps)

    @staticmethod
    def fake(
        input: Tensor | None, residual: Tensor, gamma: Tensor, eps: float, workspace: Tensor
    ) -> tuple[Tensor, Tensor]:
        return torch.empty_like(residual), torch.empty_like(residual)

    @staticmethod
    def is_valid(
        input: Tensor | None, residual: Tensor, gamma: Tensor, eps: float, workspace: Tensor
    ) -> None:
        check_tensor("residual", residual, (None, None))
        rows, hidden = residual.shape
        dtype = residual.dtype
        if input is not None:
            check_tensor("input", input, (rows, hidden), dtype)
            check_aligned("input", input)
        check_tensor("gamma", gamma, (hidden,), dtype)
        check_workspace(workspace, Payload.SUM, rows, hidden, dtype)
        check_hop_served(rows, hidden, dtype, workspace)
        check_aligned("residual", residual)
        check_aligned("gamma", gamma)

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        """Only `input` differs between ranks."""
        draw, geometry, dtype = Draw(device, generator), geometry_of(cell), dtype_of(cell)
        rows, hidden, ranks = cell.spec["rows"], geometry.hidden_size, joined_ranks()
        addends = draw.normal(ranks.tp_size, rows, hidden, dtype=dtype)
        return {
            "input": addends[ranks.tp_rank].contiguous(),
            "residual": draw.normal(rows, hidden, dtype=dtype),
            "gamma": draw.norm_weight(hidden, dtype),
            "eps": geometry.rms_norm_eps,
            "workspace": cell_workspace(cell, Payload.SUM, hidden),
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        """Local memory: own rows, residual and gamma once, all ranks' rows stored and read, both
        results; the clearing of the previous call's buffer, taken as an equal call."""
        residual = inputs["residual"]
        ranks = LamportWorkspace.world_size_of(inputs["workspace"])
        return residual.nbytes * (4 + 3 * ranks) + inputs["gamma"].nbytes

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """The updated residual bit for bit; the norm has one fp32 sum of squares behind it."""
        assert_bitwise(out[1:], ref[1:])
        assert_rounded_once(out[0], ref[0])

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        """Gather, sum, add and norm, each one call of torch and the process group."""
        x, residual, gamma = inputs["input"], inputs["residual"], inputs["gamma"]
        ranks = joined_ranks()

        def chain() -> Tensor:
            gathered = allgather(x.unsqueeze(0), ranks, dim=0)
            updated = gathered.sum(0) + residual
            return torch.nn.functional.rms_norm(updated, gamma.shape, gamma, inputs["eps"])

        return chain


mnnvl_hop = MnnvlHop()
