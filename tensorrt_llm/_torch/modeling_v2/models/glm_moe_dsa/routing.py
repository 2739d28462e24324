"""Which `GlmMoeDsaForCausalLM` deployment gets a target.

GLM-5.2 in NVFP4 on sm_107, 16-way tensor parallel, with one-model MTP-Eagle of any draft length or
no drafting: that is the claim. Every other deployment of it gets NoTarget, which names what missed.

Two bring-up rows run the same classes where those machines are not: `glm_tiny` is the shipped
checkpoint's shape, and `glm_5_2_slice` is what each of 1 to 8 ranks has of a GLM-5.2 that is cut
for 16. Their directories, `<checkpoint>__sm_any__tp_any`, hold only a geometry. Each row has a
shape of its own, so neither ever claims GLM-5.2.

A checkpoint is known by its shape: a fine-tune of GLM-5.2 is GLM-5.2.
"""

from dataclasses import dataclass

from tensorrt_llm._torch.modeling_v2._router_index import (
    NULL_TRACE,
    ModelingV2Context,
    NoTarget,
    Trace,
    TuningArgs,
)
from tensorrt_llm._torch.models.model_config import PretrainedConfig
from tensorrt_llm._torch.speculative.interface import SpecConfig, SpeculativeDecodingMode
from tensorrt_llm.mapping import Mapping


@dataclass(frozen=True)
class _Claim:
    """What a checkpoint's target asks for; None is anything. The names are the directory's."""

    sm: tuple[int, int] | None
    tp_size: int | None
    quant_algo: str | None

    @property
    def layout(self) -> tuple[str, str]:
        sm = "any" if self.sm is None else f"{self.sm[0]}{self.sm[1]}"
        tp = "_any" if self.tp_size is None else str(self.tp_size)
        return f"sm_{sm}", f"tp{tp}"


# (num_hidden_layers, hidden_size, n_routed_experts, q_lora_rank) -> checkpoint
_CHECKPOINTS = {
    (78, 6144, 256, 2048): "glm_5_2_nvfp4",
    (8, 128, 8, 64): "glm_tiny",
}
_SLICE = "glm_5_2_slice"
_SLICE_MODEL = (6144, 256, 2048)  # the same without num_hidden_layers
_SLICE_LAYERS = 78
# Heads, expert width, dense width and vocabulary that one of GLM-5.2's 16 ranks has.
_SLICE_PER_RANK = (4, 128, 768, 9680)
_SLICE_TP_SIZES = (1, 2, 4, 8)  # 16 of these ranks are GLM-5.2

_EAGLE = SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL

_CLAIMS = {
    "glm_5_2_nvfp4": _Claim(sm=(10, 7), tp_size=16, quant_algo="NVFP4"),
    "glm_tiny": _Claim(sm=None, tp_size=None, quant_algo=None),
    _SLICE: _Claim(sm=None, tp_size=None, quant_algo=None),
}

# checkpoint -> the name that its target's class is registered under
_TARGETS = {
    "glm_5_2_nvfp4": "ModelingV2Glm52Nvfp4Sm107Tp16",
    "glm_tiny": "ModelingV2GlmTinySmAnyTpAny",
    _SLICE: "ModelingV2Glm52SliceSmAnyTpAny",
}

# target -> its modeling module, relative to the package: <checkpoint>__<sm>__<parallel>
TARGET_MODULES = {
    target: f"models.glm_moe_dsa.{'__'.join((checkpoint, *_CLAIMS[checkpoint].layout))}.modeling"
    for checkpoint, target in _TARGETS.items()
}


def route(ctx: ModelingV2Context, trace: Trace = NULL_TRACE) -> str | NoTarget:
    """The deployment's target, or every criterion that missed."""
    shape = _shape(ctx.pretrained_config)
    found = _SLICE if _is_slice(ctx.pretrained_config, ctx.mapping.tp_size) else None
    checkpoint = trace.resolve("shape", shape, found or _CHECKPOINTS.get(shape))
    if checkpoint is None:
        return NoTarget(
            f"shape (layers, hidden, experts, q_lora_rank) is {shape}; known are "
            f"{list(_CHECKPOINTS)} and slices of GLM-5.2"
        )
    claim = _CLAIMS[checkpoint]
    misses = [
        *_machine_misses(ctx, claim, trace),
        *_parallel_misses(ctx.mapping, claim, trace),
        *_spec_misses(ctx.spec_config, trace),
    ]
    if misses:
        return NoTarget(f"{checkpoint} has no target here: {'; '.join(misses)}")
    return _TARGETS[checkpoint]


def within_bounds(
    target: str, args: TuningArgs, ctx: ModelingV2Context, trace: Trace = NULL_TRACE
) -> bool:
    """No tuning size excludes a target: steps that its fast path does not serve run the built-in
    modules inside of it."""
    return True


def _shape(pretrained_config: PretrainedConfig) -> tuple[int, int, int, int]:
    return (
        pretrained_config.num_hidden_layers,
        pretrained_config.hidden_size,
        pretrained_config.n_routed_experts,
        pretrained_config.q_lora_rank,
    )


def _is_slice(pretrained_config: PretrainedConfig, tp_size: int) -> bool:
    sizes = (
        pretrained_config.num_attention_heads,
        pretrained_config.moe_intermediate_size,
        pretrained_config.intermediate_size,
        pretrained_config.vocab_size,
    )
    layers, *model = _shape(pretrained_config)
    return (
        tuple(model) == _SLICE_MODEL
        and layers <= _SLICE_LAYERS
        and tp_size in _SLICE_TP_SIZES
        and sizes == tuple(tp_size * size for size in _SLICE_PER_RANK)
    )


def _machine_misses(ctx: ModelingV2Context, claim: _Claim, trace: Trace) -> list[str]:
    algorithm = ctx.quant_config.quant_algo
    misses = []
    if not trace.check("sm", ctx.sm, claim.sm in (None, ctx.sm)):
        misses.append(f"sm is {ctx.sm}, it needs {claim.sm}")
    if not trace.check("quant", algorithm, claim.quant_algo in (None, algorithm)):
        misses.append(f"quant is {algorithm}, it needs {claim.quant_algo}")
    return misses


def _parallel_misses(mapping: Mapping, claim: _Claim, trace: Trace) -> list[str]:
    """Tensor parallelism over all ranks and nothing else; expert parallelism slices experts
    otherwise, and attention DP replicates attention."""
    tp = mapping.world_size if claim.tp_size is None else claim.tp_size
    sizes = (
        ("tp_size", mapping.tp_size, tp),
        ("world_size", mapping.world_size, tp),
        ("moe_ep_size", mapping.moe_ep_size, 1),
        ("moe_cluster_size", mapping.moe_cluster_size, 1),
        ("enable_attention_dp", mapping.enable_attention_dp, False),
    )
    return [
        f"{name} is {found}, it needs {needed}"
        for name, found, needed in sizes
        if not trace.check(name, found, found == needed)
    ]


def _spec_misses(spec_config: SpecConfig | None, trace: Trace) -> list[str]:
    told = spec_config and f"{spec_config.spec_dec_mode.name}:{spec_config.max_draft_len}"
    eagle = spec_config is None or spec_config.spec_dec_mode is _EAGLE
    if trace.check("spec", told, eagle):
        return []
    return [f"spec is {told}, it needs {_EAGLE.name} or none"]
