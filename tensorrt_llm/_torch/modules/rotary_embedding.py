"""Rotary position embedding, interleaved pairs (2j, 2j+1), shared by MLA and the indexer."""

import torch


class RotaryEmbedding:
    """Table of the rotations e^(i * position * theta^(-2j / dim)).

    Args:
        dim: rotated channels, even.
        theta: base; GLM-5.2 uses 8e6 without scaling.
        max_positions: positions in the table.
    """

    def __init__(self, dim: int, theta: float, max_positions: int, device: torch.device) -> None:
        # As transformers: the frequencies are fp32 powers, the angles fp32 products.
        inv_freq = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq
        self.table = torch.polar(torch.ones_like(angles), angles).to(device)  # complex64

    def rotations(self, position_ids: torch.Tensor) -> torch.Tensor:
        """position_ids [tokens] (negative: padding, any rotation) -> complex64 [tokens, 1, dim /
        2]."""
        return self.table[position_ids.clamp(min=0)].unsqueeze(1)


def apply_rotary(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Rotate in fp32 and round once.

    Args:
        x: [tokens, heads, dim], any float dtype; fp32 with even strides and offset, so that its
            pairs are complex numbers as they lie.
        rotations: complex64 [tokens, 1, dim / 2].

    Returns:
        A new tensor like x; the pairs stay interleaved.
    """
    pairs = x.float().view(torch.complex64)
    return (pairs * rotations).view(torch.float32).to(x.dtype)
