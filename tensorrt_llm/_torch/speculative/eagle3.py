"""The one-model draft loop: verify, then draft with hidden states that never leave the device."""

from typing import Any

import torch

from tensorrt_llm._torch.attention.backends.interface import AttentionMetadata
from tensorrt_llm._torch.attention.backends.sparse.params import (
    MTPIndexerScheduleTrimMetadata,
    MTPIndexShareMetadata,
)
from tensorrt_llm._torch.speculative.interface import SpecMetadata, SpecOutputs, SpecWorkerBase
from tensorrt_llm._torch.speculative.rejection_sampling import DraftSampling
from tensorrt_llm.mapping import Mapping


class Eagle3OneModelWorker(SpecWorkerBase):
    """Runs after the target model on the same rows.

    Args:
        index_share: draft steps after the first reuse its choice of keys and add none to the cache
            (`index_share_for_mtp_iteration`); else each runs the MTP layer's own indexer.
    """

    def __init__(self, max_draft_len: int, mapping: Mapping, index_share: bool) -> None:
        super().__init__(max_draft_len, mapping)
        self.index_share = index_share

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        target_tokens: torch.Tensor,
        attn_metadata: AttentionMetadata,
        spec_metadata: SpecMetadata,
        draft_model: Any,
    ) -> SpecOutputs:
        """Accept, draft, and say what comes next; arguments as in the base class.

        Args:
            draft_model: see `MTPDraftModel`.
        """
        accepted, counts = self.accept_draft_tokens(target_tokens, spec_metadata)
        ids = self._first_draft_inputs(input_ids, accepted, attn_metadata, spec_metadata)
        drafts = self._draft(
            ids, hidden_states, counts, attn_metadata, spec_metadata.draft_sampling, draft_model
        )
        last = accepted.gather(1, counts.unsqueeze(1) - 1)
        return SpecOutputs(accepted, counts, drafts, torch.cat([last, drafts], dim=1))

    def _first_draft_inputs(
        self,
        input_ids: torch.Tensor,
        accepted: torch.Tensor,
        attn_metadata: AttentionMetadata,
        spec_metadata: SpecMetadata,
    ) -> torch.Tensor:
        """The token after each row: int64 [tokens].

        A context's are its chunk shifted by one; a generation's are the target's tokens, also in
        rows that were rejected, whose keys later steps overwrite.
        """
        contexts = spec_metadata.num_contexts
        generated = accepted[contexts:].flatten()
        if not contexts:
            return generated
        shifted = input_ids[: attn_metadata.num_ctx_tokens].roll(-1)
        following = spec_metadata.context_next_tokens
        last = attn_metadata.seq_lens_cuda[:contexts].long().cumsum(0) - 1
        shifted[last] = torch.where(following < 0, accepted[:contexts, 0], following)
        return torch.cat([shifted, generated])

    def _draft(
        self,
        ids: torch.Tensor,
        hidden_states: torch.Tensor,
        counts: torch.Tensor,
        attn_metadata: AttentionMetadata,
        draft_sampling: DraftSampling | None,
        draft_model: Any,
    ) -> torch.Tensor:
        """int64 [seqs, K]: the first step on all rows, the later ones on one row per request."""
        drafts = []
        positions = attn_metadata.position_ids
        rows: torch.Tensor | slice = attn_metadata.last_accepted_rows(counts)
        self._begin_index_share(counts, attn_metadata)
        for step in range(self.max_draft_len):
            hidden_states = draft_model(ids, hidden_states, positions, attn_metadata)
            scored, hidden_states = self._select(hidden_states, rows)
            if step == 0:
                self._reuse_topk(attn_metadata)
            if step + 1 < self.max_draft_len or not self.tail_trim:
                following = self._next(positions[rows], attn_metadata)
                if step == 0:
                    attn_metadata.begin_draft_rows(following)
                else:
                    attn_metadata.advance_draft_rows(following)
            ids = self.draft_tokens(draft_model.lm_head.local_logits(scored), draft_sampling)
            drafts.append(ids)
            positions, rows = attn_metadata.position_ids, self._later_rows(attn_metadata)
        if self._leaves_verify_rows:
            attn_metadata.end_draft_rows()
        self._end_index_share(attn_metadata)
        return torch.stack(drafts, dim=1)

    # --- what the steps after the first leave out -------------------------------------------------

    def _begin_index_share(self, counts: torch.Tensor, attn_metadata: AttentionMetadata) -> None:
        """Let the first step's choice of keys be kept, if a later one is to reuse it."""
        if not self.index_share:
            return
        if not isinstance(attn_metadata, MTPIndexShareMetadata):
            raise TypeError(f"{type(attn_metadata).__name__} cannot share the MTP layer's indices")
        attn_metadata.set_mtp_num_accepted(counts)
        attn_metadata.set_in_mtp_draft_loop(self._leaves_verify_rows)

    def _reuse_topk(self, attn_metadata: AttentionMetadata) -> None:
        """From here on steps take that choice, and the trimmed loop no longer makes the indexer's
        schedule for them."""
        if isinstance(attn_metadata, MTPIndexShareMetadata):
            attn_metadata.set_in_mtp_draft_loop(False)
            attn_metadata.set_skip_topk(self.index_share)
        if self.tail_trim and isinstance(attn_metadata, MTPIndexerScheduleTrimMetadata):
            reuses = attn_metadata.mtp_next_step_reuses_topk()
            attn_metadata.set_skip_indexer_sched_metadata(reuses)

    @staticmethod
    def _end_index_share(attn_metadata: AttentionMetadata) -> None:
        if isinstance(attn_metadata, MTPIndexShareMetadata):
            attn_metadata.set_skip_topk(False)
        if isinstance(attn_metadata, MTPIndexerScheduleTrimMetadata):
            attn_metadata.set_skip_indexer_sched_metadata(False)

    @property
    def _leaves_verify_rows(self) -> bool:
        """Whether the loop moves on to draft rows, which without a second step nothing reads."""
        return self.max_draft_len > 1 or not self.tail_trim

    def _select(
        self, hidden_states: torch.Tensor, rows: torch.Tensor | slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the LM head's input, the next step's): the same rows, once if trimmed, else twice."""
        chosen = hidden_states[rows]
        return chosen, chosen if self.tail_trim else hidden_states[rows]

    def _later_rows(self, attn_metadata: AttentionMetadata) -> torch.Tensor | slice:
        """Where each request's row is after the first step: in order, so that a prefix has them."""
        n = attn_metadata.num_seqs
        return slice(n) if self.tail_trim else attn_metadata.batch_indices_cuda[:n]

    @staticmethod
    def _next(positions: torch.Tensor, attn_metadata: AttentionMetadata) -> torch.Tensor:
        """One further; padding stays padding, and so does what has reached its request's end."""
        following = torch.where(positions < 0, -1, positions + 1)
        room = attn_metadata.kv_limits_cuda[: attn_metadata.num_seqs]
        return torch.where(following < room, following, -1)
