"""The attention's output projection, stored where the hop after it collects."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.distributed import LamportWorkspace, Payload, joined_ranks
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from .._cells import Draw, dtype_of, geometry_of
from .._checks import check_aligned, check_served, check_tensor
from .._numerics import assert_chained, project
from ..comm._exchange import cell_workspace, check_hop_served, check_workspace
from ..comm.mnnvl_hop import MnnvlHop
from .low_m_gemm import SERVED_ROWS


@define_op
class OProjPublish(OpWrapper):
    """x @ weight.T, this rank's addend of the attention's output, stored into this rank's slot of
    every rank's current buffer. The next call on the workspace must be glm_mnnvl_hop with input
    None, which collects the addends of all ranks.

    Bit for bit what glm_low_m_gemm returns and glm_mnnvl_hop stores: fp32 sums rounded once to the
    activation dtype, -0.0 replaced by +0.0.

    Args:
        x: activation dtype [rows, inputs], contiguous: this rank's heads, v_head_dim numbers each.
        weight: activation dtype [hidden, inputs], contiguous: this rank's columns of o_proj. A
            parameter that still requires grad is served too; no gradient is recorded.
        workspace: descriptor of the Lamport workspace for sums that the hop gets. The model's own;
            its calls must be made in the same order on all ranks.

    Raises:
        RuntimeError: rows on the workspace that no hop has collected yet (the reference alone can
            tell; a kernel would overwrite them). Without this call the hop is the one that fails.

    The rows lie at [row][rank][column], as glm_mnnvl_hop says. Neither the flags nor the dirty
    buffer are touched: the hop clears and rotates. Nothing is returned or written locally.

    The kernel serves bf16 and 1 to 8 rows that start at multiples of 16 bytes; the reference also
    takes fp32 and any number of rows. Split-K, order of sums and what may be read before the wait
    are those of glm_low_m_gemm. The current buffer is read from the flags after the wait, as the
    hop before rotates them.
    """

    schema = "glm_o_proj_publish(Tensor x, Tensor weight, Tensor workspace) -> ()"
    CELLS = (
        Cell("K 7", {"rows": 8}),
        Cell("one row, a draft step", {"rows": 1}),
        Cell("rows between", {"rows": 5}),
        Cell("fp32", {"rows": 8, "dtype": torch.float32}),
    )

    @classmethod
    def produced(cls, returned: Any, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
        """The sum [rows, hidden] that the hop gets out of the workspace, rounded once more; what a
        call writes is there, and the hop has to follow anyway."""
        x, weight, workspace = (arguments[name] for name in cls.arguments())
        nothing = x.new_zeros(x.shape[0], weight.shape[0])
        gamma = torch.ones_like(nothing[0])
        return (MnnvlHop.raw_call(None, nothing, gamma, 1.0, workspace)[1],)

    @staticmethod
    def raw_call(x: Tensor, weight: Tensor, workspace: Tensor) -> None:
        torch.ops.trtllm.glm_o_proj_publish(x, weight, workspace)

    @staticmethod
    def reference(x: Tensor, weight: Tensor, workspace: Tensor) -> None:
        rows = project(x, weight.detach())
        LamportWorkspace.at(workspace).publish(MnnvlHop.name(), rows)

    @staticmethod
    def fake(x: Tensor, weight: Tensor, workspace: Tensor) -> None:
        pass

    @staticmethod
    def is_valid(x: Tensor, weight: Tensor, workspace: Tensor) -> None:
        check_tensor("x", x, (None, None))
        check_tensor("weight", weight, (None, x.shape[1]), x.dtype)
        rows, hidden = x.shape[0], weight.shape[0]
        check_served(x, "the number of rows", rows, SERVED_ROWS)
        check_workspace(workspace, Payload.SUM, rows, hidden, x.dtype)
        check_hop_served(rows, hidden, x.dtype, workspace)
        check_aligned("x", x)
        check_aligned("weight", weight)

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        """Only `x` differs between ranks."""
        draw, geometry, dtype = Draw(device, generator), geometry_of(cell), dtype_of(cell)
        ranks, inputs = joined_ranks(), geometry.heads * geometry.v_head_dim
        shards = draw.normal(ranks.tp_size, cell.spec["rows"], inputs, dtype=dtype)
        return {
            "x": shards[ranks.tp_rank].contiguous(),
            "weight": draw.weight(geometry.hidden_size, inputs, dtype=dtype),
            "workspace": cell_workspace(cell, Payload.SUM, geometry.hidden_size),
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        """Local memory: the operands, and the rows that all ranks store here."""
        x, weight = inputs["x"], inputs["weight"]
        ranks = LamportWorkspace.world_size_of(inputs["workspace"])
        return x.nbytes + weight.nbytes + ranks * x.shape[0] * weight.shape[0] * x.itemsize

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """Each rank's addend is one fp32 sum of 1024 products, rounded; their sum once more."""
        assert_chained(out[0], ref[0])

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        """cuBLAS, whose rows stay on this rank."""
        return lambda: torch.nn.functional.linear(inputs["x"], inputs["weight"])


o_proj_publish = OProjPublish()
