"""Per-step tables of DSA: block tables of both pools, cache slots and positions of the step's
tokens."""

from dataclasses import dataclass

import torch

from tensorrt_llm._torch.attention.backends.interface import AttentionMetadata, KVCacheManager
from tensorrt_llm._torch.attention.backends.sparse.dsa.cache_manager import (
    INDEX_KEY,
    KEY,
    DSACacheLayout,
)
from tensorrt_llm._torch.attention.backends.sparse.dsa.params import DSAParams
from tensorrt_llm._torch.custom_ops.paged_mqa_logits import (
    paged_mqa_logits_processors,
    paged_mqa_logits_schedule,
    paged_mqa_logits_serves,
)
from tensorrt_llm._torch.custom_ops.sparse_mla import absence_bias
from tensorrt_llm.logger import logger

# Rows of the one buffer that holds what is known per token of the step.
TOKEN_TABLES = (
    "req_idx_per_token",
    "position_ids",
    "table_start",
    "slot_mapping",
    "index_block",
    "index_offset",
)


@dataclass
class Selection:
    """The keys that each token of the step attends to, made by a full layer and reused by the
    shared ones.

    Attributes:
        indices: int32 [tokens, topk], positions within the token's own request; -1 is none.
        slots: int64 [tokens, topk], the same as rows of the key pool; where there is none, some
            valid row.
        bias: [tokens, 1, topk] in the activation dtype, keeps the rows that are none out of the
            softmax; None when there are no such rows.
    """

    indices: torch.Tensor
    slots: torch.Tensor
    bias: torch.Tensor | None


@dataclass
class GenerationKeys:
    """The index keys of the generation rows' requests, the same for all layers of a step.

    Attributes:
        blocks: int64 [requests * pages], pages of the index-key pool; valid also where a request
            has no more.
        future: bool [rows, pages * tokens_per_block], keys after the row's own position.
    """

    blocks: torch.Tensor
    future: torch.Tensor


class DSAtrtllmAttentionMetadata(AttentionMetadata):
    """`AttentionMetadata` with what the indexer and sparse MLA read.

    Args:
        num_sms: processors that the indexer's keys are split over. 0 makes no schedule, since
            nothing reads one; None takes the device's, or 0 where `paged_mqa_logits` does not serve
            the indexer's shape, as on the CPU.

    Attributes:
        block_table: int32 [max_num_requests, max_blocks], pages of the key pool; -1 past the
            allocated ones.
        indexer_k_cache_block_offsets: the same of the index-key pool.
        req_idx_per_token: int64 [tokens], position_ids: int64 [tokens] (-1 for padding).
        table_start: int64 [tokens], where the token's request begins in the flattened block table.
        slot_mapping: int64 [tokens], row of the key pool that each token writes (layer 0); -1 for
            padding.
        index_block, index_offset: int64 [tokens], page and place in it of the token's index key;
            the page is -1 for padding.
        selection: set by the full layers as the forward passes them.
        skip_indexer_for_gen_reqs: generation rows take all their keys, as none has more than
            `index_topk`.
        selection_width: columns of this step's selections.
        scheduler_metadata_buffer, row_order: of the generation rows' index keys, see
            `paged_mqa_logits_schedule`.
        in_mtp_draft_loop, mtp_num_accepted, indexer_skip_topk, shared_selection: see
            `MTPIndexShareMetadata`.
    """

    kv_lens_hook_idempotent = True

    req_idx_per_token: torch.Tensor
    table_start: torch.Tensor
    slot_mapping: torch.Tensor
    index_block: torch.Tensor
    index_offset: torch.Tensor

    def __init__(
        self,
        max_num_requests: int,
        max_num_tokens: int,
        kv_cache_manager: KVCacheManager,
        device: torch.device,
        *,
        params: DSAParams,
        layout: DSACacheLayout,
        max_draft_len: int = 0,
        trim: bool = True,
        num_sms: int | None = None,
    ) -> None:
        super().__init__(
            max_num_requests,
            max_num_tokens,
            kv_cache_manager,
            device,
            max_draft_len=max_draft_len,
            trim=trim,
        )
        self.params, self.layout = params, layout
        self.num_sms = self._processors() if num_sms is None else num_sms
        shape = (max_num_requests, kv_cache_manager.max_blocks_per_seq)
        self.block_table = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.indexer_k_cache_block_offsets = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.key_rows_per_block = (
            kv_cache_manager.pool(KEY).shape[1] * kv_cache_manager.tokens_per_block
        )
        self.selection: Selection | None = None
        self.skip_indexer_for_gen_reqs = False
        self.selection_width = params.index_topk
        self._static_width = self._rows_are_full = False
        self.in_mtp_draft_loop = self.indexer_skip_topk = False
        self.mtp_num_accepted: torch.Tensor | None = None
        self.shared_selection: Selection | None = None
        self._skip_indexer_sched = self.indexer_schedule_is_stale = False
        self.scheduler_metadata_buffer = torch.zeros(
            self.num_sms + 1, 2, dtype=torch.int32, device=device
        )
        self.row_order = torch.zeros(max_num_requests, dtype=torch.int32, device=device)
        self._generation_keys: GenerationKeys | None = None
        self._key_rows: dict[int, torch.Tensor] = {}
        self._buffers = torch.full(
            (len(TOKEN_TABLES), max_num_tokens), -1, dtype=torch.int64, device=device
        )

    def _processors(self) -> int:
        if self.device.type != "cuda":
            return 0
        shape = (self.params.index_n_heads, self.params.index_head_dim, self.layout.key_dtype)
        if not paged_mqa_logits_serves(*shape):
            logger.warning("no kernel scores index keys of %d heads, %d channels, %s: slow", *shape)
            return 0
        return paged_mqa_logits_processors(self.device)

    def key_rows(self, layer_idx: int) -> torch.Tensor:
        """The layer's rows of the key pool, see `DSACacheLayout.key_rows`; the view is made once
        per manager."""
        if layer_idx not in self._key_rows:
            # The view outlives the forward that asks for it first.
            with torch.inference_mode(False):
                self._key_rows[layer_idx] = self.layout.key_rows(self.kv_cache_manager, layer_idx)
        return self._key_rows[layer_idx]

    def prepare(
        self,
        *,
        static_width: bool = False,
        skip_indexer: bool | None = None,
    ) -> None:
        """Fill the tables for the sequences set by the model engine; those without a request id
        are padding.

        Args:
            static_width: keep the selection at `index_topk` columns, as a captured graph needs it.
            skip_indexer: decides `skip_indexer_for_gen_reqs` instead of the lengths, for a capture.
        """
        super().prepare()
        self._copy_block_offsets(self.block_table, KEY)
        self._copy_block_offsets(self.indexer_k_cache_block_offsets, INDEX_KEY)
        topk, self._static_width = self.params.index_topk, static_width
        # Draft steps that choose for themselves go on where this step ends.
        longest = self.max_kv_len + self.max_draft_len
        self.selection_width = topk if static_width else min(topk, longest)
        gen_lens = self.kv_lens[self.num_contexts :]
        self.skip_indexer_for_gen_reqs = (
            self._is_short(gen_lens) if skip_indexer is None else skip_indexer
        )
        # The host may count on drafts of the step in flight that turn out to be wrong.
        firsts = (k - s + 1 for k, s in zip(self.kv_lens, self.seq_lens, strict=True))
        shortest = min(firsts) - self.max_draft_len
        self._rows_are_full = (
            not static_width and not self.num_contexts and shortest >= self.selection_width
        )
        self.selection = None
        if not self._deferred:
            self.on_update_kv_lens()

    def _copy_block_offsets(self, table: torch.Tensor, role: str) -> None:
        """Upload the batch's rows, unless the device holds this version of them.

        Columns past the blocks that the batch holds are never read: no step, however its lengths
        are corrected or advanced, writes or reads where its request holds no block.
        """
        manager, requests = self.kv_cache_manager, self.request_ids
        if self.staging.is_news(table, (manager.table_version, tuple(requests))):
            self.staging.num_uploads += 1
            columns = manager.max_held_blocks(requests, role) if self.trim else None
            manager.copy_batch_block_offsets(table, requests, role, columns)

    def _is_short(self, kv_lens: list[int]) -> bool:
        """Whether rows of these requests choose all their keys, to the end of the draft loop."""
        return max(kv_lens, default=0) + self.max_draft_len <= self.params.index_topk

    def on_update_kv_lens(self) -> None:
        """Recompute everything that follows from `kv_lens_cuda` and `seq_lens_cuda`, on the device
        alone."""
        n, tokens = self.num_seqs, self.num_tokens
        req, positions = self._token_positions(n, tokens)
        if self.max_draft_len:
            positions = torch.where(positions < self.kv_limits_cuda[req], positions, -1)
        page, offset = self._split(positions)
        start = req * self.block_table.shape[1]
        padding = positions < 0
        slots = self._lookup(self.block_table, start, page) * self.key_rows_per_block + offset
        block = self._lookup(self.indexer_k_cache_block_offsets, start, page)
        slots.masked_fill_(padding, -1)
        block.masked_fill_(padding, -1)
        tables = self._buffers[:, :tokens]
        torch.stack([req, positions, start, slots, block, offset], out=tables)
        (
            self.req_idx_per_token,
            self.position_ids,
            self.table_start,
            self.slot_mapping,
            self.index_block,
            self.index_offset,
        ) = tables
        self._generation_keys = None
        self._update_indexer_schedule()

    def _token_positions(self, n: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence and absolute position of each token; sequence s covers kv_len - seq_len ...
        kv_len - 1."""
        seq_lens, kv_lens = self.seq_lens_cuda[:n].long(), self.kv_lens_cuda[:n].long()
        if tokens == n:  # decode without drafts: one token each
            return torch.arange(n, device=self.device), kv_lens - 1
        if self.num_contexts:
            req = torch.repeat_interleave(
                torch.arange(n, device=self.device), seq_lens, output_size=tokens
            )
        else:  # generation rows: equally many for each request
            req = torch.arange(tokens, device=self.device) // (tokens // n)
        ends = seq_lens.cumsum(0)
        return req, torch.arange(tokens, device=self.device) - ends[req] + kv_lens[req]

    def _split(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.kv_cache_manager.tokens_per_block
        positions = positions.clamp(min=0)
        return positions // size, positions % size

    @staticmethod
    def _lookup(table: torch.Tensor, start: torch.Tensor, page: torch.Tensor) -> torch.Tensor:
        """Block of a page of the request whose row starts at `start`; 0 where a padding row holds
        none."""
        return table.take(start + page).long().clamp_(min=0)

    def _update_indexer_schedule(self) -> None:
        """Split the generation rows' keys over the processors, where rows will choose among
        them."""
        unread = self._skip_indexer_sched or self.skip_indexer_for_gen_reqs
        self.indexer_schedule_is_stale = unread
        if unread or not (self.num_sms and self.num_generations):
            return
        part = slice(self.num_contexts, self.num_seqs)
        kv_lens = self.kv_lens_cuda[part]
        if self.max_draft_len:
            kv_lens = torch.minimum(kv_lens, self.kv_limits_cuda[part])
        row_order = self.row_order[: self.num_generations]
        paged_mqa_logits_schedule(kv_lens, self.scheduler_metadata_buffer, row_order)

    def check_indexer_schedule(self) -> None:
        """Raises RuntimeError if the lengths have changed since the schedule was made."""
        if self.indexer_schedule_is_stale:
            raise RuntimeError(
                "the indexer's schedule is stale: the draft loop left it out because its steps "
                "were to reuse a choice of keys, and now one chooses"
            )

    def generation_keys(self) -> GenerationKeys:
        """Made by the first full layer of a forward, so that a captured graph makes it anew at
        each replay."""
        if self._generation_keys is None:
            table = self.generation_index_table()
            positions = self.position_ids[self.num_ctx_tokens :].unsqueeze(1)
            keys = torch.arange(
                table.shape[1] * self.kv_cache_manager.tokens_per_block, device=self.device
            )
            self._generation_keys = GenerationKeys(
                table.clamp(min=0).flatten().long(), keys > positions
            )
        return self._generation_keys

    def generation_index_table(self) -> torch.Tensor:
        """int32 [generations, pages]: index-key pages of the generation rows, all columns if the
        width is static."""
        rows = self.indexer_k_cache_block_offsets[self.num_contexts : self.num_seqs]
        if self._static_width:
            return rows
        return rows[
            :,
            : -(-max(self.kv_lens[self.num_contexts :]) // self.kv_cache_manager.tokens_per_block),
        ]

    def select(self, indices: torch.Tensor) -> Selection:
        """Positions int32 [tokens, topk] within each token's request (-1: none) -> `Selection`."""
        page, offset = self._split(indices.long())
        slots = (
            self._lookup(self.block_table, self.table_start.unsqueeze(1), page)
            * self.key_rows_per_block
            + offset
        )
        bias = None if self._rows_are_full else absence_bias(indices, self.layout.dtype)
        return Selection(indices, slots, bias)

    # --- the MTP draft loop -----------------------------------------------------------------------

    def set_in_mtp_draft_loop(self, active: bool) -> None:
        """See `MTPIndexShareMetadata`."""
        self.in_mtp_draft_loop = active

    def set_mtp_num_accepted(self, num_accepted: torch.Tensor | None) -> None:
        """See `MTPIndexShareMetadata`."""
        self.mtp_num_accepted = num_accepted

    def set_skip_topk(self, skip: bool) -> None:
        """See `MTPIndexShareMetadata`."""
        self.indexer_skip_topk = skip

    def set_skip_indexer_sched_metadata(self, skip: bool) -> None:
        """See `MTPIndexerScheduleTrimMetadata`."""
        self._skip_indexer_sched = skip

    def mtp_next_step_reuses_topk(self) -> bool:
        """See `MTPIndexerScheduleTrimMetadata`."""
        return self.indexer_skip_topk

    def keep_shared_selection(self, chosen: Selection) -> None:
        """Keep one row per request of a draft loop's first choice for its later steps."""
        assert self.mtp_num_accepted is not None, "set_mtp_num_accepted comes before the choice"
        rows = self.last_accepted_rows(self.mtp_num_accepted)
        bias = None if chosen.bias is None else chosen.bias[rows]
        self.shared_selection = Selection(chosen.indices[rows], chosen.slots[rows], bias)

    def begin_draft_rows(self, positions: torch.Tensor) -> None:
        """See `AttentionMetadata`; contexts become generation rows, which no graph has."""
        if self.num_contexts:
            self.skip_indexer_for_gen_reqs = self._is_short(self.kv_lens)
        super().begin_draft_rows(positions)

    def update_for_spec_dec(self, positions: torch.Tensor) -> None:
        """See `AttentionMetadata`; a step that reuses a choice of keys also writes none, and needs
        its positions alone."""
        if not self._skip_indexer_sched:
            self.on_update_kv_lens()
            return
        self.position_ids, self.indexer_schedule_is_stale = positions, True
