"""The decode step: one request's verify rows through all layers, in the order a GPU runs it.

Every call below is one op, except those that say otherwise. `beside` queues on a side stream, and
`join` is where the step waits for it. Between two hops nothing waits for another rank, except the
choice of keys.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.attention.backends.sparse.dsa.cache_manager import (
    INDEX_KEY,
    DSACacheLayout,
)
from tensorrt_llm._torch.attention.backends.sparse.dsa.indexer import dense_rows
from tensorrt_llm._torch.modeling_v2._target import Core, Target
from tensorrt_llm._torch.modeling_v2.catalog._op import lasting_binds
from tensorrt_llm.logger import logger
from tensorrt_llm.mapping import Mapping

from .geometry import Geometry
from .ops.attention.q_b_fp8_rope import Plan
from .step_ops import StepOps
from .streams import SideStream
from .weights import DenseOperands, LayerOperands, ModelOperands, MoeOperands, Nvfp4Experts
from .workspaces import Workspaces

FAST, BUILTIN = "fast", "builtin"


@dataclass(frozen=True)
class StepParts:
    """What the step of one rank is made of; all of it stays for the model's life."""

    operands: ModelOperands
    geometry: Geometry
    layout: DSACacheLayout
    workspaces: Workspaces
    mapping: Mapping


@dataclass(frozen=True)
class Shard:
    """This rank's part of the request's index keys in one step.

    Attributes:
        length, start: int32 [1], keys and the position of the first.
        table: int32 [1, pages] of the index-key pool.
        positions: int64 [rows], each row's last key counted from `start`; -1 sees none.
        scores: fp32 [rows, pages * tokens per page], overwritten by every full layer.
    """

    length: Tensor
    start: Tensor
    table: Tensor
    positions: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Step:
    """What the layers of one step share.

    Attributes:
        md: the engine's metadata, asked for pool views at each use.
        topk_indices: int32 [rows, index_topk], the selection: positions in the request, -1 for
            none. A full layer writes it, shared layers read it.
        shard: None in a short context, whose rows select all their keys.
    """

    md: Any
    topk_indices: Tensor
    shard: Shard | None


class DecodeTarget(Target):
    """Steps without context rows: one request's through the step below, the others through the
    built-in modules.

    Attributes:
        path: what the last forward took, `FAST` or `BUILTIN`.
        ops: every op with what is bound to it.
        step: of the last fast forward; its drafts go on with it.
    """

    def __init__(self, core: Core, parts: StepParts) -> None:
        super().__init__(core)
        self.parts, self.geometry = parts, parts.geometry
        self.layers = parts.operands.layers
        device, g = parts.operands.embed_table.device, parts.geometry
        self.topk_indices = torch.full(
            (g.max_rows, g.index_topk), -1, dtype=torch.int32, device=device
        )
        with torch.no_grad(), lasting_binds():
            self.ops = StepOps.bound(
                parts.operands, g, parts.layout, parts.workspaces, self.topk_indices
            )
        self.kv, self.index_key, self.shared, self.quantize = (
            SideStream(name, device) for name in ("kv", "index key", "shared expert", "quantize")
        )
        self.shared_columns = [g.q_lora_rank, g.latent_width]
        self.full_columns = [*self.shared_columns, g.index_head_dim, g.index_n_heads]
        self.path = BUILTIN
        self.step: Step | None = None
        self._told: set[str] = set()

    # --- which steps ------------------------------------------------------------------------------

    def forward(
        self, attn_metadata: Any, input_ids: Tensor, position_ids: Tensor, **kwargs: Any
    ) -> Tensor:
        """See `Target`. The fast step serves one request of at most `max_rows` rows."""
        reason = self.unserved(attn_metadata)
        if reason:
            self.path = BUILTIN
            self.tell(f"a decode step with {reason} runs the built-in modules")
            return self.core.builtin_forward(attn_metadata, input_ids, position_ids)
        self.path = FAST
        return self.decode(attn_metadata, input_ids)

    def unserved(self, md: Any) -> str:
        """Why the fast step does not take a step; empty where it does."""
        if md.num_seqs != 1:
            return f"{md.num_seqs} requests"
        if md.num_tokens > self.geometry.max_rows:
            return f"{md.num_tokens} rows"
        return ""

    def tell(self, what: str) -> None:
        """Log a choice once."""
        if what not in self._told and self.parts.mapping.rank == 0:
            logger.info("modeling_v2: %s", what)
        self._told.add(what)

    # --- the step ---------------------------------------------------------------------------------

    def decode(self, md: Any, input_ids: Tensor) -> Tensor:
        """The verify rows' token ids int64 [rows] -> hidden states after the final norm [rows,
        hidden]."""
        self.step = step = self.begin(md)
        residual = self.ops.embedding(input_ids)
        x = self.ops.first_norm(residual)
        for i, layer in enumerate(self.layers):
            x, residual = self.layer(i, layer, x, residual, step)
        return x

    def verify_logits(self, x: Tensor) -> Tensor:
        """The step's hidden states [rows, hidden] -> logits fp32 [rows, whole vocabulary]."""
        return self.ops.logits_gather(self.ops.lm_head(x))

    def layer(
        self, i: int, layer: LayerOperands, x: Tensor, residual: Tensor, step: Step
    ) -> tuple[Tensor, Tensor]:
        """(normed input, residual) -> the same of the next layer, [rows, hidden] each. Each hop
        sums what the ranks have published, adds the residual and applies the norm that follows."""
        if layer.attention.indexer is None:
            self.shared_attention(i, x, step)
        else:
            self.full_attention(i, x, step)
        x, residual = self.ops.attention_hop(None, residual, layer=i)
        if isinstance(layer.mlp, DenseOperands):
            return self.ops.mlp_hop(self.ops.dense_mlp(x, layer=i), residual, layer=i)
        return self.moe(i, layer.mlp, x, residual)

    def full_attention(self, i: int, x: Tensor, step: Step) -> None:
        """A layer that chooses keys: the query is made beside the choice, which does not need it.

        kv:              KV half, q_b ------------------+
        main:    fused-A, Q tail, scores, top-k --------+ flash decode, o_proj (published)
        index key:       K tail --+
        """
        q_a, kv_a, k, weights = self.ops.fused_a(x, layer=i).split(self.full_columns, dim=1)
        with self.kv.beside():
            self.append_keys(i, kv_a, step, early=False)
            q = self.ops.q_b(q_a, plan=Plan.BESIDE_TOPK, layer=i)
        with self.index_key.beside():
            self.ops.k_tail(k, **self._index_pool(i, step), layer=i)
        if step.shard is None:
            self.index_key.join()
        else:
            self.choose_keys(i, q_a, weights, step, step.shard)
        self.kv.join()
        self.attend(i, q, step, early=False)

    def shared_attention(self, i: int, x: Tensor, step: Step) -> None:
        """A layer that reuses the selection, which is known at entry: the flash decode gathers the
        rows of earlier steps while the KV half and q_b still run."""
        q_a, kv_a = self.ops.fused_a(x, layer=i).split(self.shared_columns, dim=1)
        self.append_keys(i, kv_a, step, early=True)
        q = self.ops.q_b(q_a, plan=Plan.EARLY_GATHER, layer=i)
        self.attend(i, q, step, early=True)

    def append_keys(self, i: int, kv_a: Tensor, step: Step, *, early: bool) -> None:
        pool = step.md.key_rows(i)
        self.ops.kv_half(kv_a, kv_pool=pool, trigger_at_entry=early, layer=i)

    def choose_keys(self, i: int, q_a: Tensor, weights: Tensor, step: Step, shard: Shard) -> None:
        """Score this rank's keys, agree with the other ranks on the best of all."""
        q, w = self.ops.q_tail(q_a, weights=weights, layer=i)
        self.index_key.join()
        self.ops.key_scores(
            q.unsqueeze(0),
            w.unsqueeze(0),
            **self._index_pool(i, step),
            block_table=shard.table,
            position_ids=shard.positions,
            logits=shard.scores,
        )
        self.ops.topk(
            shard.scores,
            shard_len=shard.length,
            shard_start=shard.start,
            topk_indices=step.topk_indices,
        )

    def attend(self, i: int, q: Tensor, step: Step, *, early: bool) -> None:
        out = self.ops.flash_decode(
            q,
            kv_pool=step.md.key_rows(i),
            topk_indices=step.topk_indices,
            gather_before_wait=early,
            layer=i,
        )
        self.ops.o_proj(out, layer=i)

    def moe(self, i: int, moe: MoeOperands, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Routed experts, the shared one beside them; the hop weighs, adds and sums."""
        with self.shared.beside():
            shared = self.shared_expert(i, x)
        routed = self.routed_experts(i, moe, x)
        self.shared.join()
        return self.ops.moe_hop(*routed, shared, residual, layer=i)

    def shared_expert(self, i: int, x: Tensor) -> Tensor:
        """[rows, hidden] -> this rank's part of the shared expert's output, [rows, hidden]."""
        gate_up = self.ops.shared_gate_up(x, layer=i)
        return self.ops.shared_down(self.ops.shared_act(gate_up), layer=i)

    def routed_experts(self, i: int, moe: MoeOperands, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(expert rows, weights, places) as the hop takes them. The routing kernel needs no
        quantised input, so that is made beside it and waited for right before FC1."""
        if not isinstance(moe.experts, Nvfp4Experts):
            return self._run_experts(i, x, x, None, None)
        with self.quantize.beside():
            codes, scales = self.ops.quantize(x, layer=i)
        if x.is_cuda and not self.ops.routed_experts.has_kernel():
            self.quantize.join()  # the reference does not wait for an event
        scales = scales.view(torch.float8_e4m3fn).view(x.shape[0], -1)
        routed = self._run_experts(i, x, codes, scales, self.quantize.recorded_event())
        self.quantize.join()
        return routed

    def _run_experts(
        self, i: int, x: Tensor, states: Tensor, scales: Tensor | None, ready: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.ops.routed_experts(
            router_hidden_states=x,
            hidden_states=states,
            hidden_states_scale=scales,
            hidden_states_ready_event=ready,
            layer=i,
        )

    # --- once per step ----------------------------------------------------------------------------

    def begin(self, md: Any) -> Step:
        """Bind what the step brings, and cut the request's index keys into the ranks' shards."""
        self.ops.bind_step(**self.step_args(md))
        topk_indices = self.topk_indices[: md.num_tokens]
        if not md.skip_indexer_for_gen_reqs:
            return Step(md, topk_indices, self._shard(md))
        topk_indices.copy_(dense_rows(md.position_ids, topk_indices.shape[1]))
        return Step(md, topk_indices, None)

    def step_args(self, md: Any) -> dict[str, Any]:
        return {
            "position_ids": md.position_ids,
            "block_table": md.block_table[:1],
            "kv_lens": md.kv_lens_cuda[:1],
            "block_size": md.kv_cache_manager.tokens_per_block,
            "stride_factor": md.key_rows_per_block,
            "index_block": md.index_block,
            "index_offset": md.index_offset,
        }

    def _shard(self, md: Any) -> Shard:
        table, block_size = md.generation_index_table()[0], md.kv_cache_manager.tokens_per_block
        pages = -(-table.shape[0] // self.geometry.tp_size)
        length, start = (torch.empty_like(md.kv_lens_cuda[:1]) for _ in range(2))
        shard_table = table.new_empty(1, pages)
        self.ops.shard_meta(
            torch.minimum(md.kv_lens_cuda[:1], md.kv_limits_cuda[:1]),
            block_table=table,
            block_size=block_size,
            rank=self.parts.mapping.tp_rank,
            world_size=self.geometry.tp_size,
            shard_len=length,
            shard_start=start,
            shard_table=shard_table,
        )
        self.ops.logits_schedule(kv_lens=length)
        positions = torch.minimum(md.position_ids - start, length - 1).clamp_(min=-1)
        scores = length.new_empty(md.num_tokens, pages * block_size, dtype=torch.float32)
        return Shard(length, start, shard_table, positions, scores)

    @staticmethod
    def _index_pool(i: int, step: Step) -> dict[str, Any]:
        manager = step.md.kv_cache_manager
        return {
            "index_pool": manager.pool(INDEX_KEY),
            "layer_slot": manager.layer_slot(INDEX_KEY, i),
        }
