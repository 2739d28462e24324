"""Operands against the algebra they replace, and ops fed with them against the built-in modules."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.glm_oracle import BASE, hub_config, make_checkpoint
from helpers.numerics import Float64, gamma, nearest_bf16, round_to_bits, swiglu, to_numpy

from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16 import weights
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.gemm.dense_mlp_small_m import (  # noqa: E501
    dense_mlp_small_m,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.gemm.draft_hidden_half import (  # noqa: E501
    draft_hidden_half,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.gemm.fused_a_gemm import (  # noqa: E501
    fused_a_gemm,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.moe.lowm_bf16_moe import (  # noqa: E501
    lowm_bf16_moe,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.moe.routed_experts import (  # noqa: E501
    fused_router_workspace,
    routed_experts,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.ops.spec.draft_glue_rmsnorm_cat import (  # noqa: E501
    draft_glue_rmsnorm_cat,
)
from tensorrt_llm._torch.models.loading import load_model
from tensorrt_llm._torch.models.model_config import ModelConfig, PretrainedConfig
from tensorrt_llm._torch.models.modeling_deepseekv3 import (
    DeepseekV3DecoderLayer,
    Deepseekv3MoE,
    GlmMoeDsaForCausalLM,
)
from tensorrt_llm.mapping import Mapping

CPU = torch.device("cpu")
FULL, SHARED, DENSE, MOE = 0, 3, 0, 4  # layers of the variant: indexer or not, dense or not
HIDDEN, RANK, NOPE, LATENT = (
    BASE[name] for name in ("hidden_size", "q_lora_rank", "qk_nope_head_dim", "kv_lora_rank")
)


def config(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    pretrained = PretrainedConfig.from_dict(raw)
    plain = ModelConfig(
        pretrained_config=pretrained, mapping=Mapping(), dtype=torch.float32, device=CPU
    )
    return replace(plain, **changes)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> GlmMoeDsaForCausalLM:
    directory = make_checkpoint(tmp_path_factory.mktemp("weights"), "glm52", seed=5)
    return load_model(directory, config(hub_config({}), dtype=request.param))


@pytest.fixture(scope="module")
def operands(model: GlmMoeDsaForCausalLM) -> weights.ModelOperands:
    return weights.derive_operands(model)


@pytest.fixture(scope="module")
def ranks() -> list[GlmMoeDsaForCausalLM]:
    """Two ranks of one random model with an MTP layer."""
    raw = hub_config({"num_nextn_predict_layers": 1, "num_hidden_layers": 3})
    models = [
        load_model(
            Path(),
            config(raw, mapping=Mapping(world_size=2, tp_size=2, rank=r), max_draft_len=3),
            load_format="dummy",
        )
        for r in range(2)
    ]
    for mtp in (m.draft_model.layer for m in models):
        for i, norm in enumerate((mtp.enorm, mtp.hnorm)):
            norm.weight.copy_(1 + 0.2 * draw(HIDDEN, seed=i))
    return models


def layer_of(model: GlmMoeDsaForCausalLM, i: int) -> DeepseekV3DecoderLayer:
    return cast(DeepseekV3DecoderLayer, model.model.layers[i])


def rounded(x: Float64, dtype: torch.dtype) -> Float64:
    return nearest_bf16(x) if dtype == torch.bfloat16 else round_to_bits(x, 23)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The built-in modules round elsewhere in bf16.
in_fp32 = pytest.mark.parametrize("model", [torch.float32], indirect=True, ids=["fp32"])


def share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_what_the_modules_hold_already_is_a_view_of_it(
    model: GlmMoeDsaForCausalLM, operands: weights.ModelOperands
) -> None:
    assert share(operands.embed_table, model.model.embed_tokens.weight)
    assert share(operands.lm_head, model.lm_head.weight)
    assert share(operands.cos_sin, model.model.rotary.table)
    for i, own in enumerate(operands.layers):
        layer, attention = layer_of(model, i), own.attention
        mla = layer.self_attn
        assert share(attention.fused_a, mla.fused_a)
        assert share(attention.v_b, mla.kv_b_proj.weight)
        assert share(attention.o_proj, mla.o_proj.weight)
        assert share(own.input_norm_weight, layer.input_layernorm.weight)
        if isinstance(own.mlp, weights.DenseOperands):
            assert share(own.mlp.gate_up, layer.mlp.gate_up_proj)
            assert share(own.mlp.down, layer.mlp.down_proj)
        else:
            assert share(own.mlp.experts.down, layer.mlp.experts.down)
            assert share(own.mlp.shared.gate_up, layer.mlp.shared_experts.gate_up_proj)


def test_only_derived_operands_take_memory(
    model: GlmMoeDsaForCausalLM, operands: weights.ModelOperands
) -> None:
    expected = 0
    for own in operands.layers:
        expected += own.attention.q_b.nbytes
        if own.attention.indexer is not None:
            expected += own.attention.indexer.wq_b.nbytes
        if isinstance(own.mlp, weights.MoeOperands):
            expected += own.mlp.experts.up_gate.nbytes
            if model.config.dtype != torch.float32:
                expected += own.mlp.router_weight.nbytes
    assert weights.derived_bytes(operands, model) == expected


def test_indexers_are_where_the_model_has_them(
    model: GlmMoeDsaForCausalLM, operands: weights.ModelOperands
) -> None:
    has_indexer = [own.attention.indexer is not None for own in operands.layers]
    assert tuple(has_indexer) == model.config.pretrained_config.full_indexer_layers
    assert has_indexer[FULL] and not has_indexer[SHARED]


@pytest.mark.parametrize("i", [FULL, SHARED])
def test_absorbed_q_b_is_the_product_rounded_once(
    model: GlmMoeDsaForCausalLM, operands: weights.ModelOperands, i: int
) -> None:
    mla = layer_of(model, i).self_attn
    g = to_numpy(mla.q_a_layernorm.weight)
    q_b = to_numpy(mla.q_b_proj.weight).reshape(mla.num_heads, -1, RANK)
    kv_b = to_numpy(mla.kv_b_proj.weight).reshape(mla.num_heads, -1, LATENT)
    own = operands.layers[i].attention.q_b
    assert own.is_contiguous() and own.dtype == model.config.dtype
    for h in range(mla.num_heads):
        latent = kv_b[h, :NOPE].T @ q_b[h, :NOPE]
        exact = np.concatenate([latent, q_b[h, NOPE:]]) * g
        assert np.array_equal(to_numpy(own[h]), rounded(exact, own.dtype))


def test_folded_wq_b_is_the_product_rounded_once(
    model: GlmMoeDsaForCausalLM, operands: weights.ModelOperands
) -> None:
    mla, own = layer_of(model, FULL).self_attn, operands.layers[FULL].attention.indexer
    assert own is not None and own.wq_b.shape == (16, 32, RANK)
    exact = to_numpy(mla.indexer.wq_b.weight) * to_numpy(mla.q_a_layernorm.weight)
    assert np.array_equal(to_numpy(own.wq_b.flatten(0, 1)), rounded(exact, own.wq_b.dtype))


def normed_scale(q_a: torch.Tensor, eps: float) -> torch.Tensor:
    """What is left of a folded norm, fp32 [rows, 1]."""
    return torch.rsqrt(q_a.square().mean(-1, keepdim=True) + eps)


@in_fp32
@pytest.mark.parametrize("i", [FULL, SHARED])
def test_queries_of_the_absorbed_weight_are_the_modules(
    model: GlmMoeDsaForCausalLM, operands: weights.ModelOperands, i: int
) -> None:
    mla, own = layer_of(model, i).self_attn, operands.layers[i].attention
    x = draw(8, HIDDEN)
    q_a = fused_a_gemm(x, own.fused_a, own.l2_prefetch)[:, :RANK]
    assert torch.equal(q_a, torch.nn.functional.linear(x, mla.fused_a)[:, :RANK])
    unrotated = torch.ones(8, 1, BASE["qk_rope_head_dim"] // 2, dtype=torch.complex64)
    expected = mla._absorbed_queries(mla.q_a_layernorm(q_a), unrotated)
    f = normed_scale(q_a, own.q_a_eps)
    got = (q_a @ own.q_b.flatten(0, 1).T * f).view(expected.shape)
    # Both sum over the rank, one over nope too, of the same magnitudes; then norm and weights.
    kv_b = to_numpy(mla.w_uk).transpose(0, 2, 1)
    rows = np.abs(to_numpy(mla.q_b_proj.weight)).reshape(mla.num_heads, -1, RANK)
    latent = np.matmul(np.abs(kv_b), rows[:, :NOPE])
    size = np.concatenate([latent, rows[:, NOPE:]], axis=1) * np.abs(
        to_numpy(mla.q_a_layernorm.weight)
    )
    size = np.einsum("hck,tk->thc", size, np.abs(to_numpy(q_a * f)))
    off = np.abs(to_numpy(got) - to_numpy(expected))
    assert (off <= gamma(2 * RANK + NOPE + RANK + 16) * size).all()


@in_fp32
def test_index_queries_of_the_folded_weight_are_the_modules(
    model: GlmMoeDsaForCausalLM, operands: weights.ModelOperands
) -> None:
    mla, own = layer_of(model, FULL).self_attn, operands.layers[FULL].attention
    assert own.indexer is not None
    q_a = draw(8, RANK)
    expected = mla.indexer.wq_b(mla.q_a_layernorm(q_a))
    f = normed_scale(q_a, own.q_a_eps)
    got = q_a @ own.indexer.wq_b.flatten(0, 1).T * f
    size = np.abs(to_numpy(q_a * f)) @ np.abs(to_numpy(own.indexer.wq_b).reshape(-1, RANK)).T
    off = np.abs(to_numpy(got) - to_numpy(expected))
    assert (off <= gamma(3 * RANK + 16) * size).all()


def test_values_of_v_b_are_the_modules(
    model: GlmMoeDsaForCausalLM, operands: weights.ModelOperands
) -> None:
    mla, own = layer_of(model, FULL).self_attn, operands.layers[FULL].attention
    assert own.v_b.shape == (mla.num_heads, BASE["v_head_dim"], LATENT)
    assert own.v_b.stride(1) == LATENT
    assert torch.equal(own.v_b.mT, mla.w_uv)


@in_fp32
def test_the_dense_op_gives_the_modules_result(
    model: GlmMoeDsaForCausalLM, operands: weights.ModelOperands
) -> None:
    own, module = operands.layers[DENSE].mlp, layer_of(model, DENSE).mlp
    assert isinstance(own, weights.DenseOperands)
    x = draw(8, HIDDEN)
    gate, up = np.split(to_numpy(own.gate_up), 2)
    exact, off = swiglu(to_numpy(x), gate, up, to_numpy(own.down), torch.float32)
    for out in (dense_mlp_small_m(x, own.gate_up, own.down), module(x)):
        assert (np.abs(to_numpy(out) - exact) <= off).all()


def moe_exactly(module: Deepseekv3MoE, x: torch.Tensor) -> tuple[Float64, Float64]:
    """The routed experts' sum for rows x, and how far off fp32 may be."""
    rows, router = to_numpy(x), to_numpy(module.gate.weight)
    scores = 1 / (1 + np.exp(-(rows @ router.T)))
    choices = scores + to_numpy(module.gate.e_score_correction_bias)
    top_k, gate_up = module.gate.top_k, to_numpy(module.experts.gate_up)
    # d(ln score) <= d(logit), for the score and for the sum that it is divided by.
    off_logit = gamma(HIDDEN) * np.abs(rows) @ np.abs(router).T
    out, off = np.zeros_like(rows), np.zeros_like(rows)
    for t, row in enumerate(rows):
        ids = np.argsort(-choices[t])[:top_k]
        for e in ids:
            weight = scores[t, e] / scores[t, ids].sum() * module.gate.scale
            gate, up = np.split(gate_up[e], 2)
            y, off_y = swiglu(row, gate, up, to_numpy(module.experts.down[e]), torch.float32)
            relative = 2 * off_logit[t].max() + gamma(top_k + 12)
            out[t] += weight * y
            off[t] += weight * (off_y + relative * np.abs(y))
    return out, 1.01 * off


@in_fp32
def test_the_routed_experts_op_gives_the_modules_result(
    model: GlmMoeDsaForCausalLM, operands: weights.ModelOperands
) -> None:
    own, module = operands.layers[MOE].mlp, layer_of(model, MOE).mlp
    assert isinstance(own, weights.MoeOperands) and isinstance(module, Deepseekv3MoE)
    x = draw(8, HIDDEN)
    rows, routing_weights, places = routed_experts(
        routing_logits=None,
        routing_bias=own.routing_bias,
        router_hidden_states=x,
        router_weight=own.router_weight,
        router_workspace=fused_router_workspace(CPU, 8, len(own.experts.down)),
        hidden_states=x,
        hidden_states_scale=None,
        gemm1_weights=own.experts.up_gate,
        gemm1_weights_scale=None,
        gemm2_weights=own.experts.down,
        gemm2_weights_scale=None,
        output1_scale_scalar=None,
        output1_scale_gate_scalar=None,
        output2_scale_scalar=None,
        top_k=own.top_k,
        routed_scaling_factor=own.routed_scaling_factor,
        output_dtype=x.dtype,
        hidden_states_ready_event=None,
    )
    each = rows[places.long()].view(8, own.top_k, HIDDEN)
    summed = (each * routing_weights.unsqueeze(-1)).sum(1)
    exact, off = moe_exactly(module, x)
    for out in (summed, module.experts(x, *module.gate(x))):
        assert (np.abs(to_numpy(out) - exact) <= off).all()


@in_fp32
def test_the_low_m_experts_op_gives_the_modules_result(
    model: GlmMoeDsaForCausalLM, operands: weights.ModelOperands
) -> None:
    own, module = operands.layers[MOE].mlp, layer_of(model, MOE).mlp
    assert isinstance(own, weights.MoeOperands) and isinstance(module, Deepseekv3MoE)
    x = draw(1, HIDDEN, seed=1)
    out = lowm_bf16_moe(
        x,
        x @ own.router_weight.T,
        own.routing_bias,
        own.experts.up_gate,
        own.experts.down,
        own.top_k,
        own.routed_scaling_factor,
    )
    exact, off = moe_exactly(module, x)
    assert (np.abs(to_numpy(out) - exact) <= off).all()


def test_the_halves_of_eh_proj_make_its_output(ranks: list[GlmMoeDsaForCausalLM]) -> None:
    own = [_draft(model) for model in ranks]
    mtp, hidden = ranks[0].draft_model.layer, draw(1, HIDDEN)
    for token in (0, 127, 128, 255):
        embedded = ranks[0].model.embed_tokens(torch.tensor([token]))
        both = torch.cat([mtp.enorm(embedded), mtp.hnorm(hidden)], dim=-1)
        expected, size = mtp.eh_proj(both), both.abs() @ mtp.eh_proj.weight.abs().T
        halves = [draft_hidden_half(hidden, d.hnorm_weight, d.hidden_half, d.eps) for d in own]
        row = own[token // 128].token_table[token % 128]
        off = (row + torch.cat(halves, dim=1) - expected).abs()
        assert (off <= 2 * gamma(2 * HIDDEN + 1) * size).all()


def test_the_windows_of_eh_proj_make_its_output(ranks: list[GlmMoeDsaForCausalLM]) -> None:
    mtp, hidden, ids = ranks[0].draft_model.layer, draw(4, HIDDEN), torch.tensor([3, 200, 7, 9])
    total = torch.zeros(4, HIDDEN)
    for model in ranks:
        d = _draft(model)
        table = model.model.embed_tokens.weight
        window = draft_glue_rmsnorm_cat(
            ids, table, hidden, d.enorm_weight, d.hnorm_weight, d.eps, *d.eh_proj_window
        )
        total += window @ d.eh_proj.T
    both = torch.cat([mtp.enorm(ranks[0].model.embed_tokens(ids)), mtp.hnorm(hidden)], dim=-1)
    off = (total - mtp.eh_proj(both)).abs()
    assert (off <= 2 * gamma(2 * HIDDEN + 1) * (both.abs() @ mtp.eh_proj.weight.abs().T)).all()


def _draft(model: GlmMoeDsaForCausalLM) -> weights.DraftOperands:
    draft = weights.derive_operands(model).draft
    assert draft is not None
    return draft


def test_up_rows_come_before_gate_rows(
    model: GlmMoeDsaForCausalLM, operands: weights.ModelOperands
) -> None:
    own, experts = operands.layers[MOE].mlp, layer_of(model, MOE).mlp.experts
    assert isinstance(own, weights.MoeOperands)
    assert torch.equal(own.experts.up_gate[:, 32:], experts.gate_up[:, :32])
    assert torch.equal(own.experts.up_gate[:, :32], experts.gate_up[:, 32:])


def test_operands_carry_no_gradients_of_parameters_that_do(tmp_path: Path) -> None:
    raw = hub_config({"num_nextn_predict_layers": 1, "num_hidden_layers": 3})
    model = load_model(tmp_path, config(raw, max_draft_len=1), load_format="dummy")
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    with torch.enable_grad():
        held = list(weights.tensors(weights.derive_operands(model)))
    assert len(held) > 60
    assert not any(t.requires_grad or t.grad_fn for t in held)


def test_routing_weights_that_are_not_normalised_are_refused(tmp_path: Path) -> None:
    raw = hub_config({"num_hidden_layers": 3, "norm_topk_prob": False})
    model = load_model(tmp_path, config(raw), load_format="dummy")
    with pytest.raises(ValueError, match="norm_topk_prob is False"):
        weights.derive_operands(model)


def test_ranks_that_do_not_divide_eh_proj_are_refused() -> None:
    mapping = Mapping(world_size=3, tp_size=3)
    with pytest.raises(ValueError, match="eh_proj has 128 inputs, which tp_size 3 does not"):
        weights.eh_proj_window(128, mapping)
