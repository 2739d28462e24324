"""Absorbed MLA attention over selected cache rows, in plain torch on any device."""

import torch

# Bytes of gathered rows that one tile of queries may take.
TILE_BYTES = {"cpu": 1 << 25, "cuda": 1 << 29}


def sparse_mla_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    value_dim: int,
) -> torch.Tensor:
    """softmax(scale * q . k + bias) v over each token's own selection, one latent head for keys
    and values.

    Args:
        q: [tokens, heads, width], any number of heads.
        rows: [num_rows, width] latent rows of the pool, q's dtype or float8_e4m3fn (unit scale).
        slots: int64 [tokens, topk], rows of the selection; any valid row where there is no key.
        bias: [tokens, 1, topk] in q's dtype from `absence_bias`, which keeps the rows without a
            key out; None when every row is a key.
        value_dim: the first channels of a row that are its value.

    Returns:
        [tokens, heads, value_dim] in q's dtype. A token without any key gets some finite values.
        Softmax is fp32.
    """
    row_bytes = slots.shape[1] * rows.shape[1] * (4 + q.element_size())
    tile = max(1, TILE_BYTES[q.device.type] // row_bytes)
    if q.shape[0] <= tile:
        return _attend(q, rows, slots, bias, scale, value_dim)
    tiles = [slice(i, i + tile) for i in range(0, q.shape[0], tile)]
    return torch.cat(
        [
            _attend(q[t], rows, slots[t], None if bias is None else bias[t], scale, value_dim)
            for t in tiles
        ]
    )


def absence_bias(indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, topk] with -1 where there is no key -> [tokens, 1, topk]: 0 for keys, a finite
    floor for the rest.

    A finite floor instead of -inf, since a token without keys (padding) must not become NaN.
    """
    floor = torch.zeros(indices.shape, dtype=dtype, device=indices.device)
    return floor.masked_fill_(indices < 0, torch.finfo(dtype).min / 2).unsqueeze(1)


def _attend(
    q: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    value_dim: int,
) -> torch.Tensor:
    keys = gather_rows(rows, slots.flatten(), q.dtype).view(*slots.shape, -1)
    scores = torch.bmm(q, keys.transpose(1, 2)).mul_(scale)
    if bias is not None:
        scores.add_(bias)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights, keys[..., :value_dim])


def gather_rows(rows: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """rows[slots] as `dtype`: int64 [n] -> [n, width]."""
    if rows.dtype == torch.float8_e4m3fn:  # index_select has no fp8 kernel
        return rows.view(torch.uint8).index_select(0, slots).view(torch.float8_e4m3fn).to(dtype)
    return rows.index_select(0, slots).to(dtype)
