"""The row of each request's last accepted token."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from .._cells import Draw, dtype_of, geometry_of
from .._checks import INDEX_DTYPES, check_tensor, require


@define_op
class GatherLastAcceptedRows(OpWrapper):
    """Select, for each request r, row g[r] of one or two row tensors, the row of its last accepted
    token:

        g[r] = batch_indices[r] * rows_per_request + num_accepted[r] - 1 + row_offset

    Draft step 0 uses it twice: to take the target's hidden rows together with the gather ids, and
    after the MTP layer's post-attention hop to keep one row per request of the normalised hidden
    states and of the residual.

    Args:
        rows: [total, width], any dtype of 1 to 8 bytes; bits are copied.
        second: like rows, of the same width and number of rows; None where there is no second.
        batch_indices: int32 or int64 [requests]: each request's place among the generations; any
            order, repetition included.
        num_accepted: int32 or int64 [requests], in [1, rows_per_request]. Set by
            glm_verify_head_accept.
        rows_per_request: 1 + draft length.
        row_offset: rows before the first generation's, those of contexts.

    Returns:
        (g int64 [requests], rows[g] [requests, width], second[g]); without a second, the last is
        empty, [requests, 0].

    Index arithmetic is in 64 bits. Nothing is summed or rounded, so the result is exact. No row is
    read but the selected ones.
    """

    schema = (
        "glm_gather_last_accepted_rows(Tensor rows, Tensor? second, Tensor batch_indices, "
        "Tensor num_accepted, int rows_per_request, int row_offset) -> (Tensor, Tensor, Tensor)"
    )
    CELLS = (
        Cell("K 7, hidden rows alone", {"requests": 1, "rows": 8}),
        Cell("K 7 with the residual", {"requests": 1, "rows": 8, "second": True}),
        Cell("no drafts, one row", {"requests": 1, "rows": 1, "second": True}),
        Cell("four requests, permuted", {"requests": 4, "rows": 8, "second": True}),
        Cell("contexts before the request", {"requests": 1, "rows": 8, "row_offset": 5}),
    )

    @staticmethod
    def raw_call(
        rows: Tensor,
        second: Tensor | None,
        batch_indices: Tensor,
        num_accepted: Tensor,
        rows_per_request: int,
        row_offset: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.trtllm.glm_gather_last_accepted_rows(
            rows, second, batch_indices, num_accepted, rows_per_request, row_offset
        )

    @staticmethod
    def reference(
        rows: Tensor,
        second: Tensor | None,
        batch_indices: Tensor,
        num_accepted: Tensor,
        rows_per_request: int,
        row_offset: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        g = batch_indices.long() * rows_per_request + num_accepted.long() - 1 + row_offset
        no_second = rows.new_empty(g.shape[0], 0)
        return g, rows[g], no_second if second is None else second[g]

    @staticmethod
    def fake(
        rows: Tensor,
        second: Tensor | None,
        batch_indices: Tensor,
        num_accepted: Tensor,
        rows_per_request: int,
        row_offset: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        requests, width = batch_indices.shape[0], rows.shape[1]
        return (
            batch_indices.new_empty(requests, dtype=torch.int64),
            rows.new_empty(requests, width),
            rows.new_empty(requests, 0) if second is None else second.new_empty(requests, width),
        )

    @staticmethod
    def is_valid(
        rows: Tensor,
        second: Tensor | None,
        batch_indices: Tensor,
        num_accepted: Tensor,
        rows_per_request: int,
        row_offset: int,
    ) -> None:
        check_tensor("rows", rows, (None, None))
        if second is not None:
            check_tensor("second", second, tuple(rows.shape))
        check_tensor("batch_indices", batch_indices, (None,), *INDEX_DTYPES)
        check_tensor("num_accepted", num_accepted, tuple(batch_indices.shape), *INDEX_DTYPES)
        require(
            bool(((num_accepted >= 1) & (num_accepted <= rows_per_request)).all()),
            f"num_accepted is {num_accepted.tolist()}; each must be in [1, {rows_per_request}]",
        )
        g = batch_indices.long() * rows_per_request + num_accepted.long() - 1 + row_offset
        require(
            bool(((g >= 0) & (g < rows.shape[0])).all()),
            f"the selected rows are {g.tolist()}; rows has [0, {rows.shape[0]})",
        )

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        draw, width, dtype = Draw(device, generator), geometry_of(cell).hidden_size, dtype_of(cell)
        requests, rows_per_request = cell.spec["requests"], cell.spec["rows"]
        row_offset = cell.spec.get("row_offset", 0)
        total = row_offset + requests * rows_per_request
        order = torch.randperm(requests, device=device, generator=generator)
        return {
            "rows": draw.normal(total, width, dtype=dtype),
            "second": draw.normal(total, width, dtype=dtype) if "second" in cell.spec else None,
            "batch_indices": order.int(),
            "num_accepted": draw.integers(1, rows_per_request + 1, requests, dtype=torch.int32),
            "rows_per_request": rows_per_request,
            "row_offset": row_offset,
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        requests = inputs["batch_indices"].shape[0]
        copied = sum(t[0].nbytes for t in (inputs["rows"], inputs["second"]) if t is not None)
        indices = inputs["batch_indices"].nbytes + inputs["num_accepted"].nbytes + 8 * requests
        return 2 * requests * copied + indices

    @staticmethod
    def baseline(inputs: dict[str, Any]) -> Callable[[], object] | None:
        """The chain of torch calls that it replaces."""
        return lambda: GatherLastAcceptedRows.reference(**inputs)


gather_last_accepted_rows = GatherLastAcceptedRows()
