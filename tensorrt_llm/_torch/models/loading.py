"""From a checkpoint directory to a model with weights."""

from pathlib import Path

import torch

from tensorrt_llm._torch.models.checkpoints.dummy import fill_dummy
from tensorrt_llm._torch.models.checkpoints.loader import load_weights
from tensorrt_llm._torch.models.checkpoints.reader import CheckpointReader
from tensorrt_llm._torch.models.model_config import ARCHITECTURE, ModelConfig
from tensorrt_llm._torch.models.modeling_deepseekv3 import GlmMoeDsaForCausalLM
from tensorrt_llm._torch.models.modeling_utils import get_registered_model_class
from tensorrt_llm.logger import logger


def load_model(
    directory: Path, config: ModelConfig, *, load_format: str = "auto", progress: bool = False
) -> GlmMoeDsaForCausalLM:
    """Build the model, of the class that modeling_v2 chose where it did, and fill it from
    `directory`, or with random weights for `load_format` "dummy".

    Raises:
        CheckpointError: the checkpoint and the model do not agree, tensor by tensor.
    """
    model_class = get_registered_model_class(config.modeling_v2_target or ARCHITECTURE)
    with torch.device(config.device):
        model: GlmMoeDsaForCausalLM = model_class(config).eval()
    if load_format == "dummy":
        fill_dummy(model.weight_specs())
        model.post_load_weights(None)
        return model
    reader = CheckpointReader(directory)
    report = load_weights(reader, model.weight_specs(), model.unused_weights(), progress=progress)
    if progress:
        logger.info("%s", report)
    model.post_load_weights(reader)
    return model
