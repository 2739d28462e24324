"""The built-in GLM-MoE-DSA model: MLA with sparse attention, dense and mixture-of-experts
layers."""

from collections.abc import Iterator
from typing import ClassVar, cast

import torch
from torch import nn

from tensorrt_llm._torch.attention.backends.sparse.dsa.backend import DSATrtllmAttention
from tensorrt_llm._torch.attention.backends.sparse.dsa.indexer import Indexer
from tensorrt_llm._torch.attention.backends.sparse.dsa.metadata import DSAtrtllmAttentionMetadata
from tensorrt_llm._torch.distributed import AllReduce
from tensorrt_llm._torch.models.checkpoints.reader import CheckpointReader
from tensorrt_llm._torch.models.model_config import ARCHITECTURE, ModelConfig
from tensorrt_llm._torch.models.modeling_utils import register_auto_model
from tensorrt_llm._torch.modules.embedding import Embedding, LMHead
from tensorrt_llm._torch.modules.fused_moe import DeepseekV3Gate, FusedMoE
from tensorrt_llm._torch.modules.gated_mlp import GatedMLP
from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.modules.logits_processor import LogitsProcessor
from tensorrt_llm._torch.modules.mla import MLA
from tensorrt_llm._torch.modules.rms_norm import RMSNorm
from tensorrt_llm._torch.modules.rotary_embedding import RotaryEmbedding
from tensorrt_llm._torch.modules.weight_spec import WeightSpec
from tensorrt_llm._torch.speculative.interface import SpecWorkerBase
from tensorrt_llm._torch.speculative.mtp import MTPEagleWorker


class Deepseekv3MoE(nn.Module):
    """Routed experts plus the unweighted shared expert; one reduction over the ranks for both."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        model, mapping = config.pretrained_config, config.mapping
        self.gate = DeepseekV3Gate(
            model.hidden_size,
            model.n_routed_experts,
            model.num_experts_per_tok,
            model.routed_scaling_factor,
            model.norm_topk_prob,
            config.device,
        )
        self.experts = FusedMoE(
            model.n_routed_experts,
            model.hidden_size,
            model.moe_intermediate_size,
            mapping,
            config.dtype,
            config.device,
        )
        self.shared_experts = GatedMLP(
            model.hidden_size,
            model.moe_intermediate_size * model.n_shared_experts,
            mapping=mapping,
            reduce_output=False,
            dtype=config.dtype,
            device=config.device,
        )
        self.reduce = AllReduce(mapping)

    def weight_specs(self, name: str) -> Iterator[WeightSpec]:
        yield from self.gate.weight_specs(f"{name}.gate")
        yield from self.experts.weight_specs(f"{name}.experts")
        yield from self.shared_experts.weight_specs(f"{name}.shared_experts")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        weights, ids = self.gate(x)
        return self.reduce(self.experts(x, weights, ids) + self.shared_experts(x))


class DeepseekV3DecoderLayer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)), with each addition done together with the next
    norm."""

    def __init__(
        self, config: ModelConfig, layer_idx: int, *, dense: bool, full_indexer: bool
    ) -> None:
        super().__init__()
        model = config.pretrained_config
        norm = (model.hidden_size, model.rms_norm_eps, config.dtype, config.device)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(*norm), RMSNorm(*norm)
        self.self_attn = _attention(config, layer_idx, full_indexer)
        self.mlp: GatedMLP | Deepseekv3MoE
        if dense:
            self.mlp = GatedMLP(
                model.hidden_size,
                model.intermediate_size,
                mapping=config.mapping,
                dtype=config.dtype,
                device=config.device,
            )
        else:
            self.mlp = Deepseekv3MoE(config)

    def weight_specs(self, name: str) -> Iterator[WeightSpec]:
        for module in ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp"):
            yield from getattr(self, module).weight_specs(f"{name}.{module}")

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        rotations: torch.Tensor,
        attn_metadata: DSAtrtllmAttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output of the previous block, residual before it) -> the same after this layer,
        [tokens, hidden] each."""
        hidden_states, residual = _norm(self.input_layernorm, hidden_states, residual)
        hidden_states = self.self_attn(hidden_states, rotations, attn_metadata)
        hidden_states, residual = self.post_attention_layernorm.add_norm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class DeepseekV3Model(nn.Module):
    """Embedding, decoder layers and final norm.

    Attributes:
        path: "fast" or "builtin", which way the last forward took; None where there is but one. A
            target with a fast step sets it.
    """

    path: str | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        model = config.pretrained_config
        self.embed_tokens = Embedding(
            model.vocab_size, model.hidden_size, config.dtype, config.device
        )
        self.rotary = RotaryEmbedding(
            model.qk_rope_head_dim, model.rope_theta, model.max_position_embeddings, config.device
        )
        self.layers = nn.ModuleList(
            DeepseekV3DecoderLayer(config, i, dense=dense, full_indexer=full)
            for i, (dense, full) in enumerate(
                zip(model.dense_layers, model.full_indexer_layers, strict=True)
            )
        )
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps, config.dtype, config.device)

    def weight_specs(self, name: str) -> Iterator[WeightSpec]:
        yield from self.embed_tokens.weight_specs(f"{name}.embed_tokens")
        for i, layer in enumerate(self.layers):
            yield from cast(DeepseekV3DecoderLayer, layer).weight_specs(f"{name}.layers.{i}")
        yield from self.norm.weight_specs(f"{name}.norm")

    def forward(
        self,
        attn_metadata: DSAtrtllmAttentionMetadata,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
    ) -> torch.Tensor:
        """input_ids, position_ids int64 [tokens] -> hidden states after the final norm [tokens,
        hidden]."""
        hidden_states, residual = self.embed_tokens(input_ids), None
        rotations = self.rotary.rotations(position_ids)
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual, rotations, attn_metadata)
        return _norm(self.norm, hidden_states, residual)[0]


class DeepseekV3MTP(nn.Module):
    """From the hidden state of a token and the token after it to a hidden state for the one beyond.

    z = eh_proj [enorm(embed(t_next)) | hnorm(h)], the embedding's half first; then an ordinary
    mixture-of-experts layer with an indexer of its own, then `shared_head.norm`. The result is
    both the LM head's input and what the next draft step starts from, so the norm is applied once.
    """

    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        model = config.pretrained_config
        norm = (model.hidden_size, model.rms_norm_eps, config.dtype, config.device)
        self.enorm, self.hnorm, self.shared_head_norm = (RMSNorm(*norm) for _ in range(3))
        self.eh_proj = Linear(
            2 * model.hidden_size,
            model.hidden_size,
            mapping=config.mapping,
            dtype=config.dtype,
            device=config.device,
        )
        self.block = DeepseekV3DecoderLayer(config, layer_idx, dense=False, full_indexer=True)

    def weight_specs(self, name: str) -> Iterator[WeightSpec]:
        yield from self.block.weight_specs(name)
        yield from self.eh_proj.weight_specs(f"{name}.eh_proj")
        yield from self.enorm.weight_specs(f"{name}.enorm")
        yield from self.hnorm.weight_specs(f"{name}.hnorm")
        yield from self.shared_head_norm.weight_specs(f"{name}.shared_head.norm")

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden_states: torch.Tensor,
        rotations: torch.Tensor,
        attn_metadata: DSAtrtllmAttentionMetadata,
    ) -> torch.Tensor:
        """All [tokens, hidden]: embeddings of the next tokens, hidden states after the model's
        final norm or an earlier draft step -> hidden states after `shared_head.norm`."""
        both = torch.cat([self.enorm(embeddings), self.hnorm(hidden_states)], dim=-1)
        out, residual = self.block(self.eh_proj(both), None, rotations, attn_metadata)
        return self.shared_head_norm.add_norm(out, residual)[0]


class MTPDraftModel(nn.Module):
    """The draft side of the one model: MTP layers that share embedding and LM head with the
    target."""

    def __init__(self, config: ModelConfig, model: DeepseekV3Model, lm_head: LMHead) -> None:
        super().__init__()
        self.first_layer = config.pretrained_config.num_hidden_layers
        self.mtp_layers = nn.ModuleList([DeepseekV3MTP(config, self.first_layer)])
        # Plain references: these modules belong to the target.
        self._shared = (model, lm_head)

    @property
    def embed_tokens(self) -> nn.Module:
        return self._shared[0].embed_tokens

    @property
    def lm_head(self) -> LMHead:
        return self._shared[1]

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield from self.layer.weight_specs(f"model.layers.{self.first_layer}")

    @property
    def layer(self) -> DeepseekV3MTP:
        """The layer that every draft step runs: with MTP-Eagle they share the first one."""
        layer = self.mtp_layers[0]
        assert isinstance(layer, DeepseekV3MTP)
        return layer

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attn_metadata: DSAtrtllmAttentionMetadata,
    ) -> torch.Tensor:
        """input_ids int64 [tokens], hidden_states [tokens, hidden] -> [tokens, hidden]."""
        rotations = self._shared[0].rotary.rotations(position_ids)
        return self.layer(self.embed_tokens(input_ids), hidden_states, rotations, attn_metadata)


@register_auto_model(ARCHITECTURE)
class GlmMoeDsaForCausalLM(nn.Module):
    """The engine-facing model. `forward` gives logits; `weight_specs` is the loading plan.

    Attributes:
        model_class: of the trunk.
    """

    model_class: ClassVar[type[DeepseekV3Model]] = DeepseekV3Model

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        model = config.pretrained_config
        self.config = config
        self.model = self.model_class(config)
        self.lm_head = LMHead(
            model.vocab_size, model.hidden_size, config.mapping, config.dtype, config.device
        )
        self.logits_processor = LogitsProcessor()
        self.draft_model = (
            MTPDraftModel(config, self.model, self.lm_head) if config.max_draft_len else None
        )

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield from self.model.weight_specs("model")
        yield from self.lm_head.weight_specs("lm_head")
        if self.draft_model is not None:
            yield from self.draft_model.weight_specs()

    @property
    def decode_path(self) -> str | None:
        """What the last run of `model` took, see `DeepseekV3Model.path`."""
        return self.model.path

    def post_load_weights(self, reader: CheckpointReader | None) -> None:
        """Called once when all parameters are filled; a target derives its operands here.

        Args:
            reader: the checkpoint, None where the parameters are random.
        """

    def create_spec_worker(self) -> SpecWorkerBase:
        """What verifies and drafts after this model, made once after `post_load_weights`;
        collective, see `SpecWorkerBase`."""
        config = self.config
        if self.draft_model is None:
            return SpecWorkerBase(0, config.mapping)
        share = config.pretrained_config.index_share_for_mtp_iteration
        return MTPEagleWorker(config.max_draft_len, config.mapping, share)

    def unused_weights(self) -> dict[str, str]:
        """Checkpoint tensors that are not loaded: name pattern -> reason."""
        model = self.config.pretrained_config
        first = model.num_hidden_layers + (self.draft_model is not None)
        extra = range(first, model.num_hidden_layers + model.num_nextn_predict_layers)
        return {f"model.layers.{i}.*": "MTP layer that nothing drafts with" for i in extra}

    @torch.inference_mode()
    def forward(
        self,
        attn_metadata: DSAtrtllmAttentionMetadata,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        gather_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """fp32 logits [rows, vocab_size].

        Args:
            input_ids, position_ids: int64 [tokens], contexts first.
            gather_ids: int64 [rows], the tokens that need logits; None takes all.
        """
        hidden_states = self.model(attn_metadata, input_ids, position_ids)
        return self.logits_processor(hidden_states, self.lm_head, gather_ids)


def _norm(
    norm: RMSNorm, hidden_states: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, new residual); the first layer has no residual yet."""
    if residual is None:
        return norm(hidden_states), hidden_states
    return norm.add_norm(hidden_states, residual)


def _attention(config: ModelConfig, layer_idx: int, full_indexer: bool) -> MLA:
    model, layout = config.pretrained_config, config.cache_layout
    scale = (model.qk_nope_head_dim + model.qk_rope_head_dim) ** -0.5
    indexer = None
    if full_indexer:
        indexer = Indexer(
            model.dsa_params,
            layer_idx,
            model.q_lora_rank,
            model.qk_rope_head_dim,
            layout,
            config.dtype,
            config.device,
        )
    return MLA(
        hidden_size=model.hidden_size,
        num_heads=model.num_attention_heads,
        q_lora_rank=model.q_lora_rank,
        kv_lora_rank=model.kv_lora_rank,
        qk_nope_head_dim=model.qk_nope_head_dim,
        qk_rope_head_dim=model.qk_rope_head_dim,
        v_head_dim=model.v_head_dim,
        latent_norm_eps=config.latent_eps,
        attention=DSATrtllmAttention(layer_idx, model.kv_lora_rank, scale),
        indexer=indexer,
        index_sizes=(model.index_head_dim, model.index_n_heads),
        mapping=config.mapping,
        dtype=config.dtype,
        device=config.device,
    )
