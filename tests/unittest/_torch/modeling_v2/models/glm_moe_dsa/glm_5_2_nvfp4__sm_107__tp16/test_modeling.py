"""Building the target's model, and the contract between it and the engine."""

import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.engine import executor_config, generate, make_engine
from helpers.glm_52 import glm_52_config
from helpers.glm_tiny import CHECKPOINT, heldout
from torch import nn

from tensorrt_llm._torch.modeling_v2._surface import fields_of
from tensorrt_llm._torch.modeling_v2._target import Phase
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16 import modeling
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.decode import (
    BUILTIN,
    FAST,
    DecodeTarget,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.draft import (
    MTPDraftWorker,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.geometry import (  # noqa: E501
    GLM_5_2_TP16,
    Geometry,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.modeling import (  # noqa: E501
    GlmCore,
    GlmTarget,
    ModelingV2Glm52Nvfp4Sm107Tp16,
    PrefillTarget,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.weights import (
    derive_operands,
    tensors,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_5_2_nvfp4__sm_107__tp16.workspaces import (  # noqa: E501
    Workspaces,
)
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.glm_tiny__sm_any__tp_any.modeling import (
    ModelingV2GlmTinySmAnyTpAny,
)
from tensorrt_llm._torch.models.checkpoints.reader import CheckpointReader
from tensorrt_llm._torch.models.loading import load_model
from tensorrt_llm._torch.models.model_config import ModelConfig, PretrainedConfig
from tensorrt_llm._torch.models.modeling_deepseekv3 import (
    DeepseekV3Model,
    GlmMoeDsaForCausalLM,
    MTPDraftModel,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2, Role
from tensorrt_llm._torch.pyexecutor.messages import NewRequest
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.speculative.interface import SpecWorkerBase
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.sampling_params import SamplingParams

METADATA = "DSAtrtllmAttentionMetadata"
TARGET = ModelingV2GlmTinySmAnyTpAny.__name__
DRAFTS = 2
NEW_TOKENS = 8
MIB = 1 << 20


def tp(size: int, rank: int = 0) -> Mapping:
    return Mapping(world_size=size, tp_size=size, rank=rank)


def glm_52(mapping: Mapping | None = None, **changes: Any) -> ModelConfig:
    """nvidia/GLM-5.2-NVFP4 as it is served, on the meta device, with other values."""
    return ModelConfig(
        pretrained_config=PretrainedConfig.from_dict(glm_52_config(**changes)),
        mapping=mapping or tp(16),
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        kv_cache_fp8=True,
    )


def tiny(**changes: Any) -> ModelConfig:
    settings: dict[str, Any] = {
        "pretrained_config": PretrainedConfig.from_directory(CHECKPOINT),
        "mapping": Mapping(),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "modeling_v2_target": TARGET,
    }
    return ModelConfig(**{**settings, **changes})


def engine(modeling_v2: str = "require", **overrides: Any) -> PyExecutor:
    settings = {"max_seq_len": 128, "max_batch_size": 2, "max_draft_len": DRAFTS, **overrides}
    return make_engine(executor_config(CHECKPOINT, modeling_v2=modeling_v2, **settings))


def core_of(executor: PyExecutor) -> GlmCore:
    model = executor.model_engine.model
    assert isinstance(model, GlmTarget)
    return model.core


# --- construction ---


def test_glm_52_has_the_geometry_that_the_step_is_written_for() -> None:
    assert ModelingV2Glm52Nvfp4Sm107Tp16.geometry_of(glm_52()) is GLM_5_2_TP16


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": 7168}, "hidden_size is 7168, it needs 6144"),
        ({"num_attention_heads": 128}, "heads is 8, it needs 4"),
        ({"intermediate_size": 18432}, "intermediate_size is 1152, it needs 768"),
        ({"moe_intermediate_size": 1024}, "moe_intermediate_size is 64, it needs 128"),
        ({"vocab_size": 151552}, "vocab_size is 9472, it needs 9680"),
        ({"index_topk": 1024}, "index_topk is 1024, it needs 2048"),
        ({"index_n_heads": 64}, "index_n_heads is 64, it needs 32"),
        ({"v_head_dim": 128}, "v_head_dim is 128, it needs 256"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok is 4, it needs 8"),
        ({"routed_scaling_factor": 1.0}, "routed_scaling_factor is 1.0, it needs 2.5"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, it needs 1e-05"),
    ],
    ids=str,
)
def test_glm_52s_class_refuses_another_shape(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"not the shape that the step is written for: {told}$"):
        ModelingV2Glm52Nvfp4Sm107Tp16(glm_52(**changes))


def test_another_number_of_ranks_is_another_shape() -> None:
    with pytest.raises(ValueError) as raised:
        ModelingV2Glm52Nvfp4Sm107Tp16(glm_52(tp(8)))
    for told in ("tp_size is 8, it needs 16", "heads is 8, it needs 4"):
        assert told in str(raised.value)


def test_glm_52s_class_refuses_dtypes_that_its_kernels_do_not_take() -> None:
    with pytest.raises(ValueError, match="dtype is torch.float32; .* take torch.bfloat16"):
        ModelingV2Glm52Nvfp4Sm107Tp16(replace(glm_52(), dtype=torch.float32))
    with pytest.raises(ValueError, match="kv_cache_config.dtype is not 'fp8'"):
        ModelingV2Glm52Nvfp4Sm107Tp16(replace(glm_52(), kv_cache_fp8=False))


def test_ranks_that_do_not_divide_a_size_are_refused() -> None:
    with pytest.raises(ValueError, match="num_attention_heads is 4, which tp_size 3 does not"):
        ModelingV2GlmTinySmAnyTpAny(tiny(mapping=tp(3)))
    with pytest.raises(ValueError, match="vocab_size is 154880, which tp_size 3 does not"):
        ModelingV2Glm52Nvfp4Sm107Tp16(
            glm_52(tp(3), num_attention_heads=48, moe_intermediate_size=384)
        )


def test_the_modules_are_the_built_in_ones_under_their_names() -> None:
    """The loader fills what it fills of the built-in model, and context steps run the same code."""
    own, built_in = (model(tiny()) for model in (ModelingV2GlmTinySmAnyTpAny, GlmMoeDsaForCausalLM))
    names, theirs = (
        {spec.name: (spec.shape, spec.rows, spec.cols) for spec in model.weight_specs()}
        for model in (own, built_in)
    )
    assert names == theirs
    assert isinstance(own.model, DeepseekV3Model)
    assert {n: type(m) for n, m in own.model.layers.named_modules()} == {
        n: type(m) for n, m in built_in.model.layers.named_modules()
    }


@pytest.mark.parametrize("mtp_layers", [0, 1])
def test_without_drafts_the_worker_is_the_plain_one(mtp_layers: int) -> None:
    """With an MTP layer in the checkpoint that nothing drafts with, and without one."""
    raw = json.loads((CHECKPOINT / "config.json").read_text())
    pretrained = PretrainedConfig.from_dict({**raw, "num_nextn_predict_layers": mtp_layers})
    model = load_model(CHECKPOINT, tiny(pretrained_config=pretrained), load_format="dummy")
    assert model.draft_model is None
    assert type(model.create_spec_worker()) is SpecWorkerBase


def test_with_drafts_the_worker_shares_the_decode_step() -> None:
    model = load_model(CHECKPOINT, tiny(max_draft_len=DRAFTS))
    assert isinstance(model, GlmTarget) and isinstance(model.draft_model, MTPDraftModel)
    worker = model.create_spec_worker()
    assert isinstance(worker, MTPDraftWorker) and worker.max_draft_len == DRAFTS
    assert worker.decode is model.core.decode


# --- operands ---


@pytest.fixture
def derivations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The operands of every derivation within the test."""
    made: list[Any] = []

    def derive(*args: Any) -> Any:
        made.append(derive_operands(*args))
        return made[-1]

    monkeypatch.setattr(modeling, "derive_operands", derive)
    yield made


def test_operands_are_derived_once_whatever_runs(derivations: list[Any]) -> None:
    executor = engine()
    generate(executor, [prompt(9)], NEW_TOKENS)
    assert len(derivations) == 1
    assert core_of(executor).decode.parts.operands is derivations[0]


def test_no_operand_asks_for_a_gradient_or_has_a_graph(derivations: list[Any]) -> None:
    """Also where the surroundings would record one."""

    class Trained(ModelingV2GlmTinySmAnyTpAny):
        def post_load_weights(self, reader: CheckpointReader | None) -> None:
            for parameter in self.parameters():
                parameter.requires_grad_(True)
            super().post_load_weights(reader)

    with torch.enable_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tensorrt_llm._torch.models.loading.get_registered_model_class", lambda _name: Trained
        )
        model = load_model(CHECKPOINT, tiny(max_draft_len=DRAFTS))
        assert isinstance(model, GlmTarget)
        loop = model.create_spec_worker()
    assert isinstance(loop, MTPDraftWorker)
    held = list(tensors(derivations[0]))
    held += bound_tensors(model.core.decode.ops) + bound_tensors(loop.loop.ops)
    assert len(held) > 300
    assert not any(t.grad_fn for t in held)
    assert not any(t.requires_grad for t in held)


def bound_tensors(ops: Any) -> list[torch.Tensor]:
    """Everything that stays bound to the ops of a step."""
    found: list[torch.Tensor] = []
    for op in vars(ops).values():
        for row in (op._const, *op._layered.values()):
            found += [b.value for b in row.values() if isinstance(b.value, torch.Tensor)]
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_rank_0_reports_what_the_operands_take(
    ranks: int, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A lone rank's, as those of two would take both ranks; nothing runs here.
    lone = Workspaces.create(Mapping(), Geometry.of(tiny().pretrained_config, 1), torch.float32)
    monkeypatch.setattr(Workspaces, "create", lambda *_: lone)
    model = load_model(CHECKPOINT, tiny(mapping=tp(ranks), max_draft_len=DRAFTS))
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    told = [line for line in logged.messages if line.startswith("decode step")]
    assert len(told) == 1
    assert told[0].startswith(
        f"decode step: {stored_anew(ranks) / MIB:.1f} MiB derived from {own / MIB:.1f} MiB of "
        "weights, peak so far "
    )
    load_model(CHECKPOINT, tiny(mapping=tp(2, rank=1)))
    assert [line for line in logged.messages if line.startswith("decode step")] == told


def stored_anew(ranks: int) -> int:
    """Bytes of one rank, counted without `derived_bytes`: q_b and up_gate of each layer, wq_b of
    each indexer, and of the MTP layer the token table, the hidden half and, with more than one
    rank, the rank's columns of eh_proj; in fp32 no router weight."""
    c = tiny().pretrained_config
    layers, full, moe = 9, 5, 7  # with the MTP layer
    latent_row = c.kv_lora_rank + c.qk_rope_head_dim
    numbers = layers * c.num_attention_heads // ranks * latent_row * c.q_lora_rank
    numbers += full * c.index_n_heads * c.index_head_dim * c.q_lora_rank
    numbers += moe * c.n_routed_experts * 2 * c.moe_intermediate_size // ranks * c.hidden_size
    numbers += (c.vocab_size + c.hidden_size) // ranks * c.hidden_size
    numbers += (ranks > 1) * 2 * c.hidden_size // ranks * c.hidden_size
    return 4 * numbers


# --- phases ---


def prompt(length: int) -> list[int]:
    return (heldout(every=360)[0][0] * 4)[:length]


def test_post_load_weights_builds_both_phases() -> None:
    executor = engine()
    core = core_of(executor)
    assert {phase: type(target) for phase, target in core._targets.items()} == {
        Phase.PREFILL: PrefillTarget,
        Phase.DECODE: DecodeTarget,
    }


def test_running_before_weights_are_there_is_an_error() -> None:
    model = ModelingV2GlmTinySmAnyTpAny(tiny())
    md = SimpleNamespace(**dict.fromkeys(fields_of(METADATA), 0))
    with pytest.raises(RuntimeError, match="GlmCore has no targets yet; post_load_weights makes"):
        model.model(md, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


def test_context_steps_run_the_built_in_modules_and_the_others_the_fast_step() -> None:
    executor = engine()
    core, paths = core_of(executor), []
    core.register_forward_hook(
        lambda _core, args, _out: paths.append((args[0].num_contexts, core.path))
    )
    generate(executor, [prompt(9)], NEW_TOKENS)
    assert paths[0] == (1, BUILTIN)
    assert set(paths[1:]) == {(0, FAST)}


def prefilled(executor: PyExecutor, tokens: list[int]) -> dict[Role, torch.Tensor]:
    """The pools after a prompt, before any step without contexts; what is not written stays 0."""
    for role in Role:
        executor.kv_cache_manager.pool(role).zero_()
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    executor.add_requests([NewRequest(0, tokens, params)])
    while not executor.step():  # until the first token
        pass
    return {role: executor.kv_cache_manager.pool(role).clone() for role in Role}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft_len", [0, DRAFTS])
def test_a_prompts_caches_are_the_built_in_engines(
    dtype: str, kv_cache_dtype: str, draft_len: int
) -> None:
    """Bit for bit, in three chunks: a context server may run either."""
    settings = {
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "max_draft_len": draft_len,
        "max_num_tokens": 16,
    }
    own, built_in = (prefilled(engine(mode, **settings), prompt(41)) for mode in ("require", "off"))
    for role in Role:
        assert own[role].count_nonzero() > 41 * own[role].shape[1]  # bytes of tokens and layers
        assert torch.equal(own[role], built_in[role])


# --- the engine around it ---


def test_no_state_outlives_a_cache_manager() -> None:
    """The engine makes another one after profiling memory; a step on the old one's bytes, which
    are NaN by then, would give other tokens."""
    executor = engine(kv_cache_dtype="fp8")
    prompts = [prompt(30)]
    expected = generate(executor, prompts, NEW_TOKENS)
    for role in Role:
        executor.kv_cache_manager.pool(role).fill_(0xFF)
    assert generate(around(executor), prompts, NEW_TOKENS) == expected


def test_a_cache_manager_of_another_page_size_gives_the_same_tokens() -> None:
    """Pages, strides and table widths are asked for in each step."""
    executor = engine()
    prompts = [prompt(30)]
    expected = generate(executor, prompts, NEW_TOKENS)
    other = around(executor, tokens_per_block=16, kv_cache_max_tokens=512)
    assert other.kv_cache_manager.tokens_per_block != executor.kv_cache_manager.tokens_per_block
    assert generate(other, prompts, NEW_TOKENS) == expected


def around(executor: PyExecutor, **overrides: Any) -> PyExecutor:
    """Another engine with its own caches and the model of `executor`."""
    model = executor.model_engine.model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tensorrt_llm._torch.pyexecutor.py_executor_creator.load_model",
            lambda *_args, **_kwargs: model,
        )
        other = make_engine(replace(executor.config, **overrides))
    assert other.model_engine.model is model
    assert isinstance(other.kv_cache_manager, KVCacheManagerV2)
    assert other.kv_cache_manager is not executor.kv_cache_manager
    return other


@pytest.mark.parametrize(
    ("mode", "built"),
    [
        ("off", GlmMoeDsaForCausalLM),
        ("auto", ModelingV2GlmTinySmAnyTpAny),
        ("require", ModelingV2GlmTinySmAnyTpAny),
    ],
)
def test_the_mode_chooses_the_class(mode: str, built: type[nn.Module]) -> None:
    executor = engine(mode)
    assert type(executor.model_engine.model) is built
    generate(executor, [prompt(5)], 4)
    expected = {} if mode == "off" else {"target", "draft"}
    assert set(executor.stats().generation_steps) == set(expected)


# --- the metadata contract ---


class Metadata:
    """Has the listed fields, and nothing that a step could run on."""

    def __init__(self, missing: str) -> None:
        vars(self).update({name: 0 for name in fields_of(METADATA) if name != missing})


@pytest.fixture(scope="module")
def loaded() -> GlmTarget:
    model = load_model(CHECKPOINT, tiny())
    assert isinstance(model, GlmTarget)
    return model


@pytest.mark.parametrize("field", fields_of(METADATA))
def test_metadata_that_lacks_a_field_fails_in_the_first_step_by_its_name(
    field: str, loaded: GlmTarget
) -> None:
    loaded.core._contract_pending = True
    nothing = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(AssertionError, match=rf"Metadata lacks \['{field}'\], which modeling_v2"):
        loaded.core(Metadata(field), nothing, nothing)


def test_the_contract_is_checked_once() -> None:
    executor = engine()
    core = core_of(executor)
    assert core._contract_pending
    generate(executor, [prompt(5)], 4)
    assert not core._contract_pending
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlmCore, "_check_step_contract", None)
        generate(executor, [prompt(5)], 4)
