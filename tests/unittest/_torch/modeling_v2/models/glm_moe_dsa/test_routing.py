"""Which GlmMoeDsaForCausalLM deployments get a target, and what is said about all others."""

import re
from dataclasses import replace
from typing import Any

import pytest
from helpers.glm_52 import glm_52_config
from helpers.glm_oracle import hub_config
from helpers.glm_tiny import CHECKPOINT

from tensorrt_llm._torch.modeling_v2._router_index import ModelingV2Context, NoTarget, Trace
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa.routing import route
from tensorrt_llm._torch.models.model_config import PretrainedConfig, QuantConfig
from tensorrt_llm._torch.speculative.interface import SpecConfig, SpeculativeDecodingMode
from tensorrt_llm.mapping import Mapping

GLM_52_TARGET = "ModelingV2Glm52Nvfp4Sm107Tp16"
TINY_TARGET = "ModelingV2GlmTinySmAnyTpAny"
SLICE_TARGET = "ModelingV2Glm52SliceSmAnyTpAny"
MTP_EAGLE, MTP, NGRAM = (
    SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL,
    SpeculativeDecodingMode.MTP,
    SpeculativeDecodingMode.NGRAM,
)


def tp(size: int, **changes: Any) -> Mapping:
    return Mapping(world_size=size, tp_size=size, **changes)


def glm_52(**changes: Any) -> PretrainedConfig:
    return PretrainedConfig.from_dict(glm_52_config(**changes))


def slice_of(tp_size: int, **changes: Any) -> PretrainedConfig:
    """What `tp_size` of GLM-5.2's 16 ranks have."""
    sizes = {
        "num_attention_heads": 4 * tp_size,
        "moe_intermediate_size": 128 * tp_size,
        "intermediate_size": 768 * tp_size,
        "vocab_size": 9680 * tp_size,
        "num_hidden_layers": 8,
    }
    return glm_52(**{**sizes, **changes})


CLAIMED = ModelingV2Context(
    pretrained_config=glm_52(),
    mapping=tp(16),
    sm=(10, 7),
    quant_config=QuantConfig("NVFP4"),
    spec_config=SpecConfig(MTP_EAGLE, 7),
)


@pytest.mark.parametrize("spec", [None, *(SpecConfig(MTP_EAGLE, k) for k in (1, 3, 7, 15))])
@pytest.mark.parametrize("rank", [0, 15])
def test_glm_52_is_claimed_with_any_draft_length_and_without(
    spec: SpecConfig | None, rank: int
) -> None:
    assert route(replace(CLAIMED, spec_config=spec, mapping=tp(16, rank=rank))) == GLM_52_TARGET


NEAR_MISSES = [
    ({"pretrained_config": glm_52(num_hidden_layers=77)}, "shape", r"is \(77, 6144, 256, 2048\)"),
    ({"pretrained_config": glm_52(hidden_size=7168)}, "shape", r"is \(78, 7168, 256, 2048\)"),
    ({"pretrained_config": glm_52(n_routed_experts=128)}, "shape", r"is \(78, 6144, 128, 2048\)"),
    ({"pretrained_config": glm_52(q_lora_rank=1536)}, "shape", r"is \(78, 6144, 256, 1536\)"),
    ({"mapping": tp(16, enable_attention_dp=True)}, "enable_attention_dp", "is True, .* False"),
    ({"mapping": tp(16, moe_ep_size=16)}, "moe_ep_size", "is 16, it needs 1"),
    ({"mapping": tp(16, moe_ep_size=4)}, "moe_ep_size", "is 4, it needs 1"),
    ({"mapping": tp(16, moe_cluster_size=4, moe_tp_size=4)}, "moe_cluster_size", "is 4"),
    ({"mapping": tp(8)}, "tp_size", "is 8, it needs 16"),
    ({"mapping": tp(1)}, "tp_size", "is 1, it needs 16"),
    ({"mapping": Mapping(world_size=32, tp_size=16, pp_size=2)}, "world_size", "is 32"),
    ({"mapping": Mapping(world_size=32, tp_size=16, cp_size=2)}, "world_size", "is 32"),
    ({"spec_config": SpecConfig(MTP, 1)}, "spec", "is MTP:1, it needs MTP_EAGLE_ONE_MODEL"),
    ({"spec_config": SpecConfig(NGRAM, 4)}, "spec", "is NGRAM:4, it needs MTP_EAGLE_ONE_MODEL"),
    ({"sm": (10, 3)}, "sm", r"is \(10, 3\), it needs \(10, 7\)"),
    ({"sm": (10, 0)}, "sm", r"is \(10, 0\), it needs \(10, 7\)"),
    ({"sm": (9, 0)}, "sm", r"is \(9, 0\), it needs \(10, 7\)"),
    ({"sm": None}, "sm", r"is None, it needs \(10, 7\)"),
    ({"quant_config": QuantConfig("FP8_BLOCK_SCALES")}, "quant", "is FP8_BLOCK_SCALES, .* NVFP4"),
    ({"quant_config": QuantConfig()}, "quant", "is None, it needs NVFP4"),
]


@pytest.mark.parametrize(
    ("changes", "criterion", "value"), NEAR_MISSES, ids=[f"{c}-{v}" for _, c, v in NEAR_MISSES]
)
def test_a_near_miss_has_no_target_and_names_what_missed(
    changes: dict[str, Any], criterion: str, value: str
) -> None:
    trace = Trace()
    answer = route(replace(CLAIMED, **changes), trace)
    assert isinstance(answer, NoTarget)
    assert re.search(rf"{criterion}\b.* {value}", answer.reason)
    assert criterion in {step.label for step in trace.steps if step.outcome is None}


def test_every_criterion_that_missed_is_named() -> None:
    answer = route(replace(CLAIMED, sm=(9, 0), mapping=tp(8), spec_config=SpecConfig(NGRAM, 4)))
    assert isinstance(answer, NoTarget)
    assert all(f"{name} is" in answer.reason for name in ("sm", "tp_size", "world_size", "spec"))
    assert "quant" not in answer.reason


def test_the_trace_tells_all_criteria_in_order() -> None:
    trace = Trace()
    route(CLAIMED, trace)
    labels = ["shape", "sm", "quant", "tp_size", "world_size", "moe_ep_size", "moe_cluster_size"]
    assert [step.label for step in trace.steps] == [*labels, "enable_attention_dp", "spec"]
    assert str(trace.steps[0]) == "shape: (78, 6144, 256, 2048) -> glm_5_2_nvfp4"
    assert all(step.outcome for step in trace.steps)


ANYWHERE = [None, (9, 0), (10, 0), (10, 3), (10, 7)]


@pytest.mark.parametrize("sm", ANYWHERE)
@pytest.mark.parametrize("tp_size", [1, 2, 4, 16])
@pytest.mark.parametrize("algorithm", [None, "NVFP4"])
def test_glm_tiny_runs_anywhere(
    sm: tuple[int, int] | None, tp_size: int, algorithm: str | None
) -> None:
    context = replace(
        CLAIMED,
        pretrained_config=PretrainedConfig.from_directory(CHECKPOINT),
        mapping=tp(tp_size),
        sm=sm,
        quant_config=QuantConfig(algorithm),
    )
    assert route(context) == TINY_TARGET


@pytest.mark.parametrize("sm", ANYWHERE)
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("layers", [4, 8, 78])
def test_a_slice_runs_anywhere_on_as_many_ranks_as_it_was_cut_for(
    sm: tuple[int, int] | None, tp_size: int, layers: int
) -> None:
    config = slice_of(tp_size, num_hidden_layers=layers)
    context = replace(CLAIMED, pretrained_config=config, mapping=tp(tp_size), sm=sm)
    assert route(context) == SLICE_TARGET
    for other in {1, 2, 4, 8, 16} - {tp_size}:
        assert route(replace(context, mapping=tp(other))) != SLICE_TARGET


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 79},
        {"num_attention_heads": 8},
        {"moe_intermediate_size": 256},
        {"intermediate_size": 1536},
        {"vocab_size": 19360},
        {"q_lora_rank": 1536},
    ],
)
def test_what_is_no_slice_is_not_taken_for_one(changes: dict[str, int]) -> None:
    config = slice_of(1, **changes)
    answer = route(replace(CLAIMED, pretrained_config=config, mapping=tp(1)))
    assert isinstance(answer, NoTarget)


@pytest.mark.parametrize("changes", [c for c, name, _ in NEAR_MISSES if name != "shape"])
def test_bring_up_rows_never_claim_glm_52(changes: dict[str, Any]) -> None:
    assert isinstance(route(replace(CLAIMED, **changes)), NoTarget)


@pytest.mark.parametrize("config", [slice_of(2), PretrainedConfig.from_directory(CHECKPOINT)])
@pytest.mark.parametrize(
    "changes",
    [
        {"mapping": tp(2, enable_attention_dp=True)},
        {"mapping": tp(2, moe_ep_size=2)},
        {"spec_config": SpecConfig(NGRAM, 4)},
        {"spec_config": SpecConfig(MTP, 1)},
    ],
)
def test_bring_up_rows_ask_for_the_same_layout_and_drafting(
    config: PretrainedConfig, changes: dict[str, Any]
) -> None:
    context = replace(CLAIMED, pretrained_config=config, mapping=tp(2))
    assert not isinstance(route(context), NoTarget)
    assert isinstance(route(replace(context, **changes)), NoTarget)


def test_an_unknown_shape_lists_the_known_ones() -> None:
    config = PretrainedConfig.from_dict(hub_config({}))
    answer = route(replace(CLAIMED, pretrained_config=config))
    assert isinstance(answer, NoTarget)
    assert "(8, 64, 8, 48); known are [(78, 6144, 256, 2048), (8, 128, 8, 64)]" in answer.reason
