"""What goes into a step, what stays on the device between steps, and what comes back to the
host."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tensorrt_llm._torch.pyexecutor.launch_counter import LaunchCounts
from tensorrt_llm._torch.speculative.interface import SpecOutputs


@dataclass(frozen=True)
class StepInputs:
    """A step's inputs on the device, beside the attention metadata and the token store.

    Attributes:
        context_tokens: int64 [context tokens], of all chunks.
        context_next_tokens: int64 [num_contexts], see `SpecMetadata`.
        gather_ids: int64 [rows], the tokens that need logits; None is all.
        is_cuda_graph: the step is captured, or warms up for it.
    """

    num_contexts: int
    num_generations: int
    context_tokens: torch.Tensor
    context_next_tokens: torch.Tensor
    gather_ids: torch.Tensor | None
    is_cuda_graph: bool = False

    @property
    def num_seqs(self) -> int:
        return self.num_contexts + self.num_generations


class TokenStore:
    """Per running request, in its slot, what its next step needs of its last one.

    Attributes:
        next_new_tokens: int64 [slots, 1 + K], the last token and the drafts after it.
        kv_correction: int32 [slots], accepted minus assumed tokens of the last step, at most 0.
        spare_slot: one more, which padding rows write to.
        slots: int64 [slots], the slot of each sequence of the step.
        corrected: int64 [slots], the same where the host's cache length is a guess, else -1.
    """

    def __init__(self, num_slots: int, max_draft_len: int, device: torch.device) -> None:
        self.spare_slot = num_slots
        self.next_new_tokens = torch.zeros(
            num_slots + 1, 1 + max_draft_len, dtype=torch.int64, device=device
        )
        self.kv_correction = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.slots = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.corrected = torch.full((num_slots,), -1, dtype=torch.int64, device=device)

    def update(self, slots: torch.Tensor, outputs: SpecOutputs, num_contexts: int) -> None:
        """Keep a step's outputs."""
        self.next_new_tokens[slots] = outputs.next_new_tokens
        assumed = outputs.new_tokens.shape[1]
        if assumed > 1:
            correction = (outputs.new_tokens_lens - assumed).int()
            correction[:num_contexts] = 0
            self.kv_correction[slots] = correction


class StepPaths(NamedTuple):
    """What a model with a fast and a built-in path took in a step: "fast" or "builtin".

    Attributes:
        target: the model's `decode_path`; None where it tells none.
        draft: the worker's `draft_path`, likewise.
    """

    target: str | None
    draft: str | None


class SequenceResult(NamedTuple):
    """One sequence's share of a step.

    Attributes:
        token_ids: the tokens that count, at least one.
        draft_token_ids: drafts for the next step.
        largest_logits: of each row behind `token_ids`; not finite means that the row is broken.
    """

    token_ids: list[int]
    draft_token_ids: list[int]
    largest_logits: list[float]


class StepHandle:
    """A step that was launched.

    Args:
        packed: float64 [seqs, columns]: number of tokens that count, 1 + K tokens, K drafts, and 1
            + K largest logits.
        rows: 1 + K.
        paths: of a step without contexts, else None.

    Attributes:
        launch_counts: what its launch took; None unless it was counted.
    """

    def __init__(self, packed: torch.Tensor, rows: int, paths: StepPaths | None) -> None:
        self.launch_counts: LaunchCounts | None = None
        self.paths = paths
        self._rows = rows
        self._event: torch.cuda.Event | None = None
        self._host = packed
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[SequenceResult]:
        """The results in the batch's order, once the step is over."""
        if self._event is not None:
            self._event.synchronize()
        return [self._unpack(row) for row in self._host.tolist()]

    def _unpack(self, row: list[float]) -> SequenceResult:
        count, rows = int(row[0]), self._rows
        tokens, drafts, largest = row[1 : 1 + count], row[1 + rows : 2 * rows], row[2 * rows :]
        return SequenceResult([int(t) for t in tokens], [int(t) for t in drafts], largest[:count])
