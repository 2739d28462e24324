"""What one-model speculation is made of: the step's metadata and the worker's base."""

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

import torch

from tensorrt_llm._torch.distributed import allgather
from tensorrt_llm._torch.speculative.forced_acceptance import ForcedAcceptance
from tensorrt_llm._torch.speculative.mtp_tail_trim import (
    DraftArgmaxExchange,
    mtp_tail_trim_enabled,
)
from tensorrt_llm._torch.speculative.rejection_sampling import DraftSampling
from tensorrt_llm.mapping import Mapping


class SpeculativeDecodingMode(IntEnum):
    """Kinds of drafting. The engine runs MTP_EAGLE_ONE_MODEL; routing tells it from the others."""

    MTP = auto()  # one MTP layer per draft ("vanilla")
    MTP_EAGLE_ONE_MODEL = auto()  # the first MTP layer again and again, inside the model's step
    NGRAM = auto()


@dataclass(frozen=True)
class SpecConfig:
    """What drafts, and how many drafts a step verifies."""

    spec_dec_mode: SpeculativeDecodingMode
    max_draft_len: int


@dataclass
class SpecMetadata:
    """One step's facts for the worker; sequences are ordered contexts first.

    Attributes:
        max_draft_len: drafts per request and step.
        num_contexts, num_generations: sequences of each kind; a generation has 1 + max_draft_len
            rows, a context those of its chunk.
        draft_tokens: int64 [num_generations, max_draft_len], verified in this step.
        context_next_tokens: int64 [num_contexts]: the prompt token after the chunk, or -1 where the
            chunk ends its prompt and the sampled token follows.
        slot_ids: int64 [num_contexts + num_generations], the requests' places in the token store.
        draft_sampling: draws the drafts of some sequences; None if all are the likeliest tokens.
        is_cuda_graph: the step belongs to a graph, captured or about to be.
    """

    max_draft_len: int
    num_contexts: int
    num_generations: int
    draft_tokens: torch.Tensor
    context_next_tokens: torch.Tensor
    slot_ids: torch.Tensor
    draft_sampling: DraftSampling | None = None
    is_cuda_graph: bool = False


@dataclass
class SpecOutputs:
    """What a speculative step gives, all int64 on the device; rows as in the step.

    Attributes:
        new_tokens: [seqs, 1 + max_draft_len], the target's tokens; the first `new_tokens_lens`
            count.
        new_tokens_lens: [seqs], at least 1.
        next_draft_tokens: [seqs, max_draft_len].
        next_new_tokens: [seqs, 1 + max_draft_len]: the last token that counts, then the drafts: the
            input of the next step.
    """

    new_tokens: torch.Tensor
    new_tokens_lens: torch.Tensor
    next_draft_tokens: torch.Tensor
    next_new_tokens: torch.Tensor


class SpecWorkerBase:
    """Acceptance, and the choice of draft tokens over a vocabulary that is split over the ranks.

    Building one is collective, see `DraftArgmaxExchange`.

    Attributes:
        tail_trim: the gate of `mtp_tail_trim`.
        draft_path: "fast" or "builtin", which way the last `forward` drafted; None where there is
            but one. A target's worker sets it.
    """

    draft_path: str | None = None

    def __init__(self, max_draft_len: int, mapping: Mapping) -> None:
        self.max_draft_len = max_draft_len
        self.mapping = mapping
        self.tail_trim = mtp_tail_trim_enabled()
        self.argmax_exchange = DraftArgmaxExchange(mapping, wanted=self.tail_trim)
        self.forced = ForcedAcceptance.from_env()

    def accept_draft_tokens(
        self, target_tokens: torch.Tensor, spec_metadata: SpecMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Strict acceptance: a draft counts while it and all before it are what the target chose.

        Args:
            target_tokens: int64 [contexts + generations * (1 + K)], the target's choice per row.

        Returns:
            (accepted [seqs, 1 + K], num_accepted [seqs]): a context has its one token, a generation
            the target's own tokens, of which 1 + (length of the agreeing run) count.
        """
        contexts, k = spec_metadata.num_contexts, self.max_draft_len
        seqs = contexts + spec_metadata.num_generations
        accepted = target_tokens.new_zeros(seqs, k + 1)
        counts = target_tokens.new_ones(seqs)
        accepted[:contexts, 0] = target_tokens[:contexts]
        if spec_metadata.num_generations:
            rows = target_tokens[contexts:].view(-1, k + 1)
            accepted[contexts:] = rows
            agree = (rows[:, :k] == spec_metadata.draft_tokens).long()
            counts[contexts:] += agree.cumprod(dim=-1).sum(dim=-1)
            self.forced.apply(counts, spec_metadata, k)
        return accepted, counts

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        target_tokens: torch.Tensor,
        attn_metadata: Any,
        spec_metadata: SpecMetadata,
        draft_model: Any,
    ) -> SpecOutputs:
        """Without drafts there is nothing to verify: the step's tokens are the target's.

        Args:
            input_ids: int64 [tokens], the target's input.
            hidden_states: [tokens, hidden], after the target's final norm.
            target_tokens: int64 [contexts + generations * (1 + K)].
        """
        tokens = target_tokens.unsqueeze(1)
        return SpecOutputs(tokens, torch.ones_like(target_tokens), tokens[:, :0], tokens)

    def draft_tokens(self, logits: torch.Tensor, sampling: DraftSampling | None) -> torch.Tensor:
        """Next draft of each sequence, int64 [seqs]: the likeliest token, or a draw.

        Args:
            logits: [seqs, vocab / tp] of this rank.
        """
        drafts = self.draft_argmax(logits)
        if sampling is not None:
            rows = sampling.rows
            drafts[rows] = sampling.draw(allgather(logits[rows], self.mapping).float())
        return drafts

    def draft_argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Greedy token of each row: [rows, vocab / tp] of this rank -> int64 [rows], equal on all.

        Ties go to the lowest id, and a NaN counts as largest, over all ranks as within one.
        """
        if not self.mapping.has_tp():
            return logits.argmax(dim=-1)
        if self.tail_trim:
            return draft_tokens_from_gathered(self.argmax_exchange(logits))
        pairs = local_max_and_index(logits, self.mapping)
        return draft_tokens_from_gathered(allgather(pairs, self.mapping, dim=-1))


def local_max_and_index(logits: torch.Tensor, mapping: Mapping) -> torch.Tensor:
    """This rank's share of a vocabulary-wide argmax.

    Returns:
        fp32 [rows, 2]: global id of the largest logit, and its value. Ids pass exactly up to 2^24.
    """
    value, index = logits.max(dim=-1)
    index = index.int() + mapping.tp_rank * logits.shape[-1]
    return torch.stack([index.float(), value.float()], dim=-1)


def draft_tokens_from_gathered(gathered: torch.Tensor) -> torch.Tensor:
    """[rows, 2 * tp] as [id0, value0, id1, value1, ...] -> int64 [rows], the id of the largest
    value."""
    ids, values = gathered[:, 0::2], gathered[:, 1::2]
    return ids.gather(1, values.argmax(dim=-1, keepdim=True)).squeeze(1).long()
