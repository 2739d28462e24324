"""A projection of few rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from ...geometry import Geometry
from .._cells import Draw, dtype_of, geometry_of
from .._checks import check_aligned, check_served, check_tensor
from .._numerics import assert_rounded_once, project

SERVED_ROWS = range(1, 9)


@define_op
class LowMGemm(OpWrapper):
    """x @ weight.T for few rows: the shared expert's gate_up and down, the LM head's shard and
    draft step 0's eh_proj.

    Args:
        x: activation dtype [rows, inputs], contiguous.
        weight: activation dtype [outputs, inputs], contiguous. A parameter that still requires grad
            is served too; no gradient is recorded.

    Returns:
        activation dtype [rows, outputs]: fp32 sums, rounded once.

    The kernel serves bf16 and 1 to 8 rows that start at multiples of 16 bytes; its tile sizes
    follow from (outputs, inputs), and outputs need not fill a tile. The reference also takes fp32
    and any number of rows.

    Order of sums: split-K. A cluster of eight CTAs (fewer where the inputs are fewer) has one
    contiguous slice of the inputs each, and their fp32 partial sums are added by rising slice, so
    repeats are equal to the bit and a row does not depend on the others. Under programmatic
    dependent launch weights may be read before the wait, activations after it.
    """

    schema = "glm_low_m_gemm(Tensor x, Tensor weight) -> Tensor"
    CELLS = (
        Cell("shared expert gate_up, K 7", {"rows": 8, "weight": "gate_up"}),
        Cell("shared expert gate_up, draft step", {"rows": 1, "weight": "gate_up"}),
        Cell("shared expert down, K 7", {"rows": 8, "weight": "down"}),
        Cell("shared expert down, draft step", {"rows": 1, "weight": "down"}),
        Cell("LM head shard, K 7", {"rows": 8, "weight": "lm_head"}),
        Cell("LM head shard, draft step", {"rows": 1, "weight": "lm_head"}),
        Cell("eh_proj of draft step 0, K 7", {"rows": 8, "weight": "eh_proj"}),
        Cell("eh_proj, rows that fill no tile", {"rows": 3, "weight": "eh_proj"}),
    )

    @staticmethod
    def raw_call(x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.trtllm.glm_low_m_gemm(x, weight)

    @staticmethod
    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return project(x, weight.detach())

    @staticmethod
    def fake(x: Tensor, weight: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], weight.shape[0])

    @staticmethod
    def is_valid(x: Tensor, weight: Tensor) -> None:
        check_tensor("x", x, (None, None))
        check_tensor("weight", weight, (None, x.shape[1]), x.dtype)
        check_served(x, "the number of rows", x.shape[0], SERVED_ROWS)
        check_aligned("x", x)
        check_aligned("weight", weight)

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        draw, dtype = Draw(device, generator), dtype_of(cell)
        outputs, inputs = _shape(cell.spec["weight"], geometry_of(cell))
        return {
            "x": draw.normal(cell.spec["rows"], inputs, dtype=dtype),
            "weight": draw.weight(outputs, inputs, dtype=dtype),
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        x, weight = inputs["x"], inputs["weight"]
        return x.nbytes + weight.nbytes + x.shape[0] * weight.shape[0] * x.itemsize

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """One fp32 sum of at most 6144 products, one rounding."""
        assert_rounded_once(out[0], ref[0])

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        """cuBLAS."""
        return lambda: torch.nn.functional.linear(inputs["x"], inputs["weight"])


def _shape(weight: str, geometry: Geometry) -> tuple[int, int]:
    """(outputs, inputs) of this rank's part of a weight."""
    hidden, expert = geometry.hidden_size, geometry.moe_intermediate_size
    return {
        "gate_up": (2 * expert, hidden),
        "down": (hidden, expert),
        "lm_head": (geometry.vocab_size, hidden),
        "eh_proj": (hidden, 2 * hidden // geometry.tp_size),
    }[weight]


low_m_gemm = LowMGemm()
