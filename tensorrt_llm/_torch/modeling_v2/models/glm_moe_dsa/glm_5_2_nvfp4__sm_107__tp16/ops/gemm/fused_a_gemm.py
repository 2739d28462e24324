"""All projections of a layer's input that attention needs, as one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from ...geometry import Geometry
from .._cells import Draw, dtype_of, geometry_of
from .._checks import check_served, check_tensor, require
from .._numerics import assert_rounded_once, project

SERVED_ROWS = range(1, 9)
SERVED_HIDDEN = (6144,)
SERVED_OUTPUTS = (2624, 2784)
MAX_PREFETCHED = 4


@define_op
class FusedAGemm(OpWrapper):
    """hidden_states @ weight.T with the weight's rows [q_a | compressed KV | k_pe], and on layers
    with an indexer then [wk | weights_proj]: `kv_a_proj_with_mqa` in TensorRT-LLM's words.

    Args:
        hidden_states: activation dtype [rows, hidden], after the input norm.
        weight: activation dtype [outputs, hidden] as stored; q_lora_rank + kv_lora_rank + rope =
            2624 outputs, or 2784 with the indexer's index_head_dim + index_n_heads.
        l2_prefetch: up to four tensors that later kernels of the step read, contiguous, any dtype;
            a hint: it brings them into L2 and changes no result.

    Returns:
        activation dtype [rows, outputs]: fp32 sums, rounded once.

    The kernel serves bf16, 1 to 8 rows, hidden 6144 and the two numbers of outputs, and refuses the
    rest; the reference serves every geometry, in fp32 too.

    Order of sums: one CTA for 16 weight rows, eight warps; warp w sums the 256-wide stages w, w + 8
    and w + 16 of the hidden size (by MMA, fp32); the eight sums are added by rising warp. So an
    output depends neither on the number of rows nor on the other outputs: the first 2624 columns of
    the 2784-row call are those of the 2624-row call, bit for bit.

    Under programmatic dependent launch each CTA stages its weights before the wait (stage w into
    shared memory, w + 8 and w + 16 through shared memory into registers, warp w issuing these
    w * 250 ns after its first copy), then prefetches `l2_prefetch` in pieces of 16 KB spread over
    the CTAs. Activations are read after the wait, and the dependents are released after that copy.
    """

    schema = "glm_fused_a_gemm(Tensor hidden_states, Tensor weight, Tensor[] l2_prefetch) -> Tensor"
    CELLS = (
        Cell("K 7, layer with an indexer", {"rows": 8, "indexer": True, "prefetch": 2}),
        Cell("K 7, layer without", {"rows": 8, "indexer": False, "prefetch": 4}),
        Cell("one row, with an indexer", {"rows": 1, "indexer": True, "prefetch": 0}),
        Cell("one row, without", {"rows": 1, "indexer": False, "prefetch": 1}),
        Cell("K 4, rows that fill no tile", {"rows": 5, "indexer": True, "prefetch": 0}),
    )

    @staticmethod
    def raw_call(hidden_states: Tensor, weight: Tensor, l2_prefetch: Sequence[Tensor]) -> Tensor:
        return torch.ops.trtllm.glm_fused_a_gemm(hidden_states, weight, l2_prefetch)

    @staticmethod
    def reference(hidden_states: Tensor, weight: Tensor, l2_prefetch: Sequence[Tensor]) -> Tensor:
        return project(hidden_states, weight)

    @staticmethod
    def fake(hidden_states: Tensor, weight: Tensor, l2_prefetch: Sequence[Tensor]) -> Tensor:
        return hidden_states.new_empty(hidden_states.shape[0], weight.shape[0])

    @staticmethod
    def is_valid(hidden_states: Tensor, weight: Tensor, l2_prefetch: Sequence[Tensor]) -> None:
        check_tensor("hidden_states", hidden_states, (None, None))
        rows, hidden = hidden_states.shape
        check_tensor("weight", weight, (None, hidden), hidden_states.dtype)
        check_served(hidden_states, "the number of rows", rows, SERVED_ROWS)
        check_served(hidden_states, "the hidden size", hidden, SERVED_HIDDEN)
        check_served(hidden_states, "the number of weight rows", weight.shape[0], SERVED_OUTPUTS)
        require(
            len(l2_prefetch) <= MAX_PREFETCHED,
            f"l2_prefetch has {len(l2_prefetch)} tensors; at most {MAX_PREFETCHED} are prefetched",
        )
        for i, ahead in enumerate(l2_prefetch):
            require(ahead.is_contiguous(), f"l2_prefetch[{i}] is strided; it must be contiguous")
            require(
                ahead.device == weight.device,
                f"l2_prefetch[{i}] is on {ahead.device}; it must be on {weight.device}",
            )

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        draw, geometry, dtype = Draw(device, generator), geometry_of(cell), dtype_of(cell)
        outputs = _outputs(geometry, cell.spec["indexer"])
        ahead = [torch.zeros(1 << 14, device=device) for _ in range(cell.spec["prefetch"])]
        return {
            "hidden_states": draw.normal(cell.spec["rows"], geometry.hidden_size, dtype=dtype),
            "weight": draw.weight(outputs, geometry.hidden_size, dtype=dtype),
            "l2_prefetch": ahead,
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        """Without what is prefetched, which is counted where it is read."""
        x, weight = inputs["hidden_states"], inputs["weight"]
        return x.nbytes + weight.nbytes + x.shape[0] * weight.shape[0] * x.itemsize

    @staticmethod
    def compare(out: Sequence[Tensor], ref: Sequence[Tensor]) -> None:
        """One fp32 sum of 6144 products, one rounding."""
        assert_rounded_once(out[0], ref[0])

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        """cuBLAS."""
        return lambda: torch.nn.functional.linear(inputs["hidden_states"], inputs["weight"])


def _outputs(geometry: Geometry, indexer: bool) -> int:
    attention = geometry.q_lora_rank + geometry.latent_width
    return attention + indexer * (geometry.index_head_dim + geometry.index_n_heads)


fused_a_gemm = FusedAGemm()
