"""The process group of the ranks: gloo for CPU tensors and control messages, NCCL for CUDA
tensors."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from tensorrt_llm.mapping import Mapping

T = TypeVar("T")

_BEFORE_LEAVING: list[Callable[[], object]] = []


def init_process_group(mapping: Mapping, device: str, init_method: str, timeout_s: float) -> None:
    """Join the ranks of `mapping`; a single rank needs no group.

    Args:
        device: "cpu" or "cuda"; a CUDA rank has gloo beside NCCL for control messages.
        init_method: rendezvous, `tcp://host:port` or `file:///path`.
        timeout_s: a collective that waits longer than this fails with an error.
    """
    if mapping.world_size == 1:
        return
    dist.init_process_group(
        backend="gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=init_method,
        world_size=mapping.world_size,
        rank=mapping.rank,
        timeout=timedelta(seconds=timeout_s),
    )


def before_leaving(release: Callable[[], object]) -> None:
    """Have something that belongs to the group released before it is left, the last first."""
    _BEFORE_LEAVING.append(release)


def destroy_process_group() -> None:
    """Leave the group, if one was joined."""
    while _BEFORE_LEAVING:
        _BEFORE_LEAVING.pop()()
    if dist.is_initialized():
        dist.destroy_process_group()


def broadcast_object(obj: T, mapping: Mapping) -> T:
    """Rank 0's `obj` on every rank (pickled, over gloo)."""
    if mapping.world_size == 1:
        return obj
    box = [obj]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def gather_objects(obj: T, mapping: Mapping) -> list[T]:
    """Every rank's `obj`, in rank order (pickled, over gloo)."""
    if mapping.world_size == 1:
        return [obj]
    box = [obj] * mapping.world_size
    dist.all_gather_object(box, obj)
    return box


def joined_ranks() -> Mapping:
    """The ranks of the joined group as tensor-parallel ranks; one rank if none was joined."""
    if not dist.is_initialized():
        return Mapping()
    size = dist.get_world_size()
    return Mapping(world_size=size, tp_size=size, rank=dist.get_rank())


def min_over_ranks(value: int, mapping: Mapping) -> int:
    """The smallest of the ranks' values, for sizes that every rank has to agree on."""
    if mapping.world_size == 1:
        return value
    box = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(box, op=dist.ReduceOp.MIN)
    return int(box.item())
