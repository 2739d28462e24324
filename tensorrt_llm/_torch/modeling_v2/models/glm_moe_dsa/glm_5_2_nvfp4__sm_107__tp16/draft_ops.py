"""The ops of the draft loop that the decode step does not have, and what stays bound to them."""

from dataclasses import dataclass, field

from .ops.comm.mnnvl_hop import MnnvlHop
from .ops.gemm.draft_hidden_half import DraftHiddenHalf
from .ops.gemm.low_m_gemm import LowMGemm
from .ops.gemm.router_gemm import RouterGemm
from .ops.indexer.convert_req_index_to_global import ConvertReqIndexToGlobal
from .ops.indexer.stash_last_accepted_rows import StashLastAcceptedRows
from .ops.moe.lowm_bf16_moe import LowmBf16Moe
from .ops.spec.draft_ehproj_table import DraftEhprojTable
from .ops.spec.draft_glue_rmsnorm_cat import DraftGlueRmsnormCat
from .ops.spec.draft_sample_glue import DraftSampleGlue
from .ops.spec.gather_last_accepted_rows import GatherLastAcceptedRows
from .ops.spec.verify_head_accept import VerifyHeadAccept
from .weights import DraftOperands, ModelOperands, MoeOperands, PlainExperts
from .workspaces import Workspaces


@dataclass(frozen=True)
class DraftOps:
    """In the order in which the loop first needs them."""

    accept: VerifyHeadAccept = field(default_factory=VerifyHeadAccept)
    eh_proj_input: DraftGlueRmsnormCat = field(default_factory=DraftGlueRmsnormCat)
    eh_proj: LowMGemm = field(default_factory=LowMGemm)
    eh_proj_hop: MnnvlHop = field(default_factory=MnnvlHop)
    stash: StashLastAcceptedRows = field(default_factory=StashLastAcceptedRows)
    to_pool_rows: ConvertReqIndexToGlobal = field(default_factory=ConvertReqIndexToGlobal)
    last_accepted: GatherLastAcceptedRows = field(default_factory=GatherLastAcceptedRows)
    router: RouterGemm = field(default_factory=RouterGemm)
    experts: LowmBf16Moe = field(default_factory=LowmBf16Moe)
    hidden_half: DraftHiddenHalf = field(default_factory=DraftHiddenHalf)
    next_input: DraftEhprojTable = field(default_factory=DraftEhprojTable)
    q_a: LowMGemm = field(default_factory=LowMGemm)
    last_token: DraftSampleGlue = field(default_factory=DraftSampleGlue)

    @classmethod
    def bound(cls, operands: ModelOperands, workspaces: Workspaces) -> "DraftOps":
        """Raises ValueError for a model without an MTP layer."""
        if operands.draft is None:
            raise ValueError("the model was built without its MTP layer, so nothing can draft")
        ops = cls()
        ops._bind_inputs(operands, operands.draft, workspaces)
        ops._bind_experts(operands.draft.layer.mlp)
        attention = operands.draft.layer.attention
        ops.q_a.bind_const(weight=attention.fused_a[: attention.q_b.shape[2]])
        return ops

    def _bind_inputs(
        self, operands: ModelOperands, draft: DraftOperands, workspaces: Workspaces
    ) -> None:
        gamma = draft.layer.input_norm_weight
        norms = {
            "embed_table": operands.embed_table,
            "enorm_weight": draft.enorm_weight,
            "hnorm_weight": draft.hnorm_weight,
            "eps": draft.eps,
        }
        first, last = draft.eh_proj_window
        self.eh_proj_input.bind_const(**norms, col_lo=first, col_hi=last)
        self.eh_proj.bind_const(weight=draft.eh_proj)
        self.eh_proj_hop.bind_const(gamma=gamma, eps=draft.layer.eps, workspace=workspaces.hops)
        self.hidden_half.bind_const(
            hnorm_weight=draft.hnorm_weight, weight=draft.hidden_half, eps=draft.eps
        )
        self.next_input.bind_const(
            token_table=draft.token_table,
            gamma=gamma,
            eps=draft.layer.eps,
            workspace=workspaces.ehproj_table,
        )
        self.last_token.bind_const(workspace=workspaces.sample_glue)

    def _bind_experts(self, moe: object) -> None:
        assert isinstance(moe, MoeOperands) and isinstance(moe.experts, PlainExperts)
        self.router.bind_const(weight=moe.router_weight)
        self.experts.bind_const(
            routing_bias=moe.routing_bias,
            fc1_weight=moe.experts.up_gate,
            fc2_weight=moe.experts.down,
            top_k=moe.top_k,
            routed_scaling_factor=moe.routed_scaling_factor,
        )
