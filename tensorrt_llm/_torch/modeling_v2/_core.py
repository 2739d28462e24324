"""The trunk that a target's class puts in the place of the built-in model."""

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from tensorrt_llm._torch.modeling_v2._surface import missing_fields
from tensorrt_llm._torch.modeling_v2._target import Phase, Target, phase_of
from tensorrt_llm._torch.modeling_v2.catalog._op import advance_step_generation


class ModelingV2Core(nn.Module):
    """Owns the modules and weights, and gives each forward to the target of its phase.

    Args:
        args: of the class that it stands in front of, such as the built-in trunk.

    Attributes:
        path: what the last forward took, as its target says; None before the first.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._targets: dict[Phase, Target] = {}
        self._contract_pending = True
        self.path: str | None = None

    @abstractmethod
    def build_targets(self) -> dict[Phase, Target]:
        """Both phases' targets, from loaded weights."""

    @abstractmethod
    def builtin_forward(
        self, attn_metadata: Any, input_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """The forward of the class that it stands in front of."""

    def post_load_weights(self) -> None:
        """Parameters are filled: build the targets. Until then there is nothing to run."""
        self._targets = self.build_targets()

    def forward(self, attn_metadata: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """input_ids, position_ids int64 [tokens] -> hidden states after the final norm [tokens,
        hidden].

        Raises:
            AssertionError: the first step's metadata lacks what `_surface` says that it has.
            RuntimeError: a step before `post_load_weights`.
        """
        advance_step_generation()
        if self._contract_pending:
            self._check_step_contract(attn_metadata)
        if not self._targets:
            raise RuntimeError(
                f"{type(self).__name__} has no targets yet; post_load_weights makes them"
            )
        target = self._targets[phase_of(attn_metadata)]
        hidden_states = target.forward(attn_metadata, *args, **kwargs)
        self.path = target.path
        return hidden_states

    def _check_step_contract(self, attn_metadata: Any) -> None:
        """Once, on the first step: an engine that drifted fails here, not in a layer's middle."""
        missing = missing_fields("DSAtrtllmAttentionMetadata", attn_metadata)
        assert not missing, (
            f"{type(attn_metadata).__name__} lacks {missing}, which modeling_v2 takes from it "
            "(modeling_v2/_surface.py)"
        )
        self._contract_pending = False
