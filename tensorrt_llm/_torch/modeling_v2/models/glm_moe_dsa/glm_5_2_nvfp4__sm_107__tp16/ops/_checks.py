"""What records say about arguments that they refuse.

The limits of a kernel (its widths, its number of rows) are checked for the kernel's own activation
dtype, bf16. With another one, fp32 on a CPU, there is only the reference, which serves every
geometry; what must hold among the arguments is checked there too.
"""

from collections.abc import Container

import torch

KERNEL_DTYPE = torch.bfloat16
INDEX_DTYPES = (torch.int32, torch.int64)
VECTOR_BYTES = 16  # of one load; rows start at multiples of it


def require(condition: bool, message: str) -> None:
    """Raises ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_tensor(
    name: str, x: torch.Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype
) -> None:
    """Shape (None: any size), dtype (none given: any), contiguous.

    Raises:
        ValueError: what differs.
    """
    fits = len(shape) == x.dim() and all(
        want in (None, have) for want, have in zip(shape, x.shape, strict=True)
    )
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    require(fits, f"{name} is {list(x.shape)}; it must be [{wanted}]")
    require(
        not dtypes or x.dtype in dtypes,
        f"{name} is {x.dtype}; it must be {' or '.join(map(str, dtypes))}",
    )
    require(x.is_contiguous(), f"{name} has the strides {list(x.stride())}; it must be contiguous")


def check_aligned(name: str, x: torch.Tensor) -> None:
    """Raises ValueError unless every row of a bf16 tensor starts at a multiple of 16 bytes."""
    if x.dtype != KERNEL_DTYPE:
        return
    offset = x.data_ptr() % VECTOR_BYTES
    require(
        not offset,
        f"{name} begins {offset} bytes past a multiple of {VECTOR_BYTES}; it must begin at one",
    )
    row = x.shape[-1] * x.element_size()
    require(
        row % VECTOR_BYTES == 0,
        f"{name} has rows of {row} bytes; they must be a multiple of {VECTOR_BYTES}",
    )


def check_served(x: torch.Tensor, what: str, value: int, served: Container[int]) -> None:
    """Raises ValueError if the kernel, which takes x in bf16, does not run this size."""
    require(
        x.dtype != KERNEL_DTYPE or value in served,
        f"{what} is {value}; the kernel serves {served}",
    )
