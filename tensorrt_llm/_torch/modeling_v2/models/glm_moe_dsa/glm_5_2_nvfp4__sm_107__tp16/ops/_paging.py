"""Where a request's tokens lie in the paged latent pool."""

import torch
from torch import Tensor


def pool_rows(
    req_id: Tensor,
    block_table: Tensor,
    positions: Tensor,
    block_size: int,
    stride_factor: int,
    layer_id: int,
) -> Tensor:
    """Rows of a paged pool that hold `positions` of requests; see `ConvertReqIndexToGlobal`.

    Args:
        req_id: int [tokens].
        positions: int [tokens, n], any integer dtype.

    Returns:
        int64 [tokens, n]; -1 where there is no row.
    """
    page = positions.long().clamp(min=0) // block_size
    in_table = (positions >= 0) & (page < block_table.shape[1])
    start = req_id.long().unsqueeze(1) * block_table.shape[1]
    block = block_table.reshape(-1)[torch.where(in_table, start + page, 0)].long()
    row = block * stride_factor + layer_id * block_size + positions.long() % block_size
    return torch.where(in_table & (block >= 0), row, -1)


def check_paging(block_size: int, stride_factor: int, layer_id: int) -> None:
    """Raises ValueError unless a layer's page lies within a block."""
    if block_size < 1 or layer_id < 0 or (layer_id + 1) * block_size > stride_factor:
        raise ValueError(
            f"the page of layer_id {layer_id}, {block_size} rows, does not lie within a block of "
            f"{stride_factor} rows"
        )


def rows_per_request(tokens: int, block_table: Tensor) -> int:
    """Token rows of each request, the same for all.

    Raises:
        ValueError: tokens that do not split evenly over the rows of the block table.
    """
    requests = block_table.shape[0]
    if not requests or tokens % requests:
        raise ValueError(
            f"{tokens} token rows do not split evenly over {requests} rows of block_table"
        )
    return tokens // requests


def check_positions(positions: Tensor, limit: int, of: str) -> None:
    """Raises ValueError unless all positions are in [-1, limit)."""
    if positions.numel() and not bool(((positions >= -1) & (positions < limit)).all()):
        raise ValueError(
            f"positions reach from {int(positions.min())} to {int(positions.max())}; {of} has "
            f"{limit}, and -1 is padding"
        )
