"""Uploads of small host vectors between two steps, without repeating what the device already
holds."""

from collections.abc import Sequence

import torch


class HostStaging:
    """Copies host lists into persistent device buffers and remembers what it put where.

    A buffer that is filled through this must not be written by anybody else.

    Attributes:
        num_uploads: copies issued since the start.
    """

    def __init__(self) -> None:
        self._held: dict[int, object] = {}  # address of a buffer -> what it holds
        self.num_uploads = 0

    def copy_if_changed(self, dst: torch.Tensor, values: Sequence[int]) -> None:
        """dst[: len(values)] = values, unless the last copy into dst brought the same values."""
        if self.is_news(dst, list(values)):
            self.copy(dst, values)

    def is_news(self, dst: torch.Tensor, content: object) -> bool:
        """Whether dst does not hold `content` yet (values, or a version of them); notes that it
        will."""
        if self._held.get(dst.data_ptr()) == content:
            return False
        self._held[dst.data_ptr()] = content
        return True

    def copy(self, dst: torch.Tensor, values: Sequence[int]) -> None:
        """dst[: len(values)] = values, through pinned memory and without waiting on a GPU."""
        self.num_uploads += 1
        host = torch.tensor(values, dtype=dst.dtype, pin_memory=dst.is_cuda)
        dst[: len(values)].copy_(host, non_blocking=True)
