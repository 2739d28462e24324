"""Reads a checkpoint directory in the hub layout, one memory-mapped slice at a time."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Bytes of one element by the name that safetensors headers use; other dtypes hold no weights here.
ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}

# Touched pages count as this process's memory until their file is unmapped: bounds such pages.
REMAP_BYTES = 128 << 20

Range = tuple[int, int] | None


class CheckpointError(ValueError):
    """The checkpoint is not what the model needs; the message lists every problem found."""

    def __init__(self, directory: Path, problems: Sequence[str]) -> None:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        super().__init__(f"checkpoint {directory} has {len(problems)} problem(s):\n{lines}")
        self.problems = tuple(problems)


@dataclass(frozen=True)
class TensorInfo:
    """What a shard's header says of one tensor; `dtype` is safetensors' name, e.g. "F8_E4M3"."""

    shape: tuple[int, ...]
    dtype: str
    shard: str


class CheckpointReader:
    """Names, shapes, dtypes and slices of the tensors of one checkpoint directory.

    Args:
        directory: holds `model.safetensors`, or shards and `model.safetensors.index.json`.

    Attributes:
        tensors: every tensor by name, in the order of the files (shard by shard, by offset).
        bytes_read: bytes of all slices handed out so far.

    Raises:
        CheckpointError: no weights, an unreadable shard, or an index that contradicts the shards.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.bytes_read = 0
        self._mapped_bytes = 0
        # Two: a tensor's scales may lie in the shard beside its own.
        self._open = functools.lru_cache(maxsize=2)(self._map_shard)
        self.tensors = self._read_headers()

    def read_json(self, name: str) -> dict[str, Any]:
        """The parsed JSON file `name` of the directory, {} when there is no such file."""
        path = self.directory / name
        if not path.is_file():
            return {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(self.directory, [f"{name} is not valid JSON: {error}"]) from error
        if not isinstance(content, dict):
            raise CheckpointError(self.directory, [f"{name} must hold a JSON object"])
        return content

    def nbytes(self, name: str, rows: Range = None, cols: Range = None) -> int:
        """Bytes that `read` with the same arguments takes from the file."""
        info = self.tensors[name]
        return prod(part_shape(info.shape, rows, cols)) * ITEM_BYTES[info.dtype]

    def read(self, name: str, rows: Range = None, cols: Range = None) -> torch.Tensor:
        """A CPU tensor that views the mapped file: copy it before the next shard is read.

        Args:
            name: a key of `tensors`.
            rows, cols: the part (start, stop) of the first and second dimension; None is all of it.

        Raises:
            ValueError: the part lies outside of the tensor.
        """
        info = self.tensors[name]
        try:
            part_shape(info.shape, rows, cols)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        self._count(self.nbytes(name, rows, cols))
        ranges = tuple(slice(*part) if part else slice(None) for part in (rows, cols))
        # A tensor of dimension 0 takes no slice at all; the ellipsis reads it whole.
        wanted = ranges[: len(info.shape)] or ...
        tensor: torch.Tensor = self._open(info.shard).get_slice(name)[wanted]
        return tensor

    def _count(self, size: int) -> None:
        self.bytes_read += size
        self._mapped_bytes += size
        if self._mapped_bytes > REMAP_BYTES:
            self._open.cache_clear()
            self._mapped_bytes = size

    def _map_shard(self, shard: str) -> Any:
        return safe_open(self.directory / shard, framework="pt", device="cpu")

    def _read_headers(self) -> dict[str, TensorInfo]:
        index = self._weight_map()
        files = self._shard_files(index)
        tensors: dict[str, TensorInfo] = {}
        problems = []
        for shard in files:
            try:
                infos = self._shard_infos(shard)
            except (SafetensorError, OSError) as error:
                problems.append(f"shard {shard} cannot be read: {error}")
                continue
            problems += _header_problems(infos, tensors)
            tensors |= infos
        problems += _index_problems(index, tensors, files) if index else []
        if problems:
            raise CheckpointError(self.directory, problems)
        return tensors

    def _weight_map(self) -> dict[str, str]:
        """Shard by tensor name; {} for a checkpoint of a single file."""
        index = self.read_json(INDEX_FILE)
        shards = index.get("weight_map")
        if (self.directory / INDEX_FILE).exists() and not (shards and isinstance(shards, dict)):
            raise CheckpointError(self.directory, [f"{INDEX_FILE} has no weight_map"])
        return shards or {}

    def _shard_files(self, index: dict[str, str]) -> list[str]:
        on_disk = {path.name for path in self.directory.glob("*.safetensors")}
        named = set(index.values()) or {SINGLE_FILE}
        problems = [
            f"shard {name} is missing from the directory" for name in sorted(named - on_disk)
        ]
        owner = INDEX_FILE if index else f"a checkpoint without {INDEX_FILE}"
        problems += [f"file {name} does not belong to {owner}" for name in sorted(on_disk - named)]
        if problems:
            raise CheckpointError(self.directory, problems)
        return sorted(named)

    def _shard_infos(self, shard: str) -> dict[str, TensorInfo]:
        mapped = self._map_shard(shard)
        slices = ((name, mapped.get_slice(name)) for name in mapped.offset_keys())
        return {
            name: TensorInfo(tuple(part.get_shape()), part.get_dtype(), shard)
            for name, part in slices
        }


def part_shape(shape: Sequence[int], rows: Range, cols: Range) -> tuple[int, ...]:
    """The shape of a part (start, stop) of the first two dimensions; ValueError when outside."""
    result = list(shape)
    for dim, part in enumerate((rows, cols)):
        if part is None:
            continue
        if dim >= len(shape) or not 0 <= part[0] <= part[1] <= shape[dim]:
            raise ValueError(f"part {part} of dimension {dim} is outside of shape {tuple(shape)}")
        result[dim] = part[1] - part[0]
    return tuple(result)


def _header_problems(infos: dict[str, TensorInfo], known: dict[str, TensorInfo]) -> list[str]:
    twice = [
        f"tensor {name} is both in {known[name].shard} and in {infos[name].shard}"
        for name in infos.keys() & known.keys()
    ]
    unknown = [
        f"tensor {name} has dtype {info.dtype}; known dtypes are {', '.join(ITEM_BYTES)}"
        for name, info in infos.items()
        if info.dtype not in ITEM_BYTES
    ]
    return sorted(twice) + unknown


def _index_problems(
    index: dict[str, str], tensors: dict[str, TensorInfo], files: list[str]
) -> list[str]:
    problems = []
    for name, shard in index.items():
        if name not in tensors:
            problems.append(f"tensor {name} is in {INDEX_FILE} but not in its shard {shard}")
        elif tensors[name].shard != shard:
            problems.append(
                f"tensor {name} is in {tensors[name].shard}, but {INDEX_FILE} says {shard}"
            )
    extra = sorted(tensors.keys() - index.keys())
    return problems + [
        f"tensor {name} is in {tensors[name].shard} but not in {INDEX_FILE}" for name in extra
    ]
