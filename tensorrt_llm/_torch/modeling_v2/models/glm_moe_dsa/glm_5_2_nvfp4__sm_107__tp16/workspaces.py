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
        ehproj_table, sample_glue: the draft steps' argmax exchanges.
        topk: candidates of the key choice; None on one rank, which has all keys.
    """

    hops: Tensor
    logits: Tensor
    ehproj_table: Tensor
    sample_glue: Tensor
    topk: Tensor | None = None

    @classmethod
    def create(cls, mapping: Mapping, geometry: Geometry, dtype: torch.dtype) -> "Workspaces":
        """Collective: all ranks make them together, in this order, once the weights are loaded."""

        def of(purpose: str, payload: Payload, nbytes: int) -> Tensor:
            # Models of one process share what fits all of them to the byte.
            return lamport_workspace(mapping, f"{purpose} {nbytes}", payload, nbytes).descriptor

        sizes = buffer_sizes(geometry, dtype)
        return cls(**{purpose: of(purpose, *size) for purpose, size in sizes.items()})


def buffer_sizes(geometry: Geometry, dtype: torch.dtype) -> dict[str, tuple[Payload, int]]:
    """(what it carries, bytes per buffer) of each purpose, in the order of their creation.

    Args:
        dtype: of the activations.
    """
    g, ranks = geometry, geometry.tp_size
    row_bytes = g.max_rows * ranks * dtype.itemsize
    sizes = {
        "hops": (Payload.SUM, row_bytes * g.hidden_size),
        "logits": (Payload.EXCHANGE, row_bytes * g.vocab_size),
        "topk": (Payload.EXCHANGE, topk_bytes(g.max_rows, g.index_topk, ranks)),
        "ehproj_table": (Payload.EXCHANGE, table_bytes(g.hidden_size, ranks, dtype)),
        "sample_glue": (Payload.EXCHANGE, sample_bytes(1, ranks)),
    }
    if ranks == 1:
        del sizes["topk"]
    return {
        purpose: (payload, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        for purpose, (payload, nbytes) in sizes.items()
    }
