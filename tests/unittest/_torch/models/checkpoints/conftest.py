"""Small checkpoints on disk, written by the safetensors library itself."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

WriteCheckpoint = Callable[..., Path]


def save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Clones first: the library refuses two names for one memory."""
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path)


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> WriteCheckpoint:
    """Writes tensors as one file, or as shards with an index when a mapping of shards is given."""

    def write(
        tensors: Mapping[str, torch.Tensor] | None = None,
        shards: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Path:
        if tensors is not None:
            save(tensors, tmp_path / "model.safetensors")
        for shard, content in (shards or {}).items():
            save(content, tmp_path / shard)
        if shards:
            weight_map = {name: shard for shard, content in shards.items() for name in content}
            index = tmp_path / "model.safetensors.index.json"
            index.write_text(json.dumps({"weight_map": weight_map}))
        (tmp_path / "config.json").write_text(
            json.dumps({"num_hidden_layers": 2} | dict(config or {}))
        )
        return tmp_path

    return write
