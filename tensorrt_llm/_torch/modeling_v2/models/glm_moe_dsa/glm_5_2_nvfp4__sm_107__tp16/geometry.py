"""Every number of one rank, once. Kernels depend on these shapes and not on the number of ranks."""

from dataclasses import dataclass, fields

from tensorrt_llm._torch.models.model_config import PretrainedConfig

# A rank's sizes that are an equal part of a model's.
SPLIT = {
    "heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "moe_intermediate_size": "moe_intermediate_size",
    "vocab_size": "vocab_size",
}


@dataclass(frozen=True)
class Geometry:
    """What one rank computes with. GLM-5.2 on 16 ranks unless said otherwise.

    Attributes:
        tp_size: ranks that share every layer.
        heads: query heads of this rank.
        latent_width: cached numbers per token and layer: latent, then rotary key.
        intermediate_size, moe_intermediate_size, vocab_size: this rank's slice of the dense MLP, of
            every expert (the shared one alike), of the vocabulary.
        tokens_per_block: of a cache page, in the ops' cells; a step asks the cache manager.
        max_rows: verify rows of one request that the fast step serves.
    """

    tp_size: int = 16
    hidden_size: int = 6144
    heads: int = 4
    q_lora_rank: int = 2048
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 192
    qk_rope_head_dim: int = 64
    v_head_dim: int = 256
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 2048
    intermediate_size: int = 768
    moe_intermediate_size: int = 128
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 2.5
    vocab_size: int = 9680
    rms_norm_eps: float = 1e-5
    tokens_per_block: int = 64
    max_rows: int = 8

    @classmethod
    def of(cls, pretrained_config: PretrainedConfig, tp_size: int) -> "Geometry":
        """Each of `tp_size` ranks' part of a model.

        Raises:
            ValueError: a size that the ranks do not divide.
        """
        taken = {f.name for f in fields(cls)} & set(vars(pretrained_config))
        sizes = {name: getattr(pretrained_config, name) for name in taken - SPLIT.keys()}
        for name, source in SPLIT.items():
            whole = getattr(pretrained_config, source)
            if whole % tp_size:
                raise ValueError(f"{source} is {whole}, which tp_size {tp_size} does not divide")
            sizes[name] = whole // tp_size
        return cls(tp_size=tp_size, **sizes)

    def check(self, pretrained_config: PretrainedConfig, tp_size: int) -> None:
        """Raises ValueError with each size of a rank that is not this geometry's."""
        found = self.of(pretrained_config, tp_size)
        differing = [
            f"{f.name} is {getattr(found, f.name)}, it needs {getattr(self, f.name)}"
            for f in fields(self)
            if getattr(found, f.name) != getattr(self, f.name)
        ]
        if differing:
            raise ValueError(f"not the shape that the step is written for: {'; '.join(differing)}")

    @property
    def latent_width(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5


GLM_5_2_TP16 = Geometry()
