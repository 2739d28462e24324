"""The hidden half of the next draft step's eh_proj, this rank's outputs of it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import (
    ULP,
    Cell,
    OpWrapper,
    assert_within_ulp,
    define_op,
)

from .._cells import Draw, dtype_of, geometry_of
from .._checks import check_served, check_tensor, require
from .._numerics import project, rms_norm_rounded_once

SERVED_HIDDEN = (6144,)


@define_op
class DraftHiddenHalf(OpWrapper):
    """hnorm(hidden_states) @ weight.T in fp32: this rank's share of what the hidden state adds to
    the next draft step's eh_proj output.

    eh_proj's input is [enorm(embedding) | hnorm(hidden)], so its output is a sum of two halves. The
    hidden one does not depend on the token that is still being chosen and starts first; rank r of n
    computes the outputs [r * hidden / n, (r + 1) * hidden / n) of it over all inputs, and
    glm_draft_ehproj_table exchanges the shares and adds the embedding half before it rounds.

    hnorm is an RMSNorm in flashinfer's form: x * rsqrt(mean(x^2) + eps) * weight in fp32, rounded
    once to the activation dtype; the products are of these rounded values.

    Args:
        hidden_states: activation dtype [1, hidden], the row that the next draft step starts from.
        hnorm_weight: activation dtype [hidden].
        weight: activation dtype [hidden / n, hidden]: of eh_proj [hidden, 2 * hidden], this rank's
            rows of the right half.
        eps: of hnorm.

    Returns:
        fp32 [1, hidden / n], not rounded.

    The kernel serves bf16 and hidden 6144; the reference every geometry, in fp32 too. Exactly one
    row. Split-K as glm_low_m_gemm, the slices' sums added by rising slice; every CTA forms the sum
    of squares of the whole row itself, in the same order. Repeats are equal to the bit.
    """

    schema = (
        "glm_draft_hidden_half(Tensor hidden_states, Tensor hnorm_weight, Tensor weight, "
        "float eps) -> Tensor"
    )
    CELLS = (
        Cell("share of one of 16 ranks", {"rows": 1}),
        Cell("share of one of 8 ranks", {"rows": 1, "ranks": 8}),
    )

    @staticmethod
    def raw_call(hidden_states: Tensor, hnorm_weight: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.ops.trtllm.glm_draft_hidden_half(hidden_states, hnorm_weight, weight, eps)

    @staticmethod
    def reference(
        hidden_states: Tensor, hnorm_weight: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        normed = rms_norm_rounded_once(hidden_states, hnorm_weight, eps)
        return project(normed, weight, torch.float32)

    @staticmethod
    def fake(hidden_states: Tensor, hnorm_weight: Tensor, weight: Tensor, eps: float) -> Tensor:
        return hidden_states.new_empty(1, weight.shape[0], dtype=torch.float32)

    @staticmethod
    def is_valid(hidden_states: Tensor, hnorm_weight: Tensor, weight: Tensor, eps: float) -> None:
        check_tensor("hidden_states", hidden_states, (1, None))
        hidden, dtype = hidden_states.shape[1], hidden_states.dtype
        check_tensor("hnorm_weight", hnorm_weight, (hidden,), dtype)
        check_tensor("weight", weight, (None, hidden), dtype)
        check_served(hidden_states, "the hidden size", hidden, SERVED_HIDDEN)
        require(
            hidden % weight.shape[0] == 0,
            f"weight has {weight.shape[0]} rows; it must be a rank's equal part of {hidden}",
        )

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        draw, geometry, dtype = Draw(device, generator), geometry_of(cell), dtype_of(cell)
        hidden = geometry.hidden_size
        outputs = hidden // cell.spec.get("ranks", geometry.tp_size)
        return {
            "hidden_states": draw.normal(cell.spec["rows"], hidden, dtype=dtype),
            "hnorm_weight": draw.norm_weight(hidden, dtype),
            "weight": draw.weight(outputs, hidden, dtype=dtype),
            "eps": geometry.rms_norm_eps,
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        read = sum(inputs[name].nbytes for name in ("hidden_states", "hnorm_weight", "weight"))
        return read + 4 * inputs["weight"].shape[0]

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """Up to 1 % of the normed values may be off by one bf16 ulp (`assert_rounded_once`), which
        moves a sum by at most 0.1 bf16 ulp of itself rms, and one of the outputs by six times that:
        far above what fp32 sums add."""
        assert_within_ulp(out[0], ref[0], element_ulp=0.6, rms_ulp=0.1, ulp=ULP[torch.bfloat16])

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        """torch's norm and cuBLAS."""
        x, norm, weight = inputs["hidden_states"], inputs["hnorm_weight"], inputs["weight"]

        def chain() -> Tensor:
            normed = torch.nn.functional.rms_norm(x, norm.shape, norm, inputs["eps"])
            return torch.nn.functional.linear(normed, weight)

        return chain


draft_hidden_half = DraftHiddenHalf()
