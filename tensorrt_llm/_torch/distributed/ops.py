"""Collectives on tensors."""

import torch
import torch.distributed as dist

from tensorrt_llm.mapping import Mapping


class AllReduce:
    """Sum over the tensor-parallel ranks, bitwise the same on all of them.

    On the CPU the partial sums are gathered and added in rank order in fp32, so the result depends
    neither on the transport nor on timing. On CUDA it is NCCL's all-reduce, in place.

    Args:
        workspace_tag: whose buffers to take, where a strategy keeps some between calls: users of
            different tags share none, and None is the model's own. Gloo and NCCL keep none.
    """

    def __init__(self, mapping: Mapping, workspace_tag: str | None = None) -> None:
        self.mapping = mapping
        self.workspace_tag = workspace_tag

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: any shape, this rank's partial sum -> the sum, same shape and dtype."""
        if not self.mapping.has_tp():
            return x
        if x.is_cuda:
            dist.all_reduce(x)
            return x
        first, *others = _gather(x, self.mapping).unbind(0)
        total = first.float()
        for part in others:  # one after the other: torch.sum's order depends on their number
            total = total + part
        return total.to(x.dtype)


def allgather(x: torch.Tensor, mapping: Mapping, dim: int = -1) -> torch.Tensor:
    """Concatenation of the ranks' equally shaped `x` along `dim`, in rank order."""
    if not mapping.has_tp():
        return x
    return torch.cat(_gather(x, mapping).unbind(0), dim=dim)


def _gather(x: torch.Tensor, mapping: Mapping) -> torch.Tensor:
    """[...] on each rank -> [tp_size, ...] on all."""
    x = x.contiguous()
    out = x.new_empty((mapping.tp_size * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x)
    return out.view(mapping.tp_size, *x.shape)
