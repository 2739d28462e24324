"""The exact top-k of one request's index scores."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from .._cells import Draw, geometry_of
from .._checks import check_tensor, require
from .._inputs import poisoned


@define_op
class HistTopK(OpWrapper):
    """Choose the topk largest scores of each row, exactly, for a request whose keys are all here.

    topk_indices[t] is the set of columns c < context_len[0] with the topk largest logits[t, c], in
    rising order, then -1 where there are fewer. A logit of -inf is no key and never chosen. Of
    equal logits at the cut the larger column wins; -0.0 equals 0.0, and NaN, of either sign, is
    larger than everything and equal to itself. So the result is a function of the values alone:
    reruns, and other ways to divide the work, give the same bits. All of topk_indices is written.

    Columns from context_len on are not read.

    The kernel orders values by their bits (NaN first, zeros as one), counts them in a histogram of
    11 bits, and refines the bin of the cut by the next bits, at most to three levels.

    Args:
        logits: fp32 [rows, columns] from `glm_fp8_paged_mqa_logits`; rows may lie apart.
        context_len: int32 [1], at most columns; on the device, so that a captured graph follows it.
        topk_indices: int32 [rows, topk], contiguous, written. Positions within the request.

    Source: radix selection, most significant digit first (Alabi et al., "Fast k-selection
    algorithms for graphics processing units").
    """

    schema = "glm_dsa_hist_topk(Tensor logits, Tensor context_len, Tensor(a!) topk_indices) -> ()"
    CELLS = (
        Cell("verify rows", {"rows": 8, "columns": 8192}),
        Cell("one row", {"rows": 1, "columns": 8192}),
        Cell("fewer keys than are chosen", {"rows": 8, "columns": 1024}),
        Cell("ties across the cut: 8 different values", {"rows": 8, "columns": 8192, "values": 8}),
        Cell("one more key than is chosen", {"rows": 8, "columns": 2049}),
    )

    @staticmethod
    def raw_call(logits: Tensor, context_len: Tensor, topk_indices: Tensor) -> None:
        torch.ops.trtllm.glm_dsa_hist_topk(logits, context_len, topk_indices)

    @staticmethod
    def reference(logits: Tensor, context_len: Tensor, topk_indices: Tensor) -> None:
        columns = torch.arange(logits.shape[1], device=logits.device)
        past = columns >= context_len
        chosen = largest_columns(logits.masked_fill(past, float("-inf")), topk_indices.shape[1])
        topk_indices.copy_(chosen)

    @staticmethod
    def fake(logits: Tensor, context_len: Tensor, topk_indices: Tensor) -> None:
        pass

    @staticmethod
    def is_valid(logits: Tensor, context_len: Tensor, topk_indices: Tensor) -> None:
        check_tensor("logits", logits, (None, None), torch.float32, rows_apart=True)
        check_tensor("context_len", context_len, (1,), torch.int32)
        check_tensor("topk_indices", topk_indices, (logits.shape[0], None), torch.int32)
        require(
            0 <= int(context_len) <= logits.shape[1],
            f"context_len is {int(context_len)}; logits has {logits.shape[1]} columns",
        )

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        rows, columns = cell.spec["rows"], cell.spec["columns"]
        draw, topk = Draw(device, generator), geometry_of(cell).index_topk
        logits = draw.normal(rows, columns + 64)
        if "values" in cell.spec:
            logits = draw.integers(0, cell.spec["values"], rows, columns + 64).float()
        first = columns - rows + torch.arange(rows, device=device)
        future = torch.arange(columns + 64, device=device) > first.unsqueeze(1)
        logits.masked_fill_(future, float("-inf"))[:, columns:] = float("nan")
        return {
            "logits": logits,
            "context_len": torch.tensor([columns], dtype=torch.int32, device=device),
            "topk_indices": poisoned((rows, topk), torch.int32, device),
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        read = inputs["logits"].shape[0] * int(inputs["context_len"]) * 4
        return read + inputs["topk_indices"].nbytes


hist_topk = HistTopK()


def largest_columns(logits: Tensor, topk: int) -> Tensor:
    """int64 [rows, topk] as `HistTopK` orders them, of fp32 [rows, columns]."""
    columns = logits.shape[1]
    # Columns in falling order, so that a stable sort puts the larger of equals first.
    values, order = logits.flip(1).sort(dim=1, descending=True, stable=True)
    chosen = (columns - 1 - order[:, :topk]).masked_fill(values[:, :topk] == float("-inf"), columns)
    chosen = chosen.sort(dim=1).values
    chosen = chosen.masked_fill(chosen == columns, -1)
    return F.pad(chosen, (0, topk - chosen.shape[1]), value=-1)
