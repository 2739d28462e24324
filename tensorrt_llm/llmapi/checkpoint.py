"""What the server process has to know of a checkpoint before it starts ranks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURE = "GlmMoeDsaForCausalLM"

_DTYPES = ("float32", "bfloat16", "float16")

# Sizes that are cut into equal slices, one per tensor-parallel rank.
_SPLIT_OVER_TP = ("num_attention_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory in the hub layout.

    Args:
        directory: where it is.
        config: its parsed config.json.
    """

    directory: Path
    config: dict[str, Any]

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Read config.json.

        Raises:
            ValueError: no such directory, no readable config.json in it, or another architecture.
        """
        if not directory.is_dir():
            raise ValueError(f"model is '{directory}'; it must be an existing directory")
        path = directory / "config.json"
        if not path.is_file():
            raise ValueError(f"model '{directory}' has no config.json")
        try:
            config = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        architectures = config.get("architectures") if isinstance(config, dict) else None
        if architectures != [ARCHITECTURE]:
            raise ValueError(
                f"{path}: architectures is {architectures}; only {ARCHITECTURE} is served"
            )
        return cls(directory, config)

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Raises ValueError naming every size that `tp_size` ranks cannot share equally."""
        sizes = {name: self.config.get(name) for name in _SPLIT_OVER_TP}
        uneven = [f"{k} {v}" for k, v in sizes.items() if isinstance(v, int) and v % tp_size]
        if uneven:
            raise ValueError(f"tensor_parallel_size {tp_size} does not divide {', '.join(uneven)}")

    def check_drafting(self) -> None:
        """Raises ValueError when there is no MTP layer to draft with."""
        layers = self.config.get("num_nextn_predict_layers")
        if not layers:
            raise ValueError(
                "speculative_config asks for MTP, but the checkpoint has no MTP layer "
                f"(num_nextn_predict_layers is {layers})"
            )

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence in tokens. Raises ValueError when config.json does not say."""
        value = self.config.get("max_position_embeddings")
        if not isinstance(value, int):
            raise ValueError(f"{self.directory}/config.json lacks max_position_embeddings")
        return value

    @property
    def dtype(self) -> str:
        """Data type of the weights, float32 when config.json does not say (as in transformers).

        Raises:
            ValueError: one that the model cannot compute in.
        """
        dtype = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        if dtype not in _DTYPES:
            raise ValueError(f"config.json's dtype is {dtype!r}; it must be one of {_DTYPES}")
        return str(dtype)
