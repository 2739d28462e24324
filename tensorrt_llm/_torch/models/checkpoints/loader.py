"""Fills a model's parameters from a checkpoint; every tensor on either side is accounted for."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from tqdm import tqdm

from tensorrt_llm._torch.models.checkpoints import quantization
from tensorrt_llm._torch.models.checkpoints.quantization import StoredTensor
from tensorrt_llm._torch.models.checkpoints.reader import (
    CheckpointError,
    CheckpointReader,
    Range,
    part_shape,
)
from tensorrt_llm._torch.modules.weight_spec import WeightSpec
from tensorrt_llm.logger import logger

# Checkpoint tensors that no model here reads, and why that is right. `{mtp}` is the number of the
# MTP layer, `num_hidden_layers`; `*` matches anything.
TOLERATED_EXTRAS: Mapping[str, str] = {
    "model.layers.{mtp}.embed_tokens.weight": "the MTP layer shares model.embed_tokens",
    "model.layers.{mtp}.shared_head.head.weight": "the MTP layer shares lm_head",
    "model.layers.*.self_attn.k_proj.k_scale": "the FP8 KV cache is stored at unit scale",
    "model.layers.*.self_attn.v_proj.v_scale": "the FP8 KV cache is stored at unit scale",
    "model.layers.*.self_attn.k_scale": "the FP8 KV cache is stored at unit scale",
    "model.layers.*.self_attn.v_scale": "the FP8 KV cache is stored at unit scale",
    "model.layers.*.self_attn.kv_scale": "the FP8 KV cache is stored at unit scale",
    "model.layers.*.self_attn.rotary_emb.inv_freq": "it follows from the config's rope_theta",
}

PLAIN_DTYPES = ("F32", "BF16", "F16")
# Dequantised strips of at most this many fp32 values bound what loading needs beside the weights.
STRIP_ELEMENTS = 1 << 22

Reader = Callable[[CheckpointReader, str, Range, Range, torch.device], torch.Tensor]
DEQUANTIZERS: Mapping[str, Reader] = {
    "fp8": quantization.read_fp8,
    "nvfp4": quantization.read_nvfp4,
}


@dataclass
class LoadReport:
    """What one rank's loading did.

    Attributes:
        counts: how many specs were filled from each storage format ("plain", "fp8", "nvfp4").
        tolerated: checkpoint tensors that were left alone, with the reason.
        bytes_read: bytes taken from the files.
        seconds: wall time of the reading.
    """

    counts: dict[str, int] = field(default_factory=dict)
    tolerated: dict[str, str] = field(default_factory=dict)
    bytes_read: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.bytes_read / max(self.seconds, 1e-9) / 1e9
        formats = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        return (
            f"loaded {formats} tensors, {self.bytes_read / 1e9:.3f} GB in {self.seconds:.1f} s "
            f"({rate:.2f} GB/s), left {len(self.tolerated)} tolerated tensors alone"
        )


@dataclass(frozen=True)
class _Read:
    """One spec with the storage format that its tensor was found in."""

    spec: WeightSpec
    format: str


def load_weights(
    reader: CheckpointReader,
    specs: Iterable[WeightSpec],
    tolerated: Mapping[str, str] | None = None,
    progress: bool = False,
) -> LoadReport:
    """Copy the selected part of every spec's tensor into its target; dequantise in fp32, then cast.

    Args:
        reader: the checkpoint.
        specs: all tensors that the model needs; two specs may read parts of one tensor.
        tolerated: name patterns (`*` matches anything) of further tensors to leave alone, with the
            reason; they come on top of `TOLERATED_EXTRAS`.
        progress: show a bar with GB/s.

    Raises:
        CheckpointError: one message with all missing, extra, misshaped and wrongly typed tensors
            and contradictions to the quantization config; no target has been touched then.
    """
    reads, consumed, problems = _plan(reader, specs)
    report = LoadReport(tolerated=_tolerated_names(reader, consumed, tolerated or {}))
    known = consumed | report.tolerated.keys()
    problems += [_extra_problem(reader, name) for name in reader.tensors if name not in known]
    problems += _format_problems(reader, {read.format for read in reads})
    if problems:
        raise CheckpointError(reader.directory, problems)
    _copy_all(reader, reads, report, progress)
    logger.debug("%s", report)
    return report


def _plan(
    reader: CheckpointReader, specs: Iterable[WeightSpec]
) -> tuple[list[_Read], set[str], list[str]]:
    """The reads in the order of the files, the tensors that they use up, and what is wrong."""
    reads: list[_Read] = []
    consumed: set[str] = set()
    problems: list[str] = []
    for spec in specs:
        storage, stored = _storage(reader, spec)
        reads.append(_Read(spec, storage))
        consumed |= {tensor.name for tensor in stored}
        problems += _spec_problems(spec, storage) + _stored_problems(reader, spec, storage, stored)
    position = {name: place for place, name in enumerate(reader.tensors)}
    reads.sort(key=lambda read: position.get(read.spec.name, -1))
    return reads, consumed, problems


def _storage(reader: CheckpointReader, spec: WeightSpec) -> tuple[str, list[StoredTensor]]:
    """The storage format by the dtype that is found, and the tensors that it consists of."""
    found = reader.tensors.get(spec.name)
    if found and found.dtype == "F8_E4M3" and len(spec.shape) == 2:
        return "fp8", quantization.fp8_tensors(spec.name, spec.shape)
    if found and found.dtype == "U8" and len(spec.shape) == 2:
        return "nvfp4", quantization.nvfp4_tensors(spec.name, spec.shape)
    allowed = ("F32",) if spec.exact_fp32 else PLAIN_DTYPES
    return "plain", [StoredTensor(spec.name, spec.shape, "|".join(allowed))]


def _spec_problems(spec: WeightSpec, storage: str) -> list[str]:
    """What is wrong with the request itself: its part, its target or its format."""
    problems = []
    try:
        part = part_shape(spec.shape, spec.rows, spec.cols)
        if tuple(spec.target.shape) != part:
            problems.append(
                f"{spec.name}: target has shape {tuple(spec.target.shape)}, part {part}"
            )
    except ValueError as error:
        problems.append(f"{spec.name}: {error}")
    if spec.exact_fp32 and spec.target.dtype != torch.float32:
        problems.append(f"{spec.name}: target is {spec.target.dtype}, expected torch.float32")
    if storage == "nvfp4":
        nvfp4 = quantization.nvfp4_part_problem(spec.shape, spec.cols)
        problems += [f"{spec.name}: {nvfp4}"] if nvfp4 else []
    if storage != "plain" and not spec.quantizable:
        allowed = "F32" if spec.exact_fp32 else "|".join(PLAIN_DTYPES)
        problems.append(f"{spec.name}: found as {storage}, expected unquantised {allowed}")
    return problems


def _stored_problems(
    reader: CheckpointReader, spec: WeightSpec, storage: str, stored: Sequence[StoredTensor]
) -> list[str]:
    problems = []
    for tensor in stored:
        found = reader.tensors.get(tensor.name)
        expected = f"{tensor.dtype} {list(tensor.shape)}"
        if found is None:
            why = "" if tensor.name == spec.name else f" for the {storage} tensor {spec.name}"
            problems.append(f"{tensor.name}: missing, expected {expected}{why}")
        elif found.shape != tensor.shape or found.dtype not in tensor.dtype.split("|"):
            problems.append(
                f"{tensor.name}: found {found.dtype} {list(found.shape)}, expected {expected}"
            )
    return problems


def _tolerated_names(
    reader: CheckpointReader, consumed: set[str], tolerated: Mapping[str, str]
) -> dict[str, str]:
    mtp_layer = str(reader.read_json("config.json").get("num_hidden_layers", "{mtp}"))
    named = {name.replace("{mtp}", mtp_layer): reason for name, reason in TOLERATED_EXTRAS.items()}
    patterns = named | dict(tolerated)
    matches = {
        name: next((why for pattern, why in patterns.items() if fnmatchcase(name, pattern)), None)
        for name in reader.tensors
        if name not in consumed
    }
    return {name: reason for name, reason in matches.items() if reason is not None}


def _extra_problem(reader: CheckpointReader, name: str) -> str:
    info = reader.tensors[name]
    return f"{name}: found {info.dtype} {list(info.shape)}, but nothing in the model reads it"


def _format_problems(reader: CheckpointReader, storages: set[str]) -> list[str]:
    """Contradictions between the formats that are there and those that the config announces."""
    try:
        declared = quantization.declared_format(
            reader.read_json("config.json"), reader.read_json("hf_quant_config.json")
        )
    except ValueError as error:
        return [str(error)]
    present = storages - {"plain"}
    if present == {declared} - {"none"}:
        return []
    found = ", ".join(sorted(present)) or "none"
    return [f"quantised tensors: found {found}, but the checkpoint's config declares {declared}"]


def _copy_all(
    reader: CheckpointReader, reads: Sequence[_Read], report: LoadReport, progress: bool
) -> None:
    sizes = [_packed_bytes(reader, read) for read in reads]
    before, start = reader.bytes_read, time.perf_counter()
    with tqdm(
        total=sum(sizes), desc="Loading weights", unit="B", unit_scale=True, disable=not progress
    ) as bar:
        for read, size in zip(reads, sizes, strict=True):
            _copy(reader, read)
            report.counts[read.format] = report.counts.get(read.format, 0) + 1
            bar.update(size)
    report.bytes_read = reader.bytes_read - before
    report.seconds = time.perf_counter() - start


def _packed_bytes(reader: CheckpointReader, read: _Read) -> int:
    """Bytes of the part without its scales, which are less than a tenth; only the bar uses this."""
    cols = read.spec.cols
    if cols and read.format == "nvfp4":
        cols = (cols[0] // 2, cols[1] // 2)
    return reader.nbytes(read.spec.name, read.spec.rows, cols)


@torch.no_grad()
def _copy(reader: CheckpointReader, read: _Read) -> None:
    spec = read.spec
    if read.format == "plain":
        spec.target.copy_(reader.read(spec.name, spec.rows, spec.cols))
        return
    start, stop = spec.rows or (0, spec.shape[0])
    step = max(1, STRIP_ELEMENTS // max(1, spec.target.shape[1]))
    for row in range(start, stop, step):
        rows = (row, min(row + step, stop))
        part = DEQUANTIZERS[read.format](reader, spec.name, rows, spec.cols, spec.target.device)
        spec.target[rows[0] - start : rows[1] - start].copy_(part)
