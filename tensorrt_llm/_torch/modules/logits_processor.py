"""Which rows get logits, and the LM head over them."""

import torch
from torch import nn

from tensorrt_llm._torch.modules.embedding import LMHead


class LogitsProcessor(nn.Module):
    """Logits of the last token of each sequence, or of every token."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        lm_head: LMHead,
        gather_ids: torch.Tensor | None,
        return_context_logits: bool = False,
    ) -> torch.Tensor:
        """hidden_states [tokens, hidden] -> fp32 [rows, vocab_size].

        Args:
            gather_ids: int64 [rows], the rows that need logits; None takes all.
            return_context_logits: all rows, whatever gather_ids says.
        """
        if gather_ids is not None and not return_context_logits:
            hidden_states = hidden_states[gather_ids]
        return lm_head(hidden_states)
