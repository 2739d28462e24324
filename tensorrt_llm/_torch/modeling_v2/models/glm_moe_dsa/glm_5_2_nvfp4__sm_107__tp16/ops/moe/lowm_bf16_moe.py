"""One token through a layer of unquantised experts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from .._cells import Draw, dtype_of, geometry_of
from .._checks import check_aligned, check_served, check_tensor, require
from .._numerics import assert_chained, noaux_tc, project, swiglu_rounded_once

SERVED_EXPERTS, SERVED_TOP_K = (256,), (8,)
SERVED_HIDDEN = range(2048, 8192 + 1, 2048)
SERVED_SLICES = range(64, 512 + 1, 64)


@define_op
class LowmBf16Moe(OpWrapper):
    """One token through the routed experts of an MoE layer, each rank holding a slice of every
    expert; the sum over the ranks is the following hop's.

    Routing is noaux_tc in one group (see `_numerics.noaux_tc` for every step): fp32 scores
    0.5 tanh(logit / 2) + 0.5; the top_k largest of score + bias, in falling order, equal ones by
    rising id; weights score * routed_scaling_factor / (sum of the winners' scores + 1e-20), the
    fp64 value rounded to fp32. A kernel may form them in fp32 where the rounding of the fp64 value
    is certain, and must fall back to fp64 elsewhere.

    With I columns of an expert on this rank, and `round` to the activation dtype, for the k-th
    chosen expert e:
        [up | gate] = round(x @ fc1_weight[e].T); h = round(silu(gate) * up);
        y_k = round(weight_k * (h @ fc2_weight[e].T))
    and out = round(y_0 + y_1 + ...), added in fp32 in the order of routing. Products and SwiGLU are
    fp32; the weight multiplies the fp32 sum before that is rounded.

    Args:
        x: activation dtype [1, hidden]; exactly one token.
        router_logits: fp32 [1, experts], of glm_router_gemm.
        routing_bias: fp32 [experts], e_score_correction_bias.
        fc1_weight: activation dtype [experts, 2 * I, hidden]: of each expert its up rows, then its
            gate rows (the built-in modules have them the other way round).
        fc2_weight: activation dtype [experts, hidden, I].
        top_k: experts of a token.
        routed_scaling_factor: of the weights.

    Returns:
        activation dtype [1, hidden], this rank's partial sum.

    The kernels serve bf16, one token, 256 experts, top 8, hidden sizes that are multiples of 2048
    up to 8192 and slices I that are multiples of 64 up to 512, and refuse the rest; the reference
    serves every geometry, in fp32 too. Only the chosen experts' weights are read. All orders of
    sums are fixed, so repeats are equal to the bit.

    Two kernels. FC1 and SwiGLU: one CTA per SM, a producer warp routes and streams whole weight
    rows of the chosen experts through a ring in shared memory, which eight consumer warps read two
    rows at a time; its dependents are released right after its grid-dependency wait. FC2 and the
    sum: routes again, before its own wait, from copies of logits and bias (so these must be
    complete before the FC1 kernel starts), and stages the experts' weight slices beside it.
    """

    schema = (
        "glm_lowm_bf16_moe(Tensor x, Tensor router_logits, Tensor routing_bias, Tensor fc1_weight, "
        "Tensor fc2_weight, int top_k, float routed_scaling_factor) -> Tensor"
    )
    CELLS = (
        Cell("draft step, random routing", {"rows": 1, "routing": "random"}),
        Cell("draft step, tied choices", {"rows": 1, "routing": "tied"}),
        Cell("draft step, tiny scores", {"rows": 1, "routing": "tiny"}),
    )

    @staticmethod
    def raw_call(
        x: Tensor,
        router_logits: Tensor,
        routing_bias: Tensor,
        fc1_weight: Tensor,
        fc2_weight: Tensor,
        top_k: int,
        routed_scaling_factor: float,
    ) -> Tensor:
        return torch.ops.trtllm.glm_lowm_bf16_moe(
            x, router_logits, routing_bias, fc1_weight, fc2_weight, top_k, routed_scaling_factor
        )

    @staticmethod
    def reference(
        x: Tensor,
        router_logits: Tensor,
        routing_bias: Tensor,
        fc1_weight: Tensor,
        fc2_weight: Tensor,
        top_k: int,
        routed_scaling_factor: float,
    ) -> Tensor:
        weights, ids = noaux_tc(router_logits, routing_bias, top_k, routed_scaling_factor)
        out = torch.zeros_like(x, dtype=torch.float32)
        for k in range(top_k):  # by index tensors, so that a CUDA graph can capture it
            fc1, fc2 = (w.index_select(0, ids[0, k : k + 1])[0] for w in (fc1_weight, fc2_weight))
            up, gate = project(x, fc1).chunk(2, dim=-1)
            y = project(swiglu_rounded_once(gate, up), fc2, torch.float32)
            out += (weights[0, k] * y).to(x.dtype)
        return out.to(x.dtype)

    @staticmethod
    def fake(
        x: Tensor,
        router_logits: Tensor,
        routing_bias: Tensor,
        fc1_weight: Tensor,
        fc2_weight: Tensor,
        top_k: int,
        routed_scaling_factor: float,
    ) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def is_valid(
        x: Tensor,
        router_logits: Tensor,
        routing_bias: Tensor,
        fc1_weight: Tensor,
        fc2_weight: Tensor,
        top_k: int,
        routed_scaling_factor: float,
    ) -> None:
        check_tensor("x", x, (1, None))
        hidden = x.shape[1]
        check_tensor("fc2_weight", fc2_weight, (None, hidden, None), x.dtype)
        experts, _, part = fc2_weight.shape
        check_tensor("fc1_weight", fc1_weight, (experts, 2 * part, hidden), x.dtype)
        check_tensor("router_logits", router_logits, (1, experts), torch.float32)
        check_tensor("routing_bias", routing_bias, (experts,), torch.float32)
        require(0 < top_k <= experts, f"top_k is {top_k}; it must be in [1, {experts}]")
        check_served(x, "the number of experts", experts, SERVED_EXPERTS)
        check_served(x, "top_k", top_k, SERVED_TOP_K)
        check_served(x, "the hidden size", hidden, SERVED_HIDDEN)
        check_served(x, "the expert slice", part, SERVED_SLICES)
        for name, t in (("x", x), ("fc1_weight", fc1_weight), ("fc2_weight", fc2_weight)):
            check_aligned(name, t)

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        draw, geometry, dtype = Draw(device, generator), geometry_of(cell), dtype_of(cell)
        hidden, part = geometry.hidden_size, geometry.moe_intermediate_size
        experts = geometry.n_routed_experts
        logits, bias = _routing(cell.spec["routing"], draw, experts)
        return {
            "x": draw.normal(cell.spec["rows"], hidden, dtype=dtype),
            "router_logits": logits,
            "routing_bias": bias,
            "fc1_weight": draw.weight(experts, 2 * part, hidden, dtype=dtype),
            "fc2_weight": draw.weight(experts, hidden, part, dtype=dtype),
            "top_k": geometry.num_experts_per_tok,
            "routed_scaling_factor": geometry.routed_scaling_factor,
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        """Weights of the chosen experts alone."""
        expert = inputs["fc1_weight"][0].nbytes + inputs["fc2_weight"][0].nbytes
        routing = inputs["router_logits"].nbytes + inputs["routing_bias"].nbytes
        return inputs["top_k"] * expert + routing + 2 * inputs["x"].nbytes

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """Inside of the chain FC1 and h are rounded. y_k is rounded before the sum: hit at its
        boundaries in less than 1 % too, by at most its ulp, it adds 0.1 ulp rms, within what
        `assert_chained` leaves."""
        assert_chained(out[0], ref[0])

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        """Batched cuBLAS calls over the chosen experts' weights, gathered beforehand."""
        x = inputs["x"]
        routing = (inputs["router_logits"], inputs["routing_bias"])
        weights, ids = noaux_tc(*routing, inputs["top_k"], inputs["routed_scaling_factor"])
        fc1, fc2 = (inputs[name][ids[0]] for name in ("fc1_weight", "fc2_weight"))
        scale = weights.to(x.dtype)

        def chain() -> Tensor:
            up, gate = torch.matmul(fc1, x[0]).chunk(2, dim=-1)
            y = torch.bmm(fc2, (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
            return scale @ y

        return chain


def _routing(kind: str, draw: Draw, experts: int) -> tuple[Tensor, Tensor]:
    """fp32 ([1, experts], [experts]): logits and bias.

    tied: three different choices only, so ids decide, also at the cut. tiny: all logits so low that
    scores vanish beside the bias, and some are exactly 0.
    """
    if kind == "tied":
        bias = torch.full((experts,), 7.0, device=draw.device)
        return draw.integers(-1, 2, 1, experts).float(), bias
    mean = {"random": 0.0, "tiny": -15.0}[kind]
    logits = draw.normal(1, experts, mean=mean, std=1.5)
    # Where the checkpoint's bias lies: near 7 with differences that bf16 would erase.
    return logits, draw.normal(experts, mean=6.94, std=0.06)


lowm_bf16_moe = LowmBf16Moe()
