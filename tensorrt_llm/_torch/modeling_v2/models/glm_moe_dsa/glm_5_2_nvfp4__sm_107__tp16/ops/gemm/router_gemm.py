"""Router logits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from .._cells import Draw, dtype_of, geometry_of
from .._checks import check_served, check_tensor
from .._numerics import assert_summed_in_fp32, project

SERVED_TOKENS = range(1, 17)
SERVED_EXPERTS = (256,)
SERVED_HIDDEN = (6144,)


@define_op
class RouterGemm(OpWrapper):
    """Router logits hidden_states @ weight.T, in fp32 and not rounded.

    Args:
        hidden_states: activation dtype [tokens, hidden], after the post-attention norm.
        weight: activation dtype [experts, hidden], `mlp.gate.weight` as stored.

    Returns:
        fp32 [tokens, experts].

    The kernel serves bf16, 1 to 16 tokens, 256 experts, hidden 6144, and refuses the rest; the
    reference serves every geometry, in fp32 too.

    Order of sums, the same as in the routing kernel of glm_routed_experts, so that both give equal
    bits, whatever the number of tokens: one CTA of 128 threads per expert; thread t runs one fp32
    FMA chain from 0 over the 16-byte vectors t, t + 128, ... of the row, within a vector by rising
    column; a butterfly over the lanes of each warp (xor 16, 8, 4, 2, 1); the four warps' sums added
    by rising warp.

    Under programmatic dependent launch each CTA prefetches its weight row (12 KB) into L2 before
    the wait, and releases its dependents right after it, before any logit is written: what follows
    on the stream waits for its own grid dependency before it reads the logits.
    """

    schema = "glm_router_gemm(Tensor hidden_states, Tensor weight) -> Tensor"
    CELLS = (
        Cell("one draft row", {"rows": 1}),
        Cell("K 3", {"rows": 4}),
        Cell("K 7", {"rows": 8}),
        Cell("as many as the kernel serves", {"rows": 16}),
    )

    @staticmethod
    def raw_call(hidden_states: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.trtllm.glm_router_gemm(hidden_states, weight)

    @staticmethod
    def reference(hidden_states: Tensor, weight: Tensor) -> Tensor:
        return project(hidden_states, weight, torch.float32)

    @staticmethod
    def fake(hidden_states: Tensor, weight: Tensor) -> Tensor:
        shape = (hidden_states.shape[0], weight.shape[0])
        return hidden_states.new_empty(shape, dtype=torch.float32)

    @staticmethod
    def is_valid(hidden_states: Tensor, weight: Tensor) -> None:
        check_tensor("hidden_states", hidden_states, (None, None))
        tokens, hidden = hidden_states.shape
        check_tensor("weight", weight, (None, hidden), hidden_states.dtype)
        check_served(hidden_states, "the number of tokens", tokens, SERVED_TOKENS)
        check_served(hidden_states, "the hidden size", hidden, SERVED_HIDDEN)
        check_served(hidden_states, "the number of experts", weight.shape[0], SERVED_EXPERTS)

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        draw, geometry, dtype = Draw(device, generator), geometry_of(cell), dtype_of(cell)
        hidden = geometry.hidden_size
        return {
            "hidden_states": draw.normal(cell.spec["rows"], hidden, dtype=dtype),
            "weight": draw.weight(geometry.n_routed_experts, hidden, dtype=dtype),
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        x, weight = inputs["hidden_states"], inputs["weight"]
        return x.nbytes + weight.nbytes + 4 * x.shape[0] * weight.shape[0]

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """The longest chain that a kernel of any order can have: all of hidden 6144."""
        assert_summed_in_fp32(out[0], ref[0], terms=SERVED_HIDDEN[0])

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        """cuBLAS, with fp32 output."""
        x, weight = inputs["hidden_states"], inputs["weight"]
        if not x.is_cuda:
            return None
        return lambda: torch.mm(x, weight.T, out_dtype=torch.float32)


router_gemm = RouterGemm()
