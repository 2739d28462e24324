"""Random inputs of cells that several records share."""

import torch
from torch import Tensor


def cos_sin_table(positions: int, rope_dim: int, device: torch.device) -> Tensor:
    """A `cos_sin` of GLM-5.2's base for cells."""
    inv_freq = 8e6 ** -(torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inv_freq
    return torch.stack([angles.cos(), angles.sin()], dim=-1).to(device)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that nobody has written: all bits set, NaN in every floating dtype and -1 in int32."""
    width = shape[-1] * dtype.itemsize
    return torch.full((*shape[:-1], width), 255, dtype=torch.uint8, device=device).view(dtype)


def random_block_table(
    requests: int, pages: int, device: torch.device, generator: torch.Generator
) -> Tensor:
    """int32 [requests, pages] of distinct blocks, 0 to requests * pages - 1, in random order."""
    blocks = torch.randperm(requests * pages, device=device, generator=generator)
    return blocks.int().view(requests, pages)


def random_selection(
    rows: int, topk: int, keys: int, device: torch.device, generator: torch.Generator
) -> Tensor:
    """int32 [rows, topk]: distinct positions of `keys`, -1 in the columns that have none left."""
    chosen = torch.full((rows, topk), -1, dtype=torch.int32, device=device)
    for row in chosen:
        keep = torch.randperm(keys, device=device, generator=generator)[:topk]
        row[: keep.numel()] = keep
    return chosen
