"""Rejection sampling: drafts are drawn, and verified so that the output has the target's
distribution.

With p the target's distribution of a token and q the one that its draft d was drawn from, d is
accepted with probability min(1, p(d) / q(d)), and else replaced by a draw from the positive part of
p - q, normalised (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
2023, section 2.3). So sum(min(p, q)) of the drafts are accepted, and a token has the distribution p
whatever q is.

Both are integers of the same total (`probabilities`), so p - q is exact, and where d is rejected
the positive part of p - q is not empty. Drafts are drawn exactly, as a uniform number of 53 bits
times 2**52 is. The other draws round once: the grid of the uniform numbers and that rounding move
the bound between two outcomes by 2**-53 each, so a token's probability is off by at most 2**-51,
and the distribution by 2**-34 in total variation for 2**18 tokens. That is below the 2**-26 that
rounding the weights may change, with and without drafts (2**18 weights, each rounded down by less
than 2**-44 of the largest).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tensorrt_llm._torch.custom_ops.sampling import NUM_FILTERS, draw, probabilities
from tensorrt_llm._torch.host_staging import HostStaging


@dataclass
class DraftSampling:
    """Draws one step's drafts for the sequences whose tokens are sampled.

    Attributes:
        rows: int64 [n], these sequences' places in the step.
        filters: float64 [n, 4], see `filtered_weights`.
        uniforms: float64 [n, K], for each draft.
        draft_probs: for each draft that was drawn int64 [n, vocab], what it was drawn from.
    """

    rows: torch.Tensor
    filters: torch.Tensor
    uniforms: torch.Tensor
    draft_probs: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def upload(
        cls, table: Sequence[Sequence[float]], staging: HostStaging, device: torch.device
    ) -> "DraftSampling":
        """From one line per sequence: its place, its filters and its uniform numbers."""
        flat = [value for line in table for value in line]
        columns = staging.upload(flat, device, torch.float64).view(len(table), -1)
        end = 1 + NUM_FILTERS
        return cls(columns[:, 0].long(), columns[:, 1:end], columns[:, end:])

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """The next draft of each of these sequences, int64 [n].

        Args:
            logits: fp32 [n, vocab] of the draft model.
        """
        probs = probabilities(logits, self.filters)
        drafts = draw(probs, self.uniforms[:, len(self.draft_probs)])
        self.draft_probs.append(probs)
        return drafts


def accept_or_redraw(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    drafts: torch.Tensor,
    accepting: torch.Tensor,
    redrawing: torch.Tensor,
) -> torch.Tensor:
    """The draft of each row where it is accepted, else another token: int64 [rows].

    Args:
        target_probs, draft_probs: int64 [rows, vocab], as `probabilities` gives them.
        drafts: int64 [rows], drawn from draft_probs.
        accepting, redrawing: float64 [rows], independent uniform numbers.
    """
    at = drafts.unsqueeze(1)
    p, q = target_probs.gather(1, at).squeeze(1), draft_probs.gather(1, at).squeeze(1)
    # Where p reaches q, rounding must not reject: nothing might be left to draw from.
    accepted = (p >= q) | (accepting * q < p)
    redrawn = draw((target_probs - draft_probs).clamp_(min=0), redrawing)
    return torch.where(accepted, drafts, redrawn)
