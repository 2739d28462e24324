"""SwiGLU of rows that hold gate and up side by side."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import (
    ULP,
    Cell,
    OpWrapper,
    assert_within_ulp,
    define_op,
)

# Two results before they are rounded, the kernel's and the reference's; see `SiluAndMul.compare`.
FP32_ULP_APART = 16


def swiglu_rounded_once(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in fp32, then rounded to their dtype. Any shape, the same for both."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


@define_op
class SiluAndMul(OpWrapper):
    """silu(gate) * up = gate / (1 + exp(-gate)) * up, element by element, where a row of x is
    [gate | up]. In fp32 from gate and up as they are, rounded once to x's dtype: flashinfer's form,
    in which silu(gate) is not rounded before the product.

    Args:
        x: activation dtype [rows, 2 * n], contiguous, gate in columns 0 to n - 1; bf16, or fp32.
            Any n and any number of rows.

    Returns:
        x's dtype [rows, n], contiguous. x stays as it is.

    The sigmoid may take the fast exponential and division. Repeats are equal to the bit, and in a
    kernel an element depends on its own gate and up alone (on a CPU the last bit of torch's silu
    also depends on the place in a vector). Under programmatic dependent launch x is read after the
    wait only.

    Source: SwiGLU (arXiv 2002.05202).
    """

    schema = "flashinfer_silu_and_mul(Tensor x) -> Tensor"
    CELLS = (
        Cell("GLM-5.2 shared expert, K 7", {"rows": 8, "n": 128}),
        Cell("GLM-5.2 shared expert, one row", {"rows": 1, "n": 128}),
        Cell("fp32", {"rows": 8, "n": 128, "dtype": torch.float32}),
        Cell("an odd number of rows", {"rows": 5, "n": 128}),
    )

    @staticmethod
    def raw_call(x: Tensor) -> Tensor:
        return torch.ops.trtllm.flashinfer_silu_and_mul(x)

    @staticmethod
    def reference(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return swiglu_rounded_once(gate, up)

    @staticmethod
    def fake(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], x.shape[1] // 2)

    @staticmethod
    def is_valid(x: Tensor) -> None:
        if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)}; it must be bf16 or fp32 [rows, 2 * n]"
            )
        if x.shape[1] % 2:
            raise ValueError(f"x has {x.shape[1]} columns; gate and up must be equally wide")
        if not x.is_contiguous():
            raise ValueError(f"x has the strides {list(x.stride())}; it must be contiguous")

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        dtype = cell.spec.get("dtype", torch.bfloat16)
        x = torch.empty(cell.spec["rows"], 2 * cell.spec["n"], dtype=dtype, device=device)
        return {"x": x.normal_(generator=generator)}

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        x = inputs["x"]
        return x.nbytes + x.nbytes // 2

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """CUDA's fast exponential of -gate is off by up to 2 + 1.16 |gate| ulp of fp32, 9 for the
        cells' gates (beyond 6 lie 2e-9 of a normal distribution), its fast division by 2; a sum and
        a product round, half an ulp each. 12 in all; the reference's exponential (1) and its three
        roundings add 2.5. So fp32 results are within 16 ulp of their own value.

        In bf16, with values at least 2^-8 apart of their size, those 2^-19 have a rounding boundary
        between them in 2^-11 of the elements, which are then 1 ulp apart at most. Their number is
        a sum of rare events: its mean, six standard deviations and one.
        """
        if ref[0].dtype == torch.float32:
            assert_within_ulp(out[0], ref[0], element_ulp=FP32_ULP_APART, rms_ulp=FP32_ULP_APART)
            return
        assert_within_ulp(out[0], ref[0], element_ulp=1, rms_ulp=1)
        share = FP32_ULP_APART * ULP[torch.float32] / (ULP[torch.bfloat16] / 2)
        flips, mean = int((out[0] != ref[0]).sum()), share * ref[0].numel()
        allowed = int(mean + 6 * mean**0.5) + 1
        assert flips <= allowed, f"{flips} of {ref[0].numel()} elements differ, allowed {allowed}"

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        """Two calls of torch, which round between them."""
        gate, up = inputs["x"].chunk(2, dim=-1)
        return lambda: F.silu(gate) * up


silu_and_mul = SiluAndMul()
