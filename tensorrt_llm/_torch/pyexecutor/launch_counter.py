"""What the host sends to the device to start a step, counted for `enable_iter_perf_stats`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LaunchCounts(NamedTuple):
    """One step's share.

    Attributes:
        host_to_device_copies: uploads of the step's tables and tokens.
        device_ops: other torch operators on the device, most of them one small kernel each; a
            replayed graph is none.
    """

    host_to_device_copies: int
    device_ops: int


class DeviceOps(TorchDispatchMode):
    """While active, counts the operators that leave something on a device; views do no work.

    Attributes:
        count: so far.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device.type
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result
        if isinstance(first, torch.Tensor) and first.device.type == self._device_type:
            self.count += not func.is_view
        return result
