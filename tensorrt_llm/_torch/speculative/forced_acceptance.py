"""`TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS`: pretend that a given number of drafts was right.

For measurements with a pinned acceptance length. Only the counts change: what is kept are the
target's own tokens, so the text is wrong by design.
"""

import math
import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tensorrt_llm._torch.speculative.interface import SpecMetadata

ENV = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
POOL_SIZE = 65536
POOL_SEED = 0
STEP_STRIDE, SLOT_STRIDE = 6007, 1009


class ForcedAcceptance:
    """Overrides the accepted counts of generation rows.

    A fraction is the probability of one more, drawn from a fixed pool by a counter on the device,
    so that all ranks draw alike and a replayed graph goes on drawing.

    Args:
        num_accepted: drafts to accept per request and step; 0 leaves everything alone.
    """

    def __init__(self, num_accepted: float) -> None:
        self.whole, self.fraction = int(num_accepted), num_accepted - int(num_accepted)
        self.active = num_accepted > 0
        self._pool: torch.Tensor | None = None
        self._counter: torch.Tensor | None = None

    @classmethod
    def from_env(cls) -> "ForcedAcceptance":
        """Raises ValueError for a value that is not a finite number of at least 0."""
        text = os.environ.get(ENV, "").strip() or "0"
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise ValueError(
                f"{ENV} is {text!r}; it must be a number of at least 0, such as 2 or 2.6"
            )
        return cls(value)

    def apply(self, counts: torch.Tensor, spec_metadata: "SpecMetadata", draft_len: int) -> None:
        """Set counts[contexts:] in place: min(drafts + 1, draft_len + 1).

        See `applies`.
        """
        if not self.applies(spec_metadata):
            return
        generations = counts[spec_metadata.num_contexts :]
        forced = generations.new_full(generations.shape, self.whole + 1)
        if self.fraction:
            forced += self._draw(spec_metadata.slot_ids[spec_metadata.num_contexts :])
        generations.copy_(forced.clamp(max=draft_len + 1))

    def applies(self, spec_metadata: "SpecMetadata") -> bool:
        """Whether a step's counts are forced: not in the eager warm-up of a graph, whose draws must
        not move the counter."""
        return self.active and not _is_graph_warmup(spec_metadata)

    def _draw(self, slots: torch.Tensor) -> torch.Tensor:
        """1 with probability `fraction` per request, else 0; int64 [generations]."""
        pool, counter = self.state(slots.device)
        place = (counter * STEP_STRIDE + slots * SLOT_STRIDE) & (POOL_SIZE - 1)
        counter += 1
        return (pool[place] < self.fraction).long()

    def state(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(pool, counter) on the device; made at the first call, which must not be a capture."""
        if self._pool is None or self._counter is None:
            generator = torch.Generator().manual_seed(POOL_SEED)
            self._pool = torch.rand(POOL_SIZE, generator=generator).to(device)
            self._counter = torch.zeros((), dtype=torch.int64, device=device)
        return self._pool, self._counter


def _is_graph_warmup(spec_metadata: "SpecMetadata") -> bool:
    return spec_metadata.is_cuda_graph and not torch.cuda.is_current_stream_capturing()
