"""The Lamport workspaces of the step: who exchanges through which, and how large they are."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tensorrt_llm._torch.distributed import Payload, lamport_workspace
from tensorrt_llm.mapping import Mapping

from .geometry import Geometry
from .ops.indexer.hist_topk import exchange_bytes as topk_bytes
from .ops.spec.draft_ehproj_table import exchange_bytes as table_bytes
from .ops.spec.draft_sample_glue import exchange_bytes as sample_bytes

ALIGNMENT = 16


@dataclass(frozen=True)
class Workspaces:
    """Descriptors, one per purpose, so that the calls of one purpose keep their order whatever
    runs between them.

    Attributes:
        hops: the sums of all hops.
        logits: the all-gather of verify logits.
        topk: candidates of the key choice; None on one rank, which has all keys.
        ehproj_table, sample_glue: the draft steps' argmax exchanges.
    """

    hops: Tensor
    logits: Tensor
    topk: Tensor | None
    ehproj_table: Tensor
    sample_glue: Tensor

    @classmethod
    def create(cls, mapping: Mapping, geometry: Geometry, dtype: torch.dtype) -> "Workspaces":
        """Collective: all ranks make them together, in this order, once the weights are loaded."""
        ranks, rows = mapping.tp_size, geometry.max_rows
        row_bytes = rows * ranks * dtype.itemsize

        def of(purpose: str, payload: Payload, nbytes: int) -> Tensor:
            nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
            # Models of one process share what fits all of them to the byte.
            return lamport_workspace(mapping, f"{purpose} {nbytes}", payload, nbytes).descriptor

        topk = topk_bytes(rows, geometry.index_topk, ranks)
        return cls(
            hops=of("hops", Payload.SUM, row_bytes * geometry.hidden_size),
            logits=of("logits", Payload.EXCHANGE, row_bytes * geometry.vocab_size),
            topk=of("topk", Payload.EXCHANGE, topk) if ranks > 1 else None,
            ehproj_table=of(
                "ehproj_table", Payload.EXCHANGE, table_bytes(geometry.hidden_size, ranks, dtype)
            ),
            sample_glue=of("sample_glue", Payload.EXCHANGE, sample_bytes(1, ranks)),
        )
