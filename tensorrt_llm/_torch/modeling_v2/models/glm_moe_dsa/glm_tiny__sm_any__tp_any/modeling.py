"""glm_tiny on any machine: the target's classes at whatever sizes the small checkpoint has."""

from tensorrt_llm._torch.models.model_config import ModelConfig
from tensorrt_llm._torch.models.modeling_utils import register_auto_model

from ..glm_5_2_nvfp4__sm_107__tp16.geometry import Geometry
from ..glm_5_2_nvfp4__sm_107__tp16.modeling import GlmTarget


@register_auto_model("ModelingV2GlmTinySmAnyTpAny")
class ModelingV2GlmTinySmAnyTpAny(GlmTarget):
    """Its sizes are in no kernel, so that the checkpoint's own hold."""

    @staticmethod
    def geometry_of(config: ModelConfig) -> Geometry:
        """See `GlmTarget`."""
        return Geometry.of(config.pretrained_config, config.mapping.tp_size)
