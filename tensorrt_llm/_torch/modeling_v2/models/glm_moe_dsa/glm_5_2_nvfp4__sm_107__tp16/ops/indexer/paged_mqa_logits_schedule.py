"""How the processors share the keys that `glm_fp8_paged_mqa_logits` scores."""

from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.custom_ops.paged_mqa_logits import (
    paged_mqa_logits_schedule as make_schedule,
)
from tensorrt_llm._torch.modeling_v2.catalog._op import Cell, OpWrapper, define_op

from .._cells import Draw
from .._checks import check_tensor, require
from .._inputs import poisoned


@define_op
class PagedMqaLogitsSchedule(OpWrapper):
    """Split the requests' keys, in chunks of 64, evenly over the processors.

    row_order lists the requests, longest first and equally long ones in order. With c_i =
    ceil(kv_lens[row_order[i]] / 64), C their sum, and P processors, processor p begins with chunk
    floor(p C / P) of all chunks in that order: scheduler_metadata[p] = (i, chunk of request
    row_order[i]). Entry P is the end: (requests, 0). No processor gets more than ceil(C / P)
    chunks. Exact integers, 64-bit sums.

    Made once per step on the device, from the lengths alone; all layers and, where the lengths do
    not change, all rows share it.

    Args:
        kv_lens: int32 [requests], keys of each request in this rank's pool; 0 has none.
        scheduler_metadata: int32 [processors + 1, 2], contiguous, written.
        row_order: int32 [requests], contiguous, written.
    """

    schema = (
        "glm_paged_mqa_logits_schedule(Tensor kv_lens, Tensor(a!) scheduler_metadata, "
        "Tensor(b!) row_order) -> ()"
    )
    CELLS = (
        Cell("one request", {"requests": 1, "keys": 1 << 16}),
        Cell("a shard of fewer chunks than processors", {"requests": 1, "keys": 4096}),
        Cell("two requests", {"requests": 2, "keys": 1 << 14}),
    )

    @staticmethod
    def raw_call(kv_lens: Tensor, scheduler_metadata: Tensor, row_order: Tensor) -> None:
        torch.ops.trtllm.glm_paged_mqa_logits_schedule(kv_lens, scheduler_metadata, row_order)

    @staticmethod
    def reference(kv_lens: Tensor, scheduler_metadata: Tensor, row_order: Tensor) -> None:
        make_schedule(kv_lens, scheduler_metadata, row_order)

    @staticmethod
    def fake(kv_lens: Tensor, scheduler_metadata: Tensor, row_order: Tensor) -> None:
        pass

    @staticmethod
    def is_valid(kv_lens: Tensor, scheduler_metadata: Tensor, row_order: Tensor) -> None:
        check_tensor("kv_lens", kv_lens, (None,), torch.int32)
        check_tensor("scheduler_metadata", scheduler_metadata, (None, 2), torch.int32)
        entries = scheduler_metadata.shape[0]
        require(
            entries >= 2, f"scheduler_metadata has {entries} entries; processors + 1 are 2 or more"
        )
        check_tensor("row_order", row_order, tuple(kv_lens.shape), torch.int32)
        require(
            bool((kv_lens >= 0).all()), f"kv_lens has {kv_lens.tolist()}; 0 is the least length"
        )

    @staticmethod
    def make_inputs(cell: Cell, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        requests, keys = cell.spec["requests"], cell.spec["keys"]
        draw, processors = Draw(device, generator), 148
        return {
            "kv_lens": draw.integers(keys // 2, keys, requests, dtype=torch.int32),
            "scheduler_metadata": poisoned((processors + 1, 2), torch.int32, device),
            "row_order": poisoned((requests,), torch.int32, device),
        }

    @staticmethod
    def bytes_moved(inputs: dict[str, Any]) -> int:
        return sum(tensor.nbytes for tensor in inputs.values())


paged_mqa_logits_schedule = PagedMqaLogitsSchedule()
