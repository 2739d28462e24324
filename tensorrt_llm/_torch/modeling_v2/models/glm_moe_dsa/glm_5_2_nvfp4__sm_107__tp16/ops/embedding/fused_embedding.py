"""Token ids to rows of the embedding table."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from .._cells import Draw, dtype_of, geometry_of
from .._checks import INDEX_DTYPES, KERNEL_DTYPE, check_aligned, check_tensor, require
from .._numerics import rows_or_zeros

CTA_COLUMNS = 1024  # 128 threads, each one 16-byte vector of 8 bf16


@define_op
class FusedEmbedding(OpWrapper):
    """Rows of an unsharded embedding table: out[...] = weight[input[...]].

    An id outside of [0, vocabulary), such as the -1 that pads rejected drafts, gives a row of zeros
    (+0). The other rows are bit copies of the table, NaN payloads included, so the result equals
    masked `F.embedding` bit for bit. The table is whole on every rank, so no collective follows.

    Args:
        input: int32 or int64 token ids, any shape, contiguous.
        weight: activation dtype [vocabulary, hidden], contiguous; for the kernel bf16 and hidden a
            multiple of 1024 (one CTA of 128 threads copies 1024 columns of one row, a thread 16
            bytes).

    Returns:
        weight's dtype [*input.shape, hidden].

    Under programmatic dependent launch the kernel waits for its producer before it reads the ids,
    touches no memory before that, and releases its dependents right after the wait.
    """

    schema = "glm_fused_embedding(Tensor input, Tensor weight) -> Tensor"
    CELLS = (
        Cell("K 7", {"rows": 8}),
        Cell("one row", {"rows": 1}),
        Cell("ids outside of the table, int32", {"rows": 8, "outside": True}),
        Cell("ids of two dimensions", {"rows": 8, "shape": (2, 4)}),
    )

    @staticmethod
    def raw_call(input: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.trtllm.glm_fused_embedding(input, weight)

    @staticmethod
    def reference(input: Tensor, weight: Tensor) -> Tensor:
        return rows_or_zeros(weight, input)

    @staticmethod
    def fake(input: Tensor, weight: Tensor) -> Tensor:
        return weight.new_empty(*input.shape, weight.shape[1])

    @staticmethod
    def is_valid(input: Tensor, weight: Tensor) -> None:
        check_tensor("input", input, (None,) * input.dim(), *INDEX_DTYPES)
        check_tensor("weight", weight, (None, None))
        hidden = weight.shape[1]
        require(
            weight.dtype != KERNEL_DTYPE or hidden % CTA_COLUMNS == 0,
            f"weight has {hidden} columns; the kernel serves multiples of {CTA_COLUMNS}",
        )
        check_aligned("weight", weight)

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        draw, geometry = Draw(device, generator), geometry_of(cell)
        vocabulary = geometry.tp_size * geometry.vocab_size
        weight = draw.normal(vocabulary, geometry.hidden_size, dtype=dtype_of(cell))
        shape = cell.spec.get("shape", (cell.spec["rows"],))
        if "outside" not in cell.spec:
            return {"input": draw.integers(0, vocabulary, *shape), "weight": weight}
        ids = draw.integers(0, vocabulary, *shape, dtype=torch.int32)
        ids[1::3], ids[2::3] = -1, vocabulary
        return {"input": ids, "weight": weight}

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        """Rows outside of the table are counted as if they were read."""
        ids, weight = inputs["input"], inputs["weight"]
        return ids.nbytes + 2 * ids.numel() * weight[0].nbytes

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        """torch's lookup, without the guard."""
        weight = inputs["weight"]
        ids = inputs["input"].clamp(0, weight.shape[0] - 1)
        return lambda: torch.nn.functional.embedding(ids, weight)


fused_embedding = FusedEmbedding()
