"""off, auto and require, from the argument to the class that a rank builds."""

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.engine import executor_config, generate, make_engine
from helpers.glm_52 import glm_52_config
from helpers.glm_oracle import make_checkpoint, random_prompt
from helpers.glm_tiny import CHECKPOINT

from tensorrt_llm._torch.modeling_v2 import _router_index
from tensorrt_llm._torch.modeling_v2._core import ModelingV2Core
from tensorrt_llm._torch.modeling_v2._router_index import (
    NULL_TRACE,
    ModelingV2Context,
    ModelingV2Mode,
    NoTarget,
    Trace,
    find_target,
    modeling_v2_resolve,
)
from tensorrt_llm._torch.modeling_v2._target import Phase, Target, phase_of
from tensorrt_llm._torch.modeling_v2.models.glm_moe_dsa import routing
from tensorrt_llm._torch.models.model_config import ModelConfig, PretrainedConfig, QuantConfig
from tensorrt_llm._torch.models.modeling_deepseekv3 import DeepseekV3Model, GlmMoeDsaForCausalLM
from tensorrt_llm._torch.models.modeling_utils import register_auto_model
from tensorrt_llm.logger import logger
from tensorrt_llm.mapping import Mapping

TINY = "glm_tiny"
TWO_HALVES = "TwoHalvesOfTheBuiltInModel"


@dataclass(frozen=True)
class Args:
    modeling_v2: str = "require"
    max_batch_size: int = 1
    max_num_tokens: int = 64


class Recorded(Target):
    """The built-in layers, and a note of each forward's phase."""

    phases: list[tuple[type[Target], int]] = []

    def step_args(self, md: Any) -> dict[str, Any]:
        return {}

    def forward(self, attn_metadata: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.phases.append((type(self), attn_metadata.num_contexts))
        return DeepseekV3Model.forward(self.core, attn_metadata, *args, **kwargs)


class PrefillTarget(Recorded):
    pass


class DecodeTarget(Recorded):
    pass


class TwoHalvesCore(ModelingV2Core):
    def __init__(self, built_in: DeepseekV3Model) -> None:
        super().__init__()
        self.embed_tokens, self.rotary = built_in.embed_tokens, built_in.rotary
        self.layers, self.norm = built_in.layers, built_in.norm

    def build_targets(self) -> dict[Phase, Target]:
        assert not self.norm.weight.isnan().any()
        return {Phase.PREFILL: PrefillTarget(self), Phase.DECODE: DecodeTarget(self)}


@register_auto_model(TWO_HALVES)
class TwoHalves(GlmMoeDsaForCausalLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.built_in = self.model
        self.model = TwoHalvesCore(self.model)

    def weight_specs(self) -> Any:
        yield from self.built_in.weight_specs("model")
        yield from self.lm_head.weight_specs("lm_head")

    def post_load_weights(self, reader: object) -> None:
        self.model.post_load_weights()


@pytest.fixture
def two_halves(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """glm_tiny's row leads to `TwoHalves`; yields what its targets ran."""
    name = "models.glm_moe_dsa.two_halves"
    monkeypatch.setitem(routing._TARGETS, TINY, TWO_HALVES)
    monkeypatch.setitem(routing.TARGET_MODULES, TWO_HALVES, name)
    monkeypatch.setitem(sys.modules, f"{_router_index.PACKAGE}.{name}", ModuleType("two_halves"))
    Recorded.phases.clear()
    yield Recorded.phases


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(routing.TARGET_MODULES, routing._TARGETS[TINY], "models.nowhere.modeling")


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger=logger.name):
        yield caplog
    logger.removeHandler(caplog.handler)


def tiny_config(**changes: Any) -> ModelConfig:
    settings: dict[str, Any] = {
        "pretrained_config": PretrainedConfig.from_directory(CHECKPOINT),
        "mapping": Mapping(),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    return ModelConfig(**{**settings, **changes})


def other_config(**changes: Any) -> ModelConfig:
    config = PretrainedConfig.from_dict(glm_52_config(hidden_size=7168))
    return tiny_config(pretrained_config=config, **changes)


def test_off_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_router_index, "find_target", None)
    assert modeling_v2_resolve(tiny_config(), Args("off")) is None


@pytest.mark.parametrize("mode", ["auto", "require"])
def test_a_target_is_resolved_to_its_registered_name(mode: str, two_halves: list[Any]) -> None:
    assert modeling_v2_resolve(tiny_config(), Args(mode)) == TWO_HALVES


def test_a_typo_is_no_mode() -> None:
    with pytest.raises(ValueError, match="modeling_v2 is 'on'; it must be one of .'off', 'auto'"):
        ModelingV2Mode.of(Args("on"))


def test_require_tells_the_criteria_that_were_looked_at() -> None:
    config = PretrainedConfig.from_dict(glm_52_config())
    with pytest.raises(ValueError) as raised:
        modeling_v2_resolve(tiny_config(pretrained_config=config), Args())
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("modeling_v2 is 'require', but glm_5_2_nvfp4 has no target here: sm")
    assert "  shape: (78, 6144, 256, 2048) -> glm_5_2_nvfp4" in lines
    assert "  sm: None no match" in lines


def test_auto_logs_what_missed_on_the_first_rank_only(logged: pytest.LogCaptureFixture) -> None:
    assert modeling_v2_resolve(other_config(), Args("auto")) is None
    assert "shape (layers, hidden, experts, q_lora_rank) is (78, 7168" in logged.text
    assert "the built-in model runs" in logged.text
    second = other_config(mapping=Mapping(world_size=2, tp_size=2, rank=1))
    logged.clear()
    assert modeling_v2_resolve(second, Args("auto")) is None
    assert not logged.records


def test_what_is_claimed_and_not_built_is_an_error_or_logged(
    not_built: None, logged: pytest.LogCaptureFixture
) -> None:
    message = "target ModelingV2GlmTinySmAnyTpAny is claimed but not built in this tree"
    with pytest.raises(ValueError, match=message):
        modeling_v2_resolve(tiny_config(), Args())
    assert modeling_v2_resolve(tiny_config(), Args("auto")) is None
    assert f"{message}; the built-in model runs" in logged.text


def test_a_target_that_cannot_be_imported_is_no_missing_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'cutlass'", name="cutlass")

    monkeypatch.setattr(_router_index.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="cutlass"):
        _router_index.is_built("models.glm_moe_dsa.x.modeling")


def test_an_out_of_bounds_claim_is_told_from_no_claim(
    two_halves: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "within_bounds", lambda _target, args, *_: args.max_batch_size < 9)
    assert modeling_v2_resolve(tiny_config(), Args(max_batch_size=8)) == TWO_HALVES
    with pytest.raises(ValueError, match=f"{TWO_HALVES} claims the deployment, but it is out of"):
        modeling_v2_resolve(tiny_config(), Args(max_batch_size=9))


def test_another_architecture_has_no_targets() -> None:
    config = PretrainedConfig.from_dict(glm_52_config())
    other = replace(config, raw={"architectures": ["LlamaForCausalLM"]})
    context = ModelingV2Context.from_model_config(tiny_config(pretrained_config=other))
    assert find_target(context, None, Trace()) == NoTarget(
        "architecture LlamaForCausalLM has no targets"
    )


def test_the_null_trace_keeps_nothing() -> None:
    assert NULL_TRACE.check("sm", 1, True) and not NULL_TRACE.check("sm", 1, False)
    assert NULL_TRACE.resolve("shape", 1, "x") == "x"
    assert not NULL_TRACE.steps


def test_the_context_is_the_model_configs() -> None:
    config = tiny_config(max_draft_len=3, quant_config=QuantConfig("NVFP4"))
    context = ModelingV2Context.from_model_config(config)
    assert (context.sm, context.quant_config.quant_algo) == (None, "NVFP4")
    assert context.spec_config is not None
    assert context.spec_config.spec_dec_mode.name == "MTP_EAGLE_ONE_MODEL"
    assert context.spec_config.max_draft_len == 3
    assert ModelingV2Context.from_model_config(tiny_config()).spec_config is None


def test_an_engine_runs_the_required_target_by_phase(two_halves: list[Any]) -> None:
    prompts = [random_prompt(11, seed) for seed in (0, 1)]
    expected = generate(make_engine(executor_config(CHECKPOINT)), prompts, 6)
    assert not two_halves
    engine = make_engine(executor_config(CHECKPOINT, modeling_v2="require"))
    assert generate(engine, prompts, 6) == expected
    assert {target for target, contexts in two_halves if contexts} == {PrefillTarget}
    assert {target for target, contexts in two_halves if not contexts} == {DecodeTarget}


def test_an_engine_without_the_required_target_does_not_start(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "glm52", seed=0)
    with pytest.raises(ValueError, match=r"'require', but shape .* is \(8, 64, 8, 48\)"):
        make_engine(executor_config(checkpoint, modeling_v2="require"))
    make_engine(executor_config(checkpoint, modeling_v2="auto"))


@dataclass
class Metadata:
    num_contexts: int


def test_generations_alone_are_decode() -> None:
    assert phase_of(Metadata(0)) is Phase.DECODE
    assert phase_of(Metadata(1)) is phase_of(Metadata(2)) is Phase.PREFILL


def test_metadata_that_drifted_fails_in_the_first_forward() -> None:
    core = TwoHalvesCore(DeepseekV3Model(tiny_config()))
    with pytest.raises(AssertionError, match=r"object lacks \['num_contexts'"):
        core(object())
