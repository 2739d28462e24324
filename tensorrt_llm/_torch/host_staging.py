"""Uploads of small host vectors between two steps, without repeating what the device already
holds."""

from collections.abc import Sequence

import torch


class HostStaging:
    """Copies host lists into persistent device buffers and remembers what it put where.

    A buffer that is filled through this must not be written by anybody else.

    Args:
        skip_unchanged: leave out a copy whose content the device still holds. Off, every copy is
            made, which changes the number of uploads and nothing else.

    Attributes:
        num_uploads: copies issued since the start.
    """

    def __init__(self, skip_unchanged: bool = True) -> None:
        self.skip_unchanged = skip_unchanged
        # By storage, so that views of one buffer share a record: its last copy's place and content.
        self._held: dict[int, tuple[int, object]] = {}
        self.num_uploads = 0

    def copy_if_changed(self, dst: torch.Tensor, values: Sequence[int]) -> None:
        """dst[: len(values)] = values, unless the last copy into dst brought the same values."""
        if self.is_news(dst, list(values)):
            self.copy(dst, values)

    def is_news(self, dst: torch.Tensor, content: object) -> bool:
        """Whether `content` (values, or a version of them) has to be copied to dst; notes that it
        will be."""
        storage, record = dst.untyped_storage().data_ptr(), (dst.data_ptr(), content)
        if self.skip_unchanged and self._held.get(storage) == record:
            return False
        self._held[storage] = record
        return True

    def copy(self, dst: torch.Tensor, values: Sequence[int]) -> None:
        """dst[: len(values)] = values, through pinned memory and without waiting on a GPU."""
        self.num_uploads += 1
        host = torch.tensor(values, dtype=dst.dtype, pin_memory=dst.is_cuda)
        dst[: len(values)].copy_(host, non_blocking=True)

    def upload(
        self, values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        """A new tensor [len(values)] on the device; nothing is copied for no values."""
        self.num_uploads += bool(values)
        host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
        return host.to(device, non_blocking=True)
