"""The two halves of a target's forward, and which of them a step takes."""

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, Protocol

import torch


class Phase(Enum):
    """PREFILL: the step has context rows, alone or beside generations. DECODE: generations only."""

    PREFILL = "prefill"
    DECODE = "decode"


class StepMetadata(Protocol):
    num_contexts: int


class Core(Protocol):
    """What a target asks of the trunk that it is a phase of."""

    def builtin_forward(
        self, attn_metadata: Any, input_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """The built-in modules' forward, for steps that the target's own does not serve."""


def phase_of(md: StepMetadata) -> Phase:
    """Read for every forward and never kept: the draft loop changes `num_contexts` in place."""
    return Phase.DECODE if md.num_contexts == 0 else Phase.PREFILL


class Target(ABC):
    """One phase of a target, made when the weights are loaded.

    It holds the core and asks it for operands at each use, so that nothing outlives what it was
    taken from.

    Attributes:
        path: what the last forward took, for whoever counts; None where there is nothing to tell.
    """

    path: str | None = None

    def __init__(self, core: Core) -> None:
        self.core = core

    @abstractmethod
    def step_args(self, md: Any) -> dict[str, Any]:
        """The step's own arguments of the ops, which are bound anew in every forward."""

    @abstractmethod
    def forward(self, attn_metadata: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """input_ids, position_ids int64 [tokens] -> hidden states after the final norm [tokens,
        hidden]."""
