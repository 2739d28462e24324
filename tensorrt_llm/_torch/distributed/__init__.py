"""Ranks and what they say to each other. Every collective of the project goes through this room."""

from tensorrt_llm._torch.distributed.communicator import (
    broadcast_object,
    destroy_process_group,
    init_process_group,
    joined_ranks,
    min_over_ranks,
)
from tensorrt_llm._torch.distributed.lamport import LamportWorkspace, Payload, lamport_workspace
from tensorrt_llm._torch.distributed.ops import AllReduce, allgather

__all__ = [
    "AllReduce",
    "LamportWorkspace",
    "Payload",
    "allgather",
    "broadcast_object",
    "destroy_process_group",
    "init_process_group",
    "joined_ranks",
    "lamport_workspace",
    "min_over_ranks",
]
