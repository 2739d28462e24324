"""The tiny GLM: transformers' `GlmMoeDsaForCausalLM` as backbone, plus our own MTP layer.

The MTP layer is stored as layer N, as GLM-5.2 does. transformers runs its indexers without
gradients and has no MTP layer, so this file also holds the differentiable forms of both: index
scores, the selection they imply, and the draft chain, whose later steps reuse the first step's
keys and top-k row.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as hf

LAYERS, DENSE_LAYERS, TOPK_FREQ, TOPK_OFFSET = 8, 2, 4, 3
BIAS_RANGE = (6.82, 7.06)  # where GLM-5.2's correction biases lie: bf16 steps are 1/32 wide there
CORRECTION_BIAS = "e_score_correction_bias"


def indexer_types(layers: int) -> list[str]:
    """`full` for layers that own an indexer, `shared` for those that reuse the last full one's."""
    own = (max(i - TOPK_OFFSET + 1, 0) % TOPK_FREQ == 0 for i in range(layers))
    return ["full" if full else "shared" for full in own]


def hub_config(eos: list[int], vocab_size: int) -> dict[str, object]:
    """config.json with the field names of GLM-5.2's; the first stop id also pads."""
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": eos,
        "ep_size": 1,
        "first_k_dense_replace": DENSE_LAYERS,
        "head_dim": 24,
        "hidden_act": "silu",
        "hidden_size": 128,
        "index_head_dim": 32,
        "index_n_heads": 16,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": TOPK_OFFSET,
        "index_topk": 16,
        "index_topk_freq": TOPK_FREQ,
        "index_topk_pattern": None,
        "indexer_rope_interleave": True,
        "indexer_types": indexer_types(LAYERS),
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "kv_lora_rank": 32,
        "layer_types": ["deepseek_sparse_attention"] * LAYERS,
        "max_position_embeddings": 4096,
        "mlp_layer_types": ["dense"] * DENSE_LAYERS + ["sparse"] * (LAYERS - DENSE_LAYERS),
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "pad_token_id": eos[0],
        "pretraining_tp": 1,
        "q_lora_rank": 64,
        "qk_head_dim": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": 32,
        "vocab_size": vocab_size,
    }


def all_experts(module: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Experts forward that runs every expert on every token: same sum, no data-dependent shapes.

    x [N, hidden]; chosen, weights [N, top]; returns [N, hidden].
    """
    gates = torch.zeros(len(x), module.num_experts, dtype=weights.dtype, device=x.device)
    gates = gates.scatter(1, chosen, weights)
    gate, up = torch.einsum("nh,efh->enf", x, module.gate_up_proj).chunk(2, dim=-1)
    inner = module.act_fn(gate) * up * gates.T[..., None]
    return torch.einsum("enf,ehf->nh", inner, module.down_proj)


ALL_EXPERTS_FUNCTIONS.register("all_experts", all_experts)


def transformers_config(hub: dict[str, object], layers: int) -> GlmMoeDsaConfig:
    """transformers' config of `layers` layers; layer N is sparse and owns an indexer."""
    extra = layers - LAYERS
    config = GlmMoeDsaConfig(
        **hub
        | {
            "num_hidden_layers": layers,
            "indexer_types": hub["indexer_types"] + ["full"] * extra,
            "mlp_layer_types": hub["mlp_layer_types"] + ["sparse"] * extra,
            "layer_types": hub["layer_types"] + hub["layer_types"][:1] * extra,
        }
    )
    config._attn_implementation = "eager"  # the only one that returns the attention weights
    config._experts_implementation = "all_experts"
    return config


class MtpLayer(hf.GlmMoeDsaDecoderLayer):
    """The decoder layer that drafts: its parameter names are those of GLM-5.2's layer N."""

    def __init__(self, config: GlmMoeDsaConfig) -> None:
        super().__init__(config, config.num_hidden_layers - 1)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = hf.GlmMoeDsaRMSNorm(size, eps), hf.GlmMoeDsaRMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": hf.GlmMoeDsaRMSNorm(size, eps)})

    def merge(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[next token's embedding | this one's hidden state] -> layer input, [B, S, hidden]."""
        return self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residuals, experts and the head's norm around attention's output; [B, S, hidden]."""
        x = x + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return self.shared_head.norm(x + self.mlp(self.post_attention_layernorm(x)))


class TinyGlm(nn.Module):
    """Backbone and MTP layer; `forward` gives the hidden states that `DraftChain` starts from."""

    def __init__(self, hub: dict[str, object]) -> None:
        super().__init__()
        self.hub = hub
        self.backbone = GlmMoeDsaForCausalLM(transformers_config(hub, LAYERS))
        self.mtp = MtpLayer(transformers_config(hub, LAYERS + 1))
        self.set_latent_eps(hub["rms_norm_eps"])

    def set_latent_eps(self, eps: float) -> None:
        """Epsilon of the two latent norms: transformers says 1e-6, serving engines rms_norm_eps."""
        for name, module in self.named_modules():
            if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
                module.variance_epsilon = eps

    def set_topk(self, topk: int) -> None:
        """How many keys every indexer selects."""
        for module in self.modules():
            if isinstance(module, hf.GlmMoeDsaIndexer):
                module.index_topk = topk

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, S] -> hidden states after the final norm [B, S, hidden]."""
        mask = causal(ids.shape[1], ids.device)
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(
            ~mask, torch.finfo(torch.float32).min
        )
        masks = {"indexed_attention": mask.expand(len(ids), 1, -1, -1)}
        return self.backbone.model(ids, attention_mask=masks, use_cache=False).last_hidden_state

    def embed(self, ids: Tensor, offset: int) -> Tensor:
        """Embeddings of the tokens `offset` places ahead, [B, S, hidden]; past the end: padding."""
        ahead = F.pad(ids[:, offset:], (0, offset), value=self.hub["pad_token_id"])
        return self.backbone.model.embed_tokens(ahead)

    def rope(self, x: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines for positions offset, offset + 1, ... of x [B, S, ...]."""
        positions = torch.arange(x.shape[1], device=x.device)[None] + offset
        return self.backbone.model.rotary_emb(x, positions)


def causal(size: int, device: torch.device) -> Tensor:
    """[size, size], true where the column's key is not in the row's future."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril()


def queries(attn: nn.Module, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """x [B, S, hidden] -> normed latent [B, S, q_lora], queries [B, heads, S, qk_head]."""
    latent = attn.q_a_layernorm(attn.q_a_proj(x))
    q = attn.q_b_proj(latent).unflatten(-1, (-1, attn.qk_head_dim)).transpose(1, 2)
    plain, turned = q.split([attn.qk_nope_head_dim, attn.qk_rope_head_dim], -1)
    turned, _ = hf.apply_rotary_pos_emb_interleave(turned, turned, *rope)
    return latent, torch.cat([plain, turned], -1)


def keys_values(attn: nn.Module, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """x [B, S, hidden] -> keys [B, heads, S, qk_head] and values [B, heads, S, v_head]."""
    latent, turned = attn.kv_a_proj_with_mqa(x).split(
        [attn.kv_lora_rank, attn.qk_rope_head_dim], -1
    )
    turned, _ = hf.apply_rotary_pos_emb_interleave(turned[:, None], turned[:, None], *rope)
    return attn.expand_kv(attn.kv_a_layernorm(latent)[:, None], turned)


def index_scores(
    indexer: nn.Module, x: Tensor, latent: Tensor, rope: tuple[Tensor, Tensor]
) -> Tensor:
    """The indexer's scores [B, S, S] with gradients, without mask: sum_h w_h relu(q_h . k)."""
    turn = indexer.qk_rope_head_dim
    q = indexer.wq_b(latent).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(x))[:, :, None]
    q_turned, k_turned = hf.apply_rotary_pos_emb_interleave(
        q[..., :turn], k[..., :turn], *rope, unsqueeze_dim=2
    )
    q = torch.cat([q_turned, q[..., turn:]], -1).transpose(1, 2)
    k = torch.cat([k_turned, k[..., turn:]], -1).transpose(1, 2)
    weights = indexer.weights_proj(x) * indexer.n_heads**-0.5
    return torch.einsum("bsh,bhst->bst", weights, F.relu(q @ k.mT * indexer.softmax_scale))


def select(scores: Tensor, topk: int) -> Tensor:
    """The keys that each row may see, the `topk` best of its past: [B, S, S] scores -> bool."""
    past = causal(scores.shape[-1], scores.device)
    best = scores.masked_fill(~past, float("-inf")).topk(min(topk, scores.shape[-1])).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & past


def attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Masked attention: outputs [B, heads, S, v_head] and weights [B, heads, S, S]."""
    logits = q @ k.mT * q.shape[-1] ** -0.5
    weights = logits.masked_fill(~allowed[:, None], torch.finfo(q.dtype).min).softmax(-1)
    return weights @ v, weights


class DraftChain:
    """The MTP layer's draft chain from every position of a batch at once.

    Step 0 writes keys and chooses each row's top-k. With `index_share_for_mtp_iteration` a later
    step has one query per row, one position further on, over the keys that step 0 chose for that
    row, and takes the previous step's normed output as its hidden state. Step s of row i predicts
    token i + 2 + s.
    """

    def __init__(self, model: TinyGlm, hidden: Tensor, topk: int) -> None:
        """hidden [B, S, hidden]: the backbone's states after its final norm."""
        self.model, self.hidden, self.topk, self.steps = model, hidden, topk, 0
        self.weights: list[Tensor] = []  # per step, averaged over heads [B, S, S]

    def step(self, embedded: Tensor) -> Tensor:
        """embedded [B, S, hidden]: the token after each row's last. Logits [B, S, vocab]."""
        mtp, attn = self.model.mtp, self.model.mtp.self_attn
        x = mtp.merge(embedded, self.hidden)
        normed, rope = mtp.input_layernorm(x), self.model.rope(x, self.steps)
        latent, q = queries(attn, normed, rope)
        if self.steps == 0:
            self.k, self.v = keys_values(attn, normed, rope)
            self.scores = index_scores(attn.indexer, normed.detach(), latent.detach(), rope)
            self.allowed = select(self.scores.detach(), self.topk)
        attended, weights = attention(q, self.k, self.v, self.allowed)
        self.weights.append(weights.detach().mean(1))
        self.hidden, self.steps = mtp.finish(x, attended), self.steps + 1
        return self.model.backbone.lm_head(self.hidden)


def initialise(model: TinyGlm, seed: int) -> None:
    """Random weights: fan-in scale, residual outputs smaller, biases spread around 6.94."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.state_dict().items()):
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith(CORRECTION_BIAS):
            tensor.copy_(6.94 + 0.01 * noise)
        elif "embed_tokens" in name:
            tensor.copy_(noise * 0.5)
        elif tensor.dim() > 1:
            residual = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
            depth = (2 * LAYERS) ** -0.5 if residual else 1.0
            tensor.copy_(noise * depth * tensor.shape[-1] ** -0.5)


def split_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """transformers' merged expert tensors as the hub's one tensor per expert; others unchanged."""
    stem, _, leaf = name.rpartition(".")
    if leaf == "gate_up_proj":
        halves = {"gate_proj": tensor.chunk(2, 1)[0], "up_proj": tensor.chunk(2, 1)[1]}
    elif leaf == "down_proj":
        halves = {"down_proj": tensor}
    else:
        return {name: tensor}
    return {f"{stem}.{e}.{p}.weight": t[e] for p, t in halves.items() for e in range(len(tensor))}


def merge_experts(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The inverse of `split_experts` for the layer of that name prefix, which is removed."""
    own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    experts = {n: own.pop(n) for n in list(own) if n.startswith("mlp.experts.")}

    def stack(projection: str) -> Tensor:
        count = sum(n.endswith(projection + ".weight") for n in experts)
        return torch.stack([experts[f"mlp.experts.{e}.{projection}.weight"] for e in range(count)])

    own["mlp.experts.gate_up_proj"] = torch.cat([stack("gate_proj"), stack("up_proj")], 1)
    own["mlp.experts.down_proj"] = stack("down_proj")
    return own


def hub_tensors(model: TinyGlm) -> dict[str, Tensor]:
    """Every stored tensor under its hub name: bf16, but the correction biases fp32."""
    layer = f"model.layers.{LAYERS}."
    named = dict(model.backbone.state_dict())
    named |= {layer + name: tensor for name, tensor in model.mtp.state_dict().items()}
    flat = {n: t for name, tensor in named.items() for n, t in split_experts(name, tensor).items()}
    stored = {n: torch.float32 if n.endswith(CORRECTION_BIAS) else torch.bfloat16 for n in flat}
    return {n: t.detach().to("cpu", stored[n]).contiguous() for n, t in flat.items()}


def save(model: TinyGlm, folder: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    hub = model.hub
    generation = {"eos_token_id": hub["eos_token_id"], "pad_token_id": hub["pad_token_id"]}
    generation |= {"temperature": 1.0, "top_p": 0.95}
    (folder / "config.json").write_text(json.dumps(hub, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_file(hub_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path) -> TinyGlm:
    """The checkpoint as an fp32 model in evaluation mode; every tensor of the file must be used."""
    model = TinyGlm(json.loads((folder / "config.json").read_text()))
    tensors = {n: t.float() for n, t in load_file(folder / "model.safetensors").items()}
    mtp = f"model.layers.{LAYERS}."
    model.mtp.load_state_dict(merge_experts(tensors, mtp))
    backbone = {
        n: t for n, t in tensors.items() if not n.startswith(mtp) and ".mlp.experts." not in n
    }
    for i in range(DENSE_LAYERS, LAYERS):
        layer = f"model.layers.{i}."
        backbone |= {layer + n: t for n, t in merge_experts(tensors, layer).items()}
    model.backbone.load_state_dict(backbone)
    return model.eval()
