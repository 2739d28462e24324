"""What one of GLM-5.2's 16 ranks has, on each rank of a smaller machine."""

from dataclasses import replace

from tensorrt_llm._torch.models.model_config import ModelConfig
from tensorrt_llm._torch.models.modeling_utils import register_auto_model

from ..glm_5_2_nvfp4__sm_107__tp16.geometry import GLM_5_2_TP16, Geometry
from ..glm_5_2_nvfp4__sm_107__tp16.modeling import GlmTarget


@register_auto_model("ModelingV2Glm52SliceSmAnyTpAny")
class ModelingV2Glm52SliceSmAnyTpAny(GlmTarget):
    """GLM-5.2's per-rank shapes, so exactly its kernels, at another number of ranks."""

    @staticmethod
    def geometry_of(config: ModelConfig) -> Geometry:
        """See `GlmTarget`."""
        tp_size = config.mapping.tp_size
        geometry = replace(GLM_5_2_TP16, tp_size=tp_size)
        geometry.check(config.pretrained_config, tp_size)
        return geometry
