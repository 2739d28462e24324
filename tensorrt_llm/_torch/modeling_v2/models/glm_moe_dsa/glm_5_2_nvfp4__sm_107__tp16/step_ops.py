"""The ops of the step, one instance for each call site, with all that stays bound to them.

What differs between layers is bound by layer; the MTP layer is the one after the decoder's last.
What a step brings (positions, tables, lengths) is bound by `bind_step`; the rest is passed at the
call, where a reader of decode.py sees it.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.attention.backends.sparse.dsa.cache_manager import DSACacheLayout
from tensorrt_llm._torch.custom_ops.paged_mqa_logits import paged_mqa_logits_processors
from tensorrt_llm._torch.modeling_v2.catalog._op import OpWrapper
from tensorrt_llm._torch.modeling_v2.catalog.fp4_quantize import Fp4Quantize
from tensorrt_llm._torch.modeling_v2.catalog.rms_norm import RmsNorm
from tensorrt_llm._torch.modeling_v2.catalog.silu_and_mul import SiluAndMul

from .geometry import Geometry
from .ops.attention.mla_kv_half_append import MlaKvHalfAppend
from .ops.attention.q_b_fp8_rope import QBFp8Rope
from .ops.attention.sparse_mla_flash_decode import SparseMlaFlashDecode
from .ops.comm.mnnvl_allgather import MnnvlAllgather
from .ops.comm.mnnvl_hop import MnnvlHop
from .ops.comm.mnnvl_moe_finalize_hop import MnnvlMoeFinalizeHop
from .ops.embedding.fused_embedding import FusedEmbedding
from .ops.gemm.dense_mlp_small_m import DenseMlpSmallM
from .ops.gemm.fused_a_gemm import FusedAGemm
from .ops.gemm.low_m_gemm import LowMGemm
from .ops.gemm.o_proj_publish import OProjPublish
from .ops.indexer.fp8_paged_mqa_logits import Fp8PagedMqaLogits
from .ops.indexer.hist_shard_meta import HistShardMeta
from .ops.indexer.hist_topk import HistTopK
from .ops.indexer.indexer_k_tail import IndexerKTail
from .ops.indexer.indexer_q_tail import IndexerQTail
from .ops.indexer.paged_mqa_logits_schedule import PagedMqaLogitsSchedule
from .ops.moe.routed_experts import RoutedExperts, fused_router_workspace
from .weights import (
    AttentionOperands,
    DenseOperands,
    IndexerOperands,
    LayerOperands,
    ModelOperands,
    MoeOperands,
    Nvfp4Experts,
)
from .workspaces import Workspaces


@dataclass(frozen=True)
class StepOps:
    """In the order in which a step first needs them."""

    embedding: FusedEmbedding = field(default_factory=FusedEmbedding)
    first_norm: RmsNorm = field(default_factory=RmsNorm)
    shard_meta: HistShardMeta = field(default_factory=HistShardMeta)
    logits_schedule: PagedMqaLogitsSchedule = field(default_factory=PagedMqaLogitsSchedule)
    fused_a: FusedAGemm = field(default_factory=FusedAGemm)
    k_tail: IndexerKTail = field(default_factory=IndexerKTail)
    kv_half: MlaKvHalfAppend = field(default_factory=MlaKvHalfAppend)
    q_b: QBFp8Rope = field(default_factory=QBFp8Rope)
    q_tail: IndexerQTail = field(default_factory=IndexerQTail)
    key_scores: Fp8PagedMqaLogits = field(default_factory=Fp8PagedMqaLogits)
    topk: HistTopK = field(default_factory=HistTopK)
    flash_decode: SparseMlaFlashDecode = field(default_factory=SparseMlaFlashDecode)
    o_proj: OProjPublish = field(default_factory=OProjPublish)
    attention_hop: MnnvlHop = field(default_factory=MnnvlHop)
    dense_mlp: DenseMlpSmallM = field(default_factory=DenseMlpSmallM)
    mlp_hop: MnnvlHop = field(default_factory=MnnvlHop)
    shared_gate_up: LowMGemm = field(default_factory=LowMGemm)
    shared_act: SiluAndMul = field(default_factory=SiluAndMul)
    shared_down: LowMGemm = field(default_factory=LowMGemm)
    quantize: Fp4Quantize = field(default_factory=Fp4Quantize)
    routed_experts: RoutedExperts = field(default_factory=RoutedExperts)
    moe_hop: MnnvlMoeFinalizeHop = field(default_factory=MnnvlMoeFinalizeHop)
    lm_head: LowMGemm = field(default_factory=LowMGemm)
    logits_gather: MnnvlAllgather = field(default_factory=MnnvlAllgather)

    @classmethod
    def bound(
        cls,
        operands: ModelOperands,
        geometry: Geometry,
        layout: DSACacheLayout,
        workspaces: Workspaces,
        topk_indices: Tensor,
    ) -> "StepOps":
        """With the weights of all layers and the buffers that all steps use.

        Args:
            topk_indices: the selection's buffer, which fused-A of a shared layer prefetches.
        """
        ops = cls()
        ops._bind_model(operands, geometry, layout, workspaces)
        layers = list(operands.layers)
        after = [layer.input_norm_weight for layer in layers[1:]] + [operands.final_norm_weight]
        if operands.draft is not None:
            layers.append(operands.draft.layer)
            after.append(operands.draft.head_norm_weight)
        for i, (layer, next_gamma) in enumerate(zip(layers, after, strict=True)):
            ops._bind_layer(i, layer, next_gamma, topk_indices)
        return ops

    def bind_step(self, **values: Any) -> None:
        """Each op takes the values that it has an argument for."""
        bind_known((getattr(self, member.name) for member in fields(self)), values)

    def _bind_model(
        self,
        operands: ModelOperands,
        geometry: Geometry,
        layout: DSACacheLayout,
        workspaces: Workspaces,
    ) -> None:
        device = operands.embed_table.device
        processors = paged_mqa_logits_processors(device)
        dtype, key_dtype = operands.embed_table.dtype, layout.key_dtype
        scales = {
            "bmm1_scale": torch.zeros(2, device=device),
            "bmm2_scale": torch.zeros(1, device=device),
        }
        rotations = {"cos_sin": operands.cos_sin}
        schedule = {
            "scheduler_metadata": torch.zeros(processors + 1, 2, dtype=torch.int32, device=device),
            "row_order": torch.zeros(1, dtype=torch.int32, device=device),
        }
        self.embedding.bind_const(weight=operands.embed_table)
        self.first_norm.bind_const(
            weight=operands.layers[0].input_norm_weight, eps=operands.layers[0].eps
        )
        self.logits_schedule.bind_const(**schedule)
        self.k_tail.bind_const(**rotations, key_dtype=key_dtype, early_launch=False)
        self.q_tail.bind_const(**rotations, key_dtype=key_dtype)
        self.q_b.bind_const(**rotations, dtype=key_dtype)
        self.kv_half.bind_const(
            **rotations, **scales, layer_id=0, softmax_scale=geometry.softmax_scale
        )
        self.key_scores.bind_const(**schedule, key_dtype=key_dtype, early_keys=True)
        self.topk.bind_const(workspace=workspaces.topk)
        self.flash_decode.bind_const(**scales, layer_id=0)
        self.o_proj.bind_const(workspace=workspaces.hops)
        for hop in (self.attention_hop, self.mlp_hop, self.moe_hop):
            hop.bind_const(workspace=workspaces.hops, eps=operands.eps)
        self.quantize.bind_const(sf_vec_size=16, sf_use_ue8m0=False, is_sf_swizzled_layout=False)
        self.routed_experts.bind_const(
            routing_logits=None,  # the routing kernel forms them
            router_workspace=fused_router_workspace(
                device, geometry.max_rows, geometry.n_routed_experts
            ),
            output_dtype=dtype,
        )
        self.lm_head.bind_const(weight=operands.lm_head)
        self.logits_gather.bind_const(workspace=workspaces.logits)

    def _bind_layer(
        self, i: int, layer: LayerOperands, next_gamma: Tensor, topk_indices: Tensor
    ) -> None:
        """
        Args:
            next_gamma: of the norm after this layer.
        """
        self._bind_attention(i, layer.attention, topk_indices)
        self.attention_hop.bind_layered(i, gamma=layer.post_attention_norm_weight)
        self.mlp_hop.bind_layered(i, gamma=next_gamma)
        self.moe_hop.bind_layered(i, gamma=next_gamma)
        if isinstance(layer.mlp, DenseOperands):
            self.dense_mlp.bind_layered(
                i, gate_up_weight=layer.mlp.gate_up, down_weight=layer.mlp.down
            )
        else:
            self._bind_moe(i, layer.mlp)

    def _bind_attention(self, i: int, attention: AttentionOperands, topk_indices: Tensor) -> None:
        selection = [] if attention.indexer else [topk_indices]
        self.fused_a.bind_layered(
            i, weight=attention.fused_a, l2_prefetch=[*attention.l2_prefetch, *selection]
        )
        self.kv_half.bind_layered(i, norm_weight=attention.kv_a_norm_weight, eps=attention.kv_a_eps)
        self.q_b.bind_layered(i, weight=attention.q_b, eps=attention.q_a_eps)
        self.flash_decode.bind_layered(i, v_b=attention.v_b)
        self.o_proj.bind_layered(i, weight=attention.o_proj)
        if attention.indexer is not None:
            self._bind_indexer(i, attention.indexer, attention.q_a_eps)

    def _bind_indexer(self, i: int, indexer: IndexerOperands, q_a_eps: float) -> None:
        self.k_tail.bind_layered(
            i,
            norm_weight=indexer.k_norm_weight,
            norm_bias=indexer.k_norm_bias,
            eps=indexer.k_norm_eps,
        )
        self.q_tail.bind_layered(
            i, weight=indexer.wq_b, eps=q_a_eps, weight_scale=indexer.weight_scale
        )

    def _bind_moe(self, i: int, moe: MoeOperands) -> None:
        self.shared_gate_up.bind_layered(i, weight=moe.shared.gate_up)
        self.shared_down.bind_layered(i, weight=moe.shared.down)
        self.routed_experts.bind_layered(
            i,
            routing_bias=moe.routing_bias,
            router_weight=moe.router_weight,
            top_k=moe.top_k,
            routed_scaling_factor=moe.routed_scaling_factor,
            **_experts(moe),
        )
        if isinstance(moe.experts, Nvfp4Experts):
            self.quantize.bind_layered(i, global_scale=moe.experts.input_global_scale)


def bind_known(ops: Any, values: dict[str, Any]) -> None:
    """Bind to each op those of the values that it has an argument for."""
    op: OpWrapper
    for op in ops:
        known = op.arguments()
        op.bind_const(**{name: value for name, value in values.items() if name in known})


def _experts(moe: MoeOperands) -> dict[str, Any]:
    """The operands of both expert GEMMs, by argument of glm_routed_experts."""
    experts = moe.experts
    if isinstance(experts, Nvfp4Experts):
        return {
            "gemm1_weights": experts.up_gate,
            "gemm1_weights_scale": experts.up_gate_scale,
            "gemm2_weights": experts.down,
            "gemm2_weights_scale": experts.down_scale,
            "output1_scale_scalar": experts.output1_scale,
            "output1_scale_gate_scalar": experts.output1_gate_scale,
            "output2_scale_scalar": experts.output2_scale,
        }
    scales = (
        "gemm1_weights_scale",
        "gemm2_weights_scale",
        "output1_scale_scalar",
        "output1_scale_gate_scalar",
        "output2_scale_scalar",
    )
    return {
        "gemm1_weights": experts.up_gate,
        "gemm2_weights": experts.down,
        **dict.fromkeys(scales),
    }
