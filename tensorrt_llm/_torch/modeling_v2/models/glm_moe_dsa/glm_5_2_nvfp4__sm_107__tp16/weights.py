"""The operands of the target's ops, derived once from the built-in modules after loading.

What an op takes as a module holds it is the module's own storage: the built-in modules stay the
fallback, so none of their parameters can be given up. Only what differs is stored anew, and
`derived_bytes` says how much that is. Everything runs without gradients, so intermediates are gone
as soon as a tensor is made, one layer at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tensorrt_llm._torch.attention.backends.sparse.dsa.indexer import Indexer
from tensorrt_llm._torch.custom_ops.fp4 import NVFP4_GROUP
from tensorrt_llm._torch.models.checkpoints.quantization import nvfp4_part_problem
from tensorrt_llm._torch.models.checkpoints.reader import CheckpointReader, Range
from tensorrt_llm._torch.models.modeling_deepseekv3 import (
    DeepseekV3DecoderLayer,
    Deepseekv3MoE,
    DeepseekV3MTP,
    GlmMoeDsaForCausalLM,
)
from tensorrt_llm._torch.modules.fused_moe import FusedMoE
from tensorrt_llm._torch.modules.gated_mlp import GatedMLP
from tensorrt_llm._torch.modules.mla import MLA
from tensorrt_llm.mapping import Mapping

from .ops.spec._draft_token_table import draft_hidden_half_weight, draft_token_table


@dataclass(frozen=True)
class IndexerOperands:
    """Of a full-indexer layer.

    Attributes:
        wq_b: activation dtype [heads, dim, q_lora_rank], wq_b diag(q_a norm weight); stored anew.
        k_norm_weight, k_norm_bias, k_norm_eps: of the LayerNorm of index keys.
        weight_scale: dim^-0.5 * heads^-0.5.
    """

    wq_b: Tensor
    k_norm_weight: Tensor
    k_norm_bias: Tensor
    k_norm_eps: float
    weight_scale: float


@dataclass(frozen=True)
class AttentionOperands:
    """Of one layer's attention; shapes are this rank's.

    Attributes:
        fused_a: [q_lora_rank + latent + rope (+ index dim + index heads), hidden], the rows that
            the built-in projections and the indexer's wk and weights_proj view.
        q_b: [heads, latent + rope, q_lora_rank], see `absorbed_q_b`; stored anew.
        q_a_eps: of the norm that is folded into q_b and the indexer's wq_b.
        kv_a_norm_weight, kv_a_eps: of the latent's norm.
        v_b: [heads, v_head_dim, latent], the value rows of kv_b_proj, whose heads lie apart.
        o_proj: [hidden, heads * v_head_dim].
        indexer: None on layers that reuse an earlier selection.
    """

    fused_a: Tensor
    q_b: Tensor
    q_a_eps: float
    kv_a_norm_weight: Tensor
    kv_a_eps: float
    v_b: Tensor
    o_proj: Tensor
    indexer: IndexerOperands | None

    @property
    def l2_prefetch(self) -> list[Tensor]:
        """Weights that follow fused-A, in the order in which they are read; all contiguous."""
        of_indexer = [] if self.indexer is None else [self.indexer.wq_b]
        return [*of_indexer, self.q_b, self.o_proj]


@dataclass(frozen=True)
class DenseOperands:
    """SwiGLU weights: gate_up [2 * local, hidden], gate rows first; down [hidden, local]."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class PlainExperts:
    """Routed experts as the built-in module holds them, in numbers.

    Attributes:
        up_gate: [experts, 2 * local, hidden], of each expert its up rows, then its gate rows;
            stored anew.
        down: [experts, hidden, local].
    """

    up_gate: Tensor
    down: Tensor


@dataclass(frozen=True)
class Nvfp4Experts:
    """NVFP4 operands of glm_routed_experts, with I columns of every expert on this rank.

    Attributes:
        up_gate, up_gate_scale: uint8 [experts, 2 * I, hidden / 2], e4m3 [experts, 2 * I,
            hidden / 16], up rows first.
        down, down_scale: uint8 [experts, hidden, I / 2], e4m3 [experts, hidden, I / 16].
        input_global_scale: fp32 [1], of fp4_quantize for the layer's input.
        output1_scale, output1_gate_scale, output2_scale: fp32 [experts].
    """

    up_gate: Tensor
    up_gate_scale: Tensor
    down: Tensor
    down_scale: Tensor
    input_global_scale: Tensor
    output1_scale: Tensor
    output1_gate_scale: Tensor
    output2_scale: Tensor


@dataclass(frozen=True)
class MoeOperands:
    """Of one MoE layer.

    Attributes:
        router_weight: activation dtype [experts, hidden]; the module's is fp32, so for bf16 it is
            stored anew, and equal to it for a checkpoint that stores bf16.
        routing_bias: fp32 [experts].
        experts: as the checkpoint stores them, if that is NVFP4.
        top_k, routed_scaling_factor: of the routing.
        shared: the shared expert.
    """

    router_weight: Tensor
    routing_bias: Tensor
    experts: PlainExperts | Nvfp4Experts
    top_k: int
    routed_scaling_factor: float
    shared: DenseOperands


@dataclass(frozen=True)
class LayerOperands:
    """Of one decoder layer; both norms have `eps`."""

    input_norm_weight: Tensor
    post_attention_norm_weight: Tensor
    eps: float
    attention: AttentionOperands
    mlp: DenseOperands | MoeOperands


@dataclass(frozen=True)
class DraftOperands:
    """Of the MTP layer and the draft loop around it.

    Attributes:
        layer: its decoder layer.
        enorm_weight, hnorm_weight, head_norm_weight: [hidden]; the last is shared_head.norm's.
        eps: of the three.
        eh_proj_window: (first, last) of this rank's columns of eh_proj's 2 * hidden inputs.
        eh_proj: [hidden, 2 * hidden / ranks], those columns; stored anew with more than one rank.
        token_table: [vocabulary / ranks, hidden], eh_proj's embedding half for the tokens of this
            rank's LM head shard; stored anew.
        hidden_half: [hidden / ranks, hidden], this rank's outputs of the hidden half; stored anew.
    """

    layer: LayerOperands
    enorm_weight: Tensor
    hnorm_weight: Tensor
    head_norm_weight: Tensor
    eps: float
    eh_proj_window: tuple[int, int]
    eh_proj: Tensor
    token_table: Tensor
    hidden_half: Tensor


@dataclass(frozen=True)
class ModelOperands:
    """Of the whole step.

    Attributes:
        embed_table: [vocabulary, hidden], whole.
        layers: of the decoder.
        final_norm_weight, eps: of the final norm.
        lm_head: [vocabulary / ranks, hidden].
        cos_sin: fp32 [positions, rope / 2, 2], a view of the rotations' table.
        draft: None without speculative decoding.
    """

    embed_table: Tensor
    layers: tuple[LayerOperands, ...]
    final_norm_weight: Tensor
    eps: float
    lm_head: Tensor
    cos_sin: Tensor
    draft: DraftOperands | None


@torch.no_grad()
def derive_operands(
    model: GlmMoeDsaForCausalLM, reader: CheckpointReader | None = None
) -> ModelOperands:
    """All operands of a loaded model, for this rank.

    Args:
        reader: the checkpoint, for experts that it stores in NVFP4; None takes all experts as the
            modules hold them.

    Raises:
        ValueError: a model that the ops do not compute, as the derivation of the part says.
    """
    core, draft = model.model, model.draft_model
    return ModelOperands(
        embed_table=core.embed_tokens.weight.detach(),
        layers=tuple(
            layer_operands(cast(DeepseekV3DecoderLayer, layer), reader, f"model.layers.{i}")
            for i, layer in enumerate(core.layers)
        ),
        final_norm_weight=core.norm.weight.detach(),
        eps=core.norm.eps,
        lm_head=model.lm_head.weight.detach(),
        cos_sin=torch.view_as_real(core.rotary.table),
        draft=None if draft is None else draft_operands(draft.layer, model),
    )


@torch.no_grad()
def layer_operands(
    layer: DeepseekV3DecoderLayer, reader: CheckpointReader | None = None, name: str = ""
) -> LayerOperands:
    """
    Args:
        reader, name: the checkpoint and the layer's name in it, see `moe_operands`.
    """
    mlp = layer.mlp
    return LayerOperands(
        input_norm_weight=layer.input_layernorm.weight.detach(),
        post_attention_norm_weight=layer.post_attention_layernorm.weight.detach(),
        eps=layer.input_layernorm.eps,
        attention=attention_operands(layer.self_attn),
        mlp=(
            dense_operands(mlp)
            if isinstance(mlp, GatedMLP)
            else moe_operands(mlp, reader, f"{name}.mlp.experts")
        ),
    )


@torch.no_grad()
def attention_operands(mla: MLA) -> AttentionOperands:
    indexer = mla.indexer
    assert indexer is None or isinstance(indexer, Indexer)
    return AttentionOperands(
        fused_a=mla.fused_a.detach(),
        q_b=absorbed_q_b(mla),
        q_a_eps=mla.q_a_layernorm.eps,
        kv_a_norm_weight=mla.kv_a_layernorm.weight.detach(),
        kv_a_eps=mla.kv_a_layernorm.eps,
        v_b=mla.w_uv.transpose(1, 2),
        o_proj=mla.o_proj.weight.detach(),
        indexer=None if indexer is None else _indexer_operands(indexer, mla.q_a_layernorm.weight),
    )


@torch.no_grad()
def absorbed_q_b(mla: MLA) -> Tensor:
    """q_b_proj with the key half of kv_b_proj absorbed and the norm of its input folded in.

    With g the weight of q_a_layernorm, for each head h of this rank:
        out[h] = [W_UK,h^T W_qb_nope,h diag(g); W_qb_rope,h diag(g)]
    in fp64, rounded once. What is left of the norm is 1 / sqrt(mean(q_a^2) + eps), per row.

    Returns:
        [heads, latent + rope, q_lora_rank], contiguous, in the modules' dtype.
    """
    weight = mla.q_b_proj.weight
    by_head = weight.view(mla.num_heads, mla.nope + mla.rope, mla.q_lora_rank)
    nope, rope = by_head.split([mla.nope, mla.rope], dim=1)
    latent = torch.bmm(mla.w_uk.double().transpose(1, 2), nope.double())
    absorbed = torch.cat([latent, rope.double()], dim=1)
    return (absorbed * mla.q_a_layernorm.weight.double()).to(weight.dtype)


def dense_operands(mlp: GatedMLP) -> DenseOperands:
    return DenseOperands(mlp.gate_up_proj.detach(), mlp.down_proj.detach())


@torch.no_grad()
def moe_operands(
    moe: Deepseekv3MoE, reader: CheckpointReader | None = None, name: str = ""
) -> MoeOperands:
    """
    Args:
        reader: the checkpoint; where it stores the experts `name` in NVFP4, they are taken so.

    Raises:
        ValueError: routing weights that are not normalised, which the ops always do.
    """
    gate, experts = moe.gate, moe.experts
    if not gate.normalise:
        raise ValueError("norm_topk_prob is False; the target's routing normalises the weights")
    return MoeOperands(
        router_weight=gate.weight.detach().to(experts.down.dtype),
        routing_bias=gate.e_score_correction_bias.detach(),
        experts=_experts(experts, reader, name),
        top_k=gate.top_k,
        routed_scaling_factor=gate.scale,
        shared=dense_operands(moe.shared_experts),
    )


def _experts(
    experts: FusedMoE, reader: CheckpointReader | None, name: str
) -> PlainExperts | Nvfp4Experts:
    if reader is not None and f"{name}.0.up_proj.weight_scale_2" in reader.tensors:
        return read_nvfp4_experts(reader, name, experts, experts.down.device)
    return PlainExperts(up_then_gate(experts), experts.down.detach())


@torch.no_grad()
def up_then_gate(experts: FusedMoE) -> Tensor:
    """[experts, 2 * local, hidden], the module's rows with each expert's halves exchanged."""
    gate, up = experts.gate_up.chunk(2, dim=1)
    return torch.cat([up, gate], dim=1)


def read_nvfp4_experts(
    reader: CheckpointReader, name: str, experts: FusedMoE, device: torch.device
) -> Nvfp4Experts:
    """The codes of the routed experts as the checkpoint stores them, which the built-in module
    holds as numbers only.

    All experts and ranks share one input scale, the largest of gate and up, as TensorRT-LLM has it.

    Args:
        name: of the experts in the checkpoint, such as "model.layers.3.mlp.experts".
        experts: the built-in module, for its sizes and this rank's part.

    Raises:
        ValueError: a part that cuts a group of 16, or a tensor that is not stored in NVFP4.
    """
    count, hidden, _ = experts.down.shape
    rows = experts.part
    problem = nvfp4_part_problem((hidden, experts.intermediate_size), rows)
    if problem:
        raise ValueError(f"{name}: {problem}")
    packed_cols, scale_cols = ((rows[0] // n, rows[1] // n) for n in (2, NVFP4_GROUP))

    def stacked(suffix: str, part: Range = None, cols: Range = None) -> Tensor:
        found = [_stored(reader, f"{name}.{e}.{suffix}", part, cols) for e in range(count)]
        return torch.stack([t.to(device) for t in found])

    def up_then_gate_rows(suffix: str) -> Tensor:
        return torch.cat([stacked(f"{p}_proj.{suffix}", rows) for p in ("up", "gate")], dim=1)

    def scalars(projection: str, which: str) -> Tensor:
        return stacked(f"{projection}_proj.{which}")

    input_scale = torch.maximum(scalars("gate", "input_scale"), scalars("up", "input_scale")).max()
    inner_scale = scalars("down", "input_scale")
    return Nvfp4Experts(
        up_gate=up_then_gate_rows("weight"),
        up_gate_scale=up_then_gate_rows("weight_scale"),
        down=stacked("down_proj.weight", None, packed_cols),
        down_scale=stacked("down_proj.weight_scale", None, scale_cols),
        input_global_scale=(1 / input_scale).view(1),
        output1_scale=input_scale * scalars("up", "weight_scale_2") / inner_scale,
        output1_gate_scale=input_scale * scalars("gate", "weight_scale_2"),
        output2_scale=inner_scale * scalars("down", "weight_scale_2"),
    )


def _stored(reader: CheckpointReader, name: str, rows: Range, cols: Range) -> Tensor:
    if name not in reader.tensors:
        raise ValueError(f"the checkpoint has no {name}; these experts are not stored in NVFP4")
    return reader.read(name, rows, cols)


@torch.no_grad()
def draft_operands(mtp: DeepseekV3MTP, model: GlmMoeDsaForCausalLM) -> DraftOperands:
    """Of the MTP layer `mtp`, with the embedding and the LM head that it shares with `model`.

    Raises:
        ValueError: ranks that do not divide the hidden size.
    """
    mapping, weight = model.config.mapping, mtp.eh_proj.weight.detach()
    window = eh_proj_window(weight.shape[1], mapping)
    return DraftOperands(
        layer=layer_operands(mtp.block),
        enorm_weight=mtp.enorm.weight.detach(),
        hnorm_weight=mtp.hnorm.weight.detach(),
        head_norm_weight=mtp.shared_head_norm.weight.detach(),
        eps=mtp.enorm.eps,
        eh_proj_window=window,
        eh_proj=weight[:, window[0] : window[1]].contiguous(),
        token_table=draft_token_table(
            model.model.embed_tokens.weight.detach(),
            mtp.enorm.weight.detach(),
            weight,
            mtp.enorm.eps,
            range(*model.lm_head.rows),
        ),
        hidden_half=draft_hidden_half_weight(weight, mapping.tp_rank, mapping.tp_size),
    )


def eh_proj_window(columns: int, mapping: Mapping) -> tuple[int, int]:
    """This rank's equal part of eh_proj's input columns, [first, last).

    Raises:
        ValueError: ranks that do not divide them.
    """
    if columns % mapping.tp_size:
        raise ValueError(
            f"eh_proj has {columns} inputs, which tp_size {mapping.tp_size} does not divide"
        )
    part = columns // mapping.tp_size
    return mapping.tp_rank * part, (mapping.tp_rank + 1) * part


def derived_bytes(operands: ModelOperands, model: nn.Module) -> int:
    """Bytes of the storage that the operands hold beyond the model's own."""
    own = {_storage(t)[0] for t in (*model.parameters(), *model.buffers())}
    own.add(_storage(operands.cos_sin)[0])
    held = dict(_storage(t) for t in tensors(operands))
    return sum(nbytes for address, nbytes in held.items() if address not in own)


def tensors(operands: Any) -> Iterator[Tensor]:
    """Every tensor of a dataclass of operands, in the order of its fields."""
    if isinstance(operands, Tensor):
        yield operands
    elif isinstance(operands, tuple):
        for part in operands:
            yield from tensors(part)
    elif is_dataclass(operands):
        for field in fields(operands):
            yield from tensors(getattr(operands, field.name))


def _indexer_operands(indexer: Indexer, q_a_norm_weight: Tensor) -> IndexerOperands:
    heads, dim = indexer.params.index_n_heads, indexer.params.index_head_dim
    weight = indexer.wq_b.weight
    folded = (weight.double() * q_a_norm_weight.double()).to(weight.dtype)
    return IndexerOperands(
        wq_b=folded.view(heads, dim, -1),
        k_norm_weight=indexer.k_norm.weight.detach(),
        k_norm_bias=indexer.k_norm.bias.detach(),
        k_norm_eps=indexer.k_norm.eps,
        weight_scale=indexer.weight_scale,
    )


def _storage(t: Tensor) -> tuple[int, int]:
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
