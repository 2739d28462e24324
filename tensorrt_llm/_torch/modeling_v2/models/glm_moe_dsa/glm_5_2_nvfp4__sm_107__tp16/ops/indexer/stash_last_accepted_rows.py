"""Keep each request's selection of its last accepted token for the later draft steps."""

from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from .._cells import Draw, geometry_of
from .._checks import INDEX_DTYPES, check_tensor
from .._inputs import poisoned, random_selection


@define_op
class StashLastAcceptedRows(OpWrapper):
    """Copy one selection row per request into the buffer that index-shared draft steps read:

        shared_topk_indices[r] = topk_indices[r * rows_per_request + a]
        a = min(max(num_accepted[r] - 1, 0), rows_per_request - 1)

    Bit copies, as index_select would make them. Counts out of range are clamped, not refused, since
    a forced count may exceed a request's rows. Rows of the buffer from num_accepted's length on
    stay. One launch; under programmatic dependent launch everything is read after the wait.

    Args:
        topk_indices: int32 [requests * rows_per_request, topk], contiguous, the choice of draft
            step 0 for the verify rows; generations only.
        num_accepted: int32 or int64 [requests], set by glm_verify_head_accept.
        shared_topk_indices: int32 [at least requests, topk], contiguous, written.
        rows_per_request: 1 + draft length.
    """

    schema = (
        "glm_stash_last_accepted_rows(Tensor topk_indices, Tensor num_accepted, "
        "Tensor(a!) shared_topk_indices, int rows_per_request) -> ()"
    )
    CELLS = (
        Cell("K 7", {"requests": 1, "rows": 8}),
        Cell("no drafts", {"requests": 1, "rows": 1}),
        Cell("four requests in a larger buffer", {"requests": 4, "rows": 4}),
    )

    @staticmethod
    def raw_call(
        topk_indices: Tensor,
        num_accepted: Tensor,
        shared_topk_indices: Tensor,
        rows_per_request: int,
    ) -> None:
        torch.ops.trtllm.glm_stash_last_accepted_rows(
            topk_indices, num_accepted, shared_topk_indices, rows_per_request
        )

    @staticmethod
    def reference(
        topk_indices: Tensor,
        num_accepted: Tensor,
        shared_topk_indices: Tensor,
        rows_per_request: int,
    ) -> None:
        requests = num_accepted.shape[0]
        last = (num_accepted.long() - 1).clamp(0, rows_per_request - 1)
        rows = torch.arange(requests, device=last.device) * rows_per_request + last
        shared_topk_indices[:requests] = topk_indices[rows]

    @staticmethod
    def fake(
        topk_indices: Tensor,
        num_accepted: Tensor,
        shared_topk_indices: Tensor,
        rows_per_request: int,
    ) -> None:
        pass

    @staticmethod
    def is_valid(
        topk_indices: Tensor,
        num_accepted: Tensor,
        shared_topk_indices: Tensor,
        rows_per_request: int,
    ) -> None:
        requests = num_accepted.shape[0]
        check_tensor("num_accepted", num_accepted, (None,), *INDEX_DTYPES)
        rows = requests * rows_per_request
        check_tensor("topk_indices", topk_indices, (rows, None), torch.int32)
        wide = (max(requests, shared_topk_indices.shape[0]), topk_indices.shape[1])
        check_tensor("shared_topk_indices", shared_topk_indices, wide, torch.int32)

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        requests, rows = cell.spec["requests"], cell.spec["rows"]
        topk, draw = geometry_of(cell).index_topk, Draw(device, generator)
        buffer = (2 * requests, topk)
        return {
            "topk_indices": random_selection(requests * rows, topk, 4096, device, generator),
            "num_accepted": draw.integers(1, rows + 1, requests, dtype=torch.int32),
            "shared_topk_indices": poisoned(buffer, torch.int32, device),
            "rows_per_request": rows,
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        accepted = inputs["num_accepted"]
        return 2 * accepted.shape[0] * inputs["topk_indices"][0].nbytes + accepted.nbytes


stash_last_accepted_rows = StashLastAcceptedRows()
