"""The draft loop of one request on the decode step's ops: K tokens from the MTP layer, none of
which leaves the device.

The first draft step runs the MTP layer on the verify rows and chooses keys; from its MoE on only
the row of the last accepted token is left. The later steps take that row's choice and add no keys
to the cache, so they need a query and nothing of the KV half, and no length that the engine's
metadata holds changes. What stands between two steps is one op: the vocabulary's argmax over the
ranks, and the next step's normed input from a table over the tokens.
"""

from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modeling_v2.catalog._op import lasting_binds
from tensorrt_llm._torch.speculative.forced_acceptance import SLOT_STRIDE, STEP_STRIDE
from tensorrt_llm._torch.speculative.interface import SpecMetadata, SpecOutputs
from tensorrt_llm._torch.speculative.mtp import MTPEagleWorker
from tensorrt_llm.mapping import Mapping

from .decode import BUILTIN, FAST, DecodeTarget
from .draft_ops import DraftOps
from .ops.attention.q_b_fp8_rope import Plan
from .streams import SideStream


class MTPDraftWorker(MTPEagleWorker):
    """Accepts by one kernel, and drafts with `DraftLoop` where the decode target ran its fast step
    and all drafts are the likeliest tokens; every other step runs the built-in loop.

    Attributes:
        draft_path: what the last step's drafts took, `FAST` or `BUILTIN`.
    """

    def __init__(
        self, max_draft_len: int, mapping: Mapping, index_share: bool, decode: DecodeTarget
    ) -> None:
        super().__init__(max_draft_len, mapping, index_share)
        self.decode, self.loop = decode, DraftLoop(decode, max_draft_len)
        self.draft_path = BUILTIN

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        target_tokens: Tensor,
        attn_metadata: Any,
        spec_metadata: SpecMetadata,
        draft_model: Any,
    ) -> SpecOutputs:
        """See `SpecWorkerBase`."""
        reason = self.unserved(spec_metadata)
        if reason:
            self.draft_path = BUILTIN
            self.decode.tell(f"drafting with {reason} runs the built-in loop")
            return super().forward(
                input_ids, hidden_states, target_tokens, attn_metadata, spec_metadata, draft_model
            )
        self.draft_path = FAST
        accepted, counts = self.accept_draft_tokens(target_tokens, spec_metadata)
        drafts, next_new_tokens = self.loop.run(attn_metadata, hidden_states, accepted, counts)
        return SpecOutputs(accepted, counts, drafts, next_new_tokens)

    def unserved(self, spec_metadata: SpecMetadata) -> str:
        """Why the loop does not take a step; empty where it does."""
        if spec_metadata.num_contexts:
            return "contexts"
        if self.decode.path != FAST:
            return "a verify step of the built-in modules"
        if spec_metadata.draft_sampling is not None:
            return "drawn drafts"
        if not self.index_share:
            return "index_share_for_mtp_iteration off"
        return ""

    def accept_draft_tokens(
        self, target_tokens: Tensor, spec_metadata: SpecMetadata
    ) -> tuple[Tensor, Tensor]:
        """See `SpecWorkerBase`; generations alone take one kernel, forced counts included."""
        if spec_metadata.num_contexts:
            return super().accept_draft_tokens(target_tokens, spec_metadata)
        drafts = spec_metadata.draft_tokens.contiguous()
        accepted = target_tokens.new_empty(drafts.shape[0], drafts.shape[1] + 1)
        counts = self.loop.ops.accept(
            target_tokens,
            drafts,
            num_contexts=0,
            slot_ids=spec_metadata.slot_ids,
            counter_stride=STEP_STRIDE,
            slot_stride=SLOT_STRIDE,
            accepted_tokens=accepted,
            **self._forced(spec_metadata),
        )
        return accepted, counts

    def _forced(self, spec_metadata: SpecMetadata) -> dict[str, Any]:
        """The forced count by argument of glm_verify_head_accept; none leaves the strict one."""
        forced = self.forced
        if not forced.applies(spec_metadata):
            return {
                "forced_tokens": 0,
                "forced_fraction": 0.0,
                "force_pool": None,
                "force_counter": None,
            }
        pool, counter = forced.state(spec_metadata.slot_ids.device)
        return {
            "forced_tokens": forced.whole + 1,
            "forced_fraction": forced.fraction,
            "force_pool": pool,
            "force_counter": counter,
        }


class DraftLoop:
    """K draft steps of one request; the first follows a fast decode step on the same rows."""

    def __init__(self, decode: DecodeTarget, max_draft_len: int) -> None:
        operands, g = decode.parts.operands, decode.geometry
        device, dtype = operands.embed_table.device, operands.embed_table.dtype
        self.decode, self.max_draft_len = decode, max_draft_len
        self.layer = len(decode.layers)  # the MTP layer's number
        with torch.no_grad(), lasting_binds():
            self.ops = DraftOps.bound(operands, decode.parts.workspaces)
        self.hidden_half = SideStream("hidden half", device)
        self.stash = SideStream("stash", device)
        self.no_residual = torch.zeros(g.max_rows, g.hidden_size, dtype=dtype, device=device)
        self.whole_weight = torch.ones(1, 1, dtype=dtype, device=device)
        self.only_place = torch.zeros(1, 1, dtype=torch.int32, device=device)
        self.topk_indices = torch.full((1, g.index_topk), -1, dtype=torch.int32, device=device)
        self.first_request = torch.zeros(1, dtype=torch.int64, device=device)

    def run(
        self, md: Any, hidden_states: Tensor, accepted: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            md: the verify step's metadata, left as it is.
            hidden_states: [1 + K, hidden] of the verify rows, after the final norm.
            accepted: int64 [1, 1 + K], the target's tokens; counts: int64 [1], those that count.

        Returns:
            (drafts int64 [1, K], next_new_tokens int64 [1, 1 + K]), see `SpecOutputs`.
        """
        drafts = accepted.new_empty(1, self.max_draft_len)
        next_new_tokens = torch.empty_like(accepted)
        limit = md.kv_limits_cuda[:1]
        hidden, position, pool_rows = self.first_step(md, hidden_states, accepted, counts)
        for step in range(self.max_draft_len - 1):
            half, logits = self.score(hidden)
            x, residual = self.ops.next_input(
                logits,
                hidden_half=half,
                kv_limits=limit,
                position_ids=position,
                draft_tokens=drafts,
                step=step,
            )
            hidden = self.later_step(md, x, residual, position, pool_rows)
        self.ops.last_token(
            self.decode.ops.lm_head(hidden),
            accepted_tokens=accepted,
            num_accepted=counts,
            draft_tokens=drafts,
            step=self.max_draft_len - 1,
            next_new_tokens=next_new_tokens,
        )
        return drafts, next_new_tokens

    def first_step(
        self, md: Any, hidden_states: Tensor, accepted: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The MTP layer as a full-indexer layer on the verify rows.

        Returns:
            (hidden [1, hidden], its position int64 [1], the selection as pool rows int32 [1,
            index_topk]), all of the last accepted token.
        """
        ops, decode, rows = self.ops, self.decode, hidden_states.shape[0]
        window = ops.eh_proj_input(accepted.flatten(), hidden_states=hidden_states)
        x, residual = ops.eh_proj_hop(ops.eh_proj(window), self.no_residual[:rows])
        step = decode.step  # the verify step's: same rows, same lengths
        assert step is not None and step.md is md
        decode.full_attention(self.layer, x, step)
        with self.stash.beside():
            pool_rows = self.keep_selection(md, step.topk_indices, counts)
        x, residual = decode.ops.attention_hop(None, residual, layer=self.layer)
        row, x, residual = ops.last_accepted(
            x, residual, self.first_request, counts, rows_per_request=rows, row_offset=0
        )
        position = md.position_ids.index_select(0, row)
        hidden = self.experts(x, residual)
        self.stash.join()
        return hidden, position, pool_rows

    def keep_selection(self, md: Any, topk_indices: Tensor, counts: Tensor) -> Tensor:
        """The last accepted row's selection, mapped to rows of the key pool once for all steps."""
        self.ops.stash(
            topk_indices,
            counts,
            shared_topk_indices=self.topk_indices,
            rows_per_request=topk_indices.shape[0],
        )
        return self.ops.to_pool_rows(
            self.first_request,
            md.block_table[:1],
            self.topk_indices,
            block_size=md.kv_cache_manager.tokens_per_block,
            num_topk_tokens=self.topk_indices.shape[1],
            stride_factor=md.key_rows_per_block,
            layer_id=0,
        )

    def score(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(this rank's share of the next step's hidden half, its logits); the half does not wait
        for the token."""
        with self.hidden_half.beside():
            half = self.ops.hidden_half(hidden)
        logits = self.decode.ops.lm_head(hidden)
        self.hidden_half.join()
        return half, logits

    def later_step(
        self, md: Any, x: Tensor, residual: Tensor, position: Tensor, pool_rows: Tensor
    ) -> Tensor:
        """The MTP layer on one row, attending to the kept selection: [1, hidden] -> [1, hidden]."""
        ops = self.decode.ops
        q_a = self.ops.q_a(x)
        q = ops.q_b(q_a, plan=Plan.REGULAR, position_ids=position, layer=self.layer)
        out = ops.flash_decode(
            q,
            kv_pool=md.key_rows(self.layer),
            topk_indices=pool_rows,
            block_table=None,
            kv_lens=None,
            gather_before_wait=False,
            layer=self.layer,
        )
        ops.o_proj(out, layer=self.layer)
        x, residual = ops.attention_hop(None, residual, layer=self.layer)
        return self.experts(x, residual)

    def experts(self, x: Tensor, residual: Tensor) -> Tensor:
        """The MTP layer's MoE and `shared_head.norm`, [1, hidden] each. The routed experts' sum is
        complete, so the hop takes it as the one row of one expert."""
        decode = self.decode
        with decode.shared.beside():
            shared = decode.shared_expert(self.layer, x)
        routed = self.ops.experts(x, self.ops.router(x))
        decode.shared.join()
        hidden, _ = decode.ops.moe_hop(
            routed, self.whole_weight, self.only_place, shared, residual, layer=self.layer
        )
        return hidden
