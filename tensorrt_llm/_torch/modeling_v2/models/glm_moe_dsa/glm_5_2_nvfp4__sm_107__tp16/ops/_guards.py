"""What the guards (`is_valid`) of several records check."""

import torch


def check_tensor(
    name: str,
    x: torch.Tensor,
    shape: tuple[int, ...],
    *dtypes: torch.dtype,
    rows_apart: bool = False,
) -> None:
    """Shape, dtype (any of these) and layout: contiguous, or with `rows_apart` only its rows.

    Raises:
        ValueError: what differs, with both values.
    """
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} is {list(x.shape)}; it must be {list(shape)}")
    if x.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} is {x.dtype}; it must be {wanted}")
    if not x.is_contiguous() and not (rows_apart and x.stride(-1) == 1):
        layout = "its rows must be contiguous" if rows_apart else "it must be contiguous"
        raise ValueError(f"{name} has strides {x.stride()}; {layout}")


def check_positions(positions: torch.Tensor, limit: int, of: str) -> None:
    """Raises ValueError unless all positions are in [-1, limit)."""
    if positions.numel() and not bool(((positions >= -1) & (positions < limit)).all()):
        raise ValueError(
            f"positions reach from {int(positions.min())} to {int(positions.max())}; {of} has "
            f"{limit}, and -1 is padding"
        )
