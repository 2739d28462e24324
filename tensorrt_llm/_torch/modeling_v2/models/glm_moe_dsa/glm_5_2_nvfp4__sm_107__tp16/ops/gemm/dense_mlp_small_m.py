"""One rank's slice of a dense SwiGLU MLP for few rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import NAMESPACE, Cell, OpWrapper, define_op

from .._cells import Draw, dtype_of, geometry_of
from .._checks import KERNEL_DTYPE, check_tensor, require
from .._numerics import assert_chained, project, swiglu_rounded_once

SERVED_ROWS = range(1, 9)
SERVED_HIDDEN, SERVED_INTERMEDIATE = 6144, 768


def supported(rows: int, hidden: int, inter: int) -> bool:
    """Whether the kernels serve these sizes; also `torch.ops.trtllm.<op>_supported`."""
    return rows in SERVED_ROWS and (hidden, inter) == (SERVED_HIDDEN, SERVED_INTERMEDIATE)


@define_op
class DenseMlpSmallM(OpWrapper):
    """This rank's part of down(silu(gate x) * up x), which the post-MLP hop sums over the ranks.

    With I columns of the intermediate size on this rank:
        [gate | up] = round(x @ gate_up_weight.T); h = round(silu(gate) * up);
        out = round(h @ down_weight.T)
    Sums and SwiGLU are fp32; `round` is to the activation dtype, the rounding points of the unfused
    chain. The sigmoid may take the fast exponential and division.

    Args:
        x: activation dtype [rows, hidden].
        gate_up_weight: activation dtype [2 * I, hidden], gate rows before up rows.
        down_weight: activation dtype [hidden, I].

    Returns:
        activation dtype [rows, hidden].

    The kernels serve bf16, 1 to 8 rows, hidden 6144 and I = 768 (`supported`, and on the host
    `torch.ops.trtllm.glm_dense_mlp_small_m_supported(rows, hidden, inter)`), from sm_90 on, and
    refuse the rest; the reference serves every geometry, in fp32 too.

    Order of sums is fixed, so repeats are equal to the bit: gate/up on 192 CTAs in clusters of two,
    each with one half of the 6144 products of its outputs, the halves added lower columns first;
    down on 96 CTAs of 64 output columns. Two kernels under programmatic dependent launch: every CTA
    bulk-copies its weights into shared memory before its wait and reads activations only after it;
    gate/up releases down at entry, down releases its dependents once its weight copies are issued.
    """

    schema = "glm_dense_mlp_small_m(Tensor x, Tensor gate_up_weight, Tensor down_weight) -> Tensor"
    CELLS = (
        Cell("K 7", {"rows": 8}),
        Cell("K 3", {"rows": 4}),
        Cell("one row", {"rows": 1}),
    )

    @staticmethod
    def raw_call(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
        return torch.ops.trtllm.glm_dense_mlp_small_m(x, gate_up_weight, down_weight)

    @staticmethod
    def reference(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
        gate, up = project(x, gate_up_weight).chunk(2, dim=-1)
        return project(swiglu_rounded_once(gate, up), down_weight)

    @staticmethod
    def fake(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def is_valid(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> None:
        check_tensor("x", x, (None, None))
        rows, hidden = x.shape
        check_tensor("down_weight", down_weight, (hidden, None), x.dtype)
        inter = down_weight.shape[1]
        check_tensor("gate_up_weight", gate_up_weight, (2 * inter, hidden), x.dtype)
        require(
            x.dtype != KERNEL_DTYPE or supported(rows, hidden, inter),
            f"{rows} rows, hidden {hidden}, intermediate {inter}; the kernels serve rows in "
            f"{SERVED_ROWS}, hidden {SERVED_HIDDEN}, intermediate {SERVED_INTERMEDIATE}",
        )

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        draw, geometry, dtype = Draw(device, generator), geometry_of(cell), dtype_of(cell)
        hidden, inter = geometry.hidden_size, geometry.intermediate_size
        return {
            "x": draw.normal(cell.spec["rows"], hidden, dtype=dtype),
            "gate_up_weight": draw.weight(2 * inter, hidden, dtype=dtype),
            "down_weight": draw.weight(hidden, inter, dtype=dtype),
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        x = inputs["x"]
        return 2 * x.nbytes + inputs["gate_up_weight"].nbytes + inputs["down_weight"].nbytes

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """Two roundings inside of the chain, gate or up and h; the fast sigmoid's 2^-20 is less
        than the sums'."""
        assert_chained(out[0], ref[0])

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        """Two cuBLAS calls around torch's SwiGLU."""

        def chain() -> Tensor:
            gate, up = F.linear(inputs["x"], inputs["gate_up_weight"]).chunk(2, dim=-1)
            return F.linear(F.silu(gate) * up, inputs["down_weight"])

        return chain


torch.library.define(
    f"{NAMESPACE}::{DenseMlpSmallM.name()}_supported", "(int rows, int hidden, int inter) -> bool"
)
torch.library.impl(
    f"{NAMESPACE}::{DenseMlpSmallM.name()}_supported", "CompositeExplicitAutograd", supported
)

dense_mlp_small_m = DenseMlpSmallM()
