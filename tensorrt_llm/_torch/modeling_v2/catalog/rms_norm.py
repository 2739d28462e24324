"""RMSNorm of rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import (
    Cell,
    OpWrapper,
    assert_within_ulp,
    define_op,
)


def rms_norm_rounded_once(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight in fp32, then rounded to x's dtype: flashinfer's form.

    Args:
        x: [rows, width].
        weight: [width].
    """
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


@define_op
class RmsNorm(OpWrapper):
    """x * rsqrt(mean(x^2) + eps) * weight over each row, in fp32 and rounded once: flashinfer's
    form, in which the normalised value is not rounded before the weight multiplies it.

    Args:
        input: activation dtype [rows, width], any width; bf16, or fp32, where nothing is rounded.
        weight: input's dtype [width].
        eps: added to the mean of the squares.

    Returns:
        input's dtype [rows, width], contiguous.

    The sum of squares is fp32, and its order within a row depends on the width alone, so a row's
    result depends neither on the other rows nor on their number, and repeats are equal to the bit.
    Under programmatic dependent launch the weight may be read before the wait, the input after it.

    Source: RMSNorm (arXiv 1910.07467).
    """

    schema = "flashinfer_rmsnorm(Tensor input, Tensor weight, float eps) -> Tensor"
    CELLS = (
        Cell("GLM-5.2 hidden, K 7", {"rows": 8, "width": 6144}),
        Cell("GLM-5.2 hidden, one row", {"rows": 1, "width": 6144}),
        Cell("GLM-5.2 query latent, K 7", {"rows": 8, "width": 2048}),
        Cell("GLM-5.2 key latent, K 7", {"rows": 8, "width": 512}),
    )

    @staticmethod
    def raw_call(input: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.ops.trtllm.flashinfer_rmsnorm(input, weight, eps)

    @staticmethod
    def reference(input: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm_rounded_once(input, weight, eps)

    @staticmethod
    def fake(input: Tensor, weight: Tensor, eps: float) -> Tensor:
        return input.new_empty(input.shape)

    @staticmethod
    def is_valid(input: Tensor, weight: Tensor, eps: float) -> None:
        if input.dim() != 2 or input.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"input is {input.dtype} {list(input.shape)}; it must be bf16 or fp32 [rows, width]"
            )
        if weight.shape != input.shape[1:] or weight.dtype != input.dtype:
            raise ValueError(
                f"weight is {weight.dtype} {list(weight.shape)}; it must be {input.dtype} "
                f"[{input.shape[1]}]"
            )
        for name, x in (("input", input), ("weight", weight)):
            if not x.is_contiguous():
                raise ValueError(
                    f"{name} has the strides {list(x.stride())}; it must be contiguous"
                )

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        rows, width = cell.spec["rows"], cell.spec["width"]
        x = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
        weight = torch.empty(width, dtype=torch.bfloat16, device=device)
        return {
            "input": x.normal_(generator=generator),
            "weight": weight.normal_(1.0, 0.1, generator=generator),
            "eps": 1e-5,
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        return 2 * inputs["input"].nbytes + inputs["weight"].nbytes

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """Both are the same value up to the order of an fp32 sum of squares (2^-16 at most for up
        to 16384 terms) and a few fp32 roundings, each rounded once: they differ by at most 1 ulp,
        and where a rounding boundary lies between them only, which is in less than 1 % of all
        elements: an rms of 0.1 ulp."""
        assert_within_ulp(out[0], ref[0], element_ulp=1, rms_ulp=0.1)

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        """torch's own."""
        x, weight = inputs["input"], inputs["weight"]
        return lambda: F.rms_norm(x, weight.shape, weight, inputs["eps"])


rms_norm = RmsNorm()
