"""Which deployment runs which target: the table of routing modules, and the decision.

A rank decides once, when it builds its model. Routing looks only at what is known then and stays
for the engine's life, and what changes the structure of the forward: the shape of the checkpoint,
its quantisation, the GPU architecture, the parallel layout, the kind of drafting. Sizes that only
tune (`max_batch_size`, `max_num_tokens`) belong to a routing module's `within_bounds`, and what
changes from step to step to the target itself.
"""

import importlib
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType
from typing import Any, Protocol

import torch

from tensorrt_llm._torch.models.model_config import ModelConfig, PretrainedConfig, QuantConfig
from tensorrt_llm._torch.speculative.interface import SpecConfig
from tensorrt_llm.logger import logger
from tensorrt_llm.mapping import Mapping

PACKAGE = __package__

# architectures[0] of config.json -> routing module, relative to this package. A new checkpoint,
# architecture of GPU or layout goes into its family's routing module; only a family comes here.
MODELING_V2_ROUTERS = {"GlmMoeDsaForCausalLM": "models.glm_moe_dsa.routing"}


class ModelingV2Mode(StrEnum):
    """off: the built-in model. auto: the target where there is one. require: the target or an
    error."""

    OFF = "off"
    AUTO = "auto"
    REQUIRE = "require"

    @classmethod
    def of(cls, args: "TuningArgs") -> "ModelingV2Mode":
        """The mode that the arguments ask for.

        Raises:
            ValueError: no mode of that name.
        """
        modes = [mode.value for mode in cls]
        if args.modeling_v2 not in modes:
            raise ValueError(f"modeling_v2 is {args.modeling_v2!r}; it must be one of {modes}")
        return cls(args.modeling_v2)


class TuningArgs(Protocol):
    """The engine arguments that modeling_v2 reads."""

    @property
    def modeling_v2(self) -> str: ...

    @property
    def max_batch_size(self) -> int: ...

    @property
    def max_num_tokens(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class ModelingV2Context:
    """What routing decides on.

    Attributes:
        sm: compute capability (major, minor); None on the CPU.
        spec_config: None without drafts.
        is_disagg: no engine sets it yet, so no routing may read it.
    """

    pretrained_config: PretrainedConfig
    mapping: Mapping
    sm: tuple[int, int] | None
    quant_config: QuantConfig
    spec_config: SpecConfig | None
    is_disagg: bool = False

    @classmethod
    def from_model_config(cls, model_config: ModelConfig) -> "ModelingV2Context":
        cuda = model_config.device.type == "cuda"
        return cls(
            pretrained_config=model_config.pretrained_config,
            mapping=model_config.mapping,
            sm=torch.cuda.get_device_capability(model_config.device) if cuda else None,
            quant_config=model_config.quant_config,
            spec_config=model_config.spec_config,
        )


@dataclass(frozen=True)
class NoTarget:
    """There is no target, and why: the criteria that missed, each with its value."""

    reason: str


@dataclass(frozen=True)
class Step:
    """One criterion: what was looked at, its value, and what came of it; None is a miss."""

    label: str
    value: Any
    outcome: str | None

    def __str__(self) -> str:
        verdict = "no match" if self.outcome is None else f"-> {self.outcome}"
        return f"{self.label}: {self.value!r} {verdict}"


@dataclass
class Trace:
    """The criteria of one decision, in order."""

    steps: list[Step] = field(default_factory=list)

    def check(self, label: str, value: Any, ok: bool) -> bool:
        """Note a criterion that holds or not; returns `ok`."""
        self._add(Step(label, value, "ok" if ok else None))
        return ok

    def resolve(self, label: str, value: Any, outcome: str | None) -> str | None:
        """Note a value that names something, or None where it names nothing; returns `outcome`."""
        self._add(Step(label, value, outcome))
        return outcome

    def _add(self, step: Step) -> None:
        self.steps.append(step)


class _NullTrace(Trace):
    def _add(self, step: Step) -> None:
        pass


NULL_TRACE = _NullTrace()


def routing_module(architecture: str) -> ModuleType | None:
    """The family's routing module, None for an architecture that has no targets."""
    name = MODELING_V2_ROUTERS.get(architecture)
    return importlib.import_module(f"{PACKAGE}.{name}") if name else None


def find_target(
    context: ModelingV2Context, args: TuningArgs | None, trace: Trace
) -> str | NoTarget:
    """The target of a deployment, by the name its class is registered under.

    Args:
        args: bounds are checked against them; None leaves bounds alone.
    """
    architecture = context.pretrained_config.architectures[0]
    module = routing_module(architecture)
    if module is None:
        return NoTarget(f"architecture {architecture} has no targets")
    target = module.route(context, trace)
    if isinstance(target, NoTarget):
        return target
    if args is not None and not module.within_bounds(target, args, context, trace):
        return NoTarget(f"{target} claims the deployment, but it is out of its bounds")
    if not is_built(module.TARGET_MODULES[target]):
        return NoTarget(f"target {target} is claimed but not built in this tree")
    return target


def is_built(target_module: str) -> bool:
    """Import a target's modeling module, which registers its class; False when there is none."""
    name = f"{PACKAGE}.{target_module}"
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, and needs something that is not
        return False
    return True


def modeling_v2_resolve(model_config: ModelConfig, args: TuningArgs) -> str | None:
    """The name of the class to build instead of the built-in one; None keeps that.

    Raises:
        ValueError: mode "require" and no target, with every criterion that was looked at.
    """
    mode = ModelingV2Mode.of(args)
    if mode is ModelingV2Mode.OFF:
        return None
    trace = Trace()
    target = find_target(ModelingV2Context.from_model_config(model_config), args, trace)
    first = model_config.mapping.rank == 0
    if isinstance(target, str):
        if first:
            logger.info("modeling_v2: target %s runs", target)
        return target
    if mode is ModelingV2Mode.REQUIRE:
        raise ValueError(no_match_message(target, trace))
    if first:
        logger.info("modeling_v2: %s; the built-in model runs", target.reason)
    return None


def no_match_message(missed: NoTarget, trace: Trace) -> str:
    """Why "require" cannot be met: the reason, then one line per criterion."""
    steps = "".join(f"\n  {step}" for step in trace.steps)
    return f"modeling_v2 is 'require', but {missed.reason}{steps}"
