"""Reading checkpoints: hub layout, quantised formats, and the accounting of every tensor."""

from tensorrt_llm._torch.models.checkpoints.dummy import fill_dummy
from tensorrt_llm._torch.models.checkpoints.loader import (
    TOLERATED_EXTRAS,
    LoadReport,
    load_weights,
)
from tensorrt_llm._torch.models.checkpoints.reader import CheckpointError, CheckpointReader
from tensorrt_llm._torch.modules.weight_spec import WeightSpec

__all__ = [
    "TOLERATED_EXTRAS",
    "CheckpointError",
    "CheckpointReader",
    "LoadReport",
    "WeightSpec",
    "fill_dummy",
    "load_weights",
]
