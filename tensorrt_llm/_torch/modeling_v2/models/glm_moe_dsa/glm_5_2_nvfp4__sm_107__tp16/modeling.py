"""The target's model: the built-in modules and loader, and a trunk that runs each step's phase."""

import resource
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tensorrt_llm._torch.modeling_v2._core import ModelingV2Core
from tensorrt_llm._torch.modeling_v2._target import Phase, Target
from tensorrt_llm._torch.models.checkpoints.reader import CheckpointReader
from tensorrt_llm._torch.models.model_config import ModelConfig
from tensorrt_llm._torch.models.modeling_deepseekv3 import DeepseekV3Model, GlmMoeDsaForCausalLM
from tensorrt_llm._torch.models.modeling_utils import register_auto_model
from tensorrt_llm._torch.modules.embedding import LMHead
from tensorrt_llm._torch.modules.logits_processor import LogitsProcessor
from tensorrt_llm._torch.speculative.interface import SpecWorkerBase
from tensorrt_llm.logger import logger

from .decode import BUILTIN, FAST, DecodeTarget, StepParts
from .draft import MTPDraftWorker
from .geometry import GLM_5_2_TP16, Geometry
from .weights import derive_operands, derived_bytes
from .workspaces import Workspaces

MIB = 1 << 20


class PrefillTarget(Target):
    """Steps with context rows: the built-in modules, whose caches the decode step reads on."""

    path = BUILTIN

    def step_args(self, md: Any) -> dict[str, Any]:
        """No op of this package runs."""
        return {}

    def forward(
        self, attn_metadata: Any, input_ids: Tensor, position_ids: Tensor, **kwargs: Any
    ) -> Tensor:
        """See `Target`."""
        return self.core.builtin_forward(attn_metadata, input_ids, position_ids)


class GlmCore(ModelingV2Core, DeepseekV3Model):
    """The built-in trunk's modules under their own names, with the two targets in front.

    Attributes:
        parts: what the decode step is made of, set once the weights are there.
    """

    parts: StepParts

    def build_targets(self) -> dict[Phase, Target]:
        """See `ModelingV2Core`."""
        return {
            Phase.PREFILL: PrefillTarget(self),
            Phase.DECODE: DecodeTarget(self, self.parts),
        }

    def builtin_forward(
        self, attn_metadata: Any, input_ids: Tensor, position_ids: Tensor
    ) -> Tensor:
        """The built-in model's own forward."""
        return DeepseekV3Model.forward(self, attn_metadata, input_ids, position_ids)

    @property
    def decode(self) -> DecodeTarget:
        target = self._targets[Phase.DECODE]
        assert isinstance(target, DecodeTarget)
        return target


class VerifyLogits(LogitsProcessor):
    """Logits of a fast step by its own LM head and all-gather, of all others as built in."""

    def __init__(self, core: GlmCore) -> None:
        super().__init__()
        self._core = (core,)  # a plain reference: the model owns it

    def forward(
        self,
        hidden_states: Tensor,
        lm_head: LMHead,
        gather_ids: Tensor | None,
        return_context_logits: bool = False,
    ) -> Tensor:
        """See `LogitsProcessor`."""
        core = self._core[0]
        if core.path == FAST and gather_ids is None:
            return core.decode.verify_logits(hidden_states)
        return super().forward(hidden_states, lm_head, gather_ids, return_context_logits)


class GlmTarget(GlmMoeDsaForCausalLM):
    """What the targets of this family share; a subclass names its geometry."""

    model_class: ClassVar[type[DeepseekV3Model]] = GlmCore

    def __init__(self, config: ModelConfig) -> None:
        self.geometry = self.geometry_of(config)
        super().__init__(config)
        self.logits_processor = VerifyLogits(self.core)

    @staticmethod
    def geometry_of(config: ModelConfig) -> Geometry:
        """A rank's sizes.

        Raises:
            ValueError: a model or a layout that the step is not written for.
        """
        raise NotImplementedError

    @property
    def core(self) -> GlmCore:
        assert isinstance(self.model, GlmCore)
        return self.model

    def post_load_weights(self, reader: CheckpointReader | None) -> None:
        """Derive the step's operands, once, and make its workspaces; collective."""
        operands = derive_operands(self, reader)
        config = self.config
        self.core.parts = StepParts(
            operands,
            self.geometry,
            config.cache_layout,
            Workspaces.create(config.mapping, self.geometry, config.dtype),
            config.mapping,
        )
        self.core.post_load_weights()
        if config.mapping.rank == 0:
            logger.info("%s", memory_report(self, derived_bytes(operands, self), config.device))

    def create_spec_worker(self) -> SpecWorkerBase:
        """See `GlmMoeDsaForCausalLM`."""
        if self.draft_model is None:
            return super().create_spec_worker()
        config = self.config
        share = config.pretrained_config.index_share_for_mtp_iteration
        return MTPDraftWorker(config.max_draft_len, config.mapping, share, self.core.decode)


def check_kernel_dtypes(config: ModelConfig) -> None:
    """Raises ValueError unless the model runs in the dtypes that the kernels are written for."""
    if config.dtype != torch.bfloat16:
        raise ValueError(f"dtype is {config.dtype}; the decode step's kernels take torch.bfloat16")
    if not config.kv_cache_fp8:
        raise ValueError("kv_cache_config.dtype is not 'fp8'; the decode step's kernels read e4m3")


def memory_report(model: nn.Module, derived: int, device: torch.device) -> str:
    """What the step's operands take beside the modules' parameters, which stay for the fallback."""
    own = sum(p.nbytes for p in model.parameters())
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of the whole process
    return (
        f"decode step: {derived / MIB:.1f} MiB derived from {own / MIB:.1f} MiB of weights, "
        f"peak so far {peak / MIB:.1f} MiB"
    )


@register_auto_model("ModelingV2Glm52Nvfp4Sm107Tp16")
class ModelingV2Glm52Nvfp4Sm107Tp16(GlmTarget):
    """GLM-5.2 in NVFP4 on 16 ranks."""

    @staticmethod
    def geometry_of(config: ModelConfig) -> Geometry:
        """See `GlmTarget`."""
        GLM_5_2_TP16.check(config.pretrained_config, config.mapping.tp_size)
        check_kernel_dtypes(config)
        return GLM_5_2_TP16
