"""Side streams of the decode step, and who runs on which.

On a device without streams the same code runs in its written order, on one lane; the lane's name is
still known, which is how a record of the step (docs/decode_step.md) is made on a CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

MAIN = "main"


class _Lane:
    """The stream that work is queued on now, by name."""

    current = MAIN


def current_lane() -> str:
    """Name of the stream that an op called now goes to."""
    return _Lane.current


class SideStream:
    """A stream beside the one that the step runs on.

    `with stream.beside():` queues work that starts once everything queued before it, on the step's
    stream and earlier on this one, is done; `join` lets the step's stream wait for it. Tensors that
    cross streams must stay referenced until the join: the function that forks also joins.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self) -> Iterator[None]:
        before, _Lane.current = _Lane.current, self.name
        try:
            if self._stream is None:
                yield
                return
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                yield
        finally:
            _Lane.current = before

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def recorded_event(self) -> int | None:
        """A cudaEvent_t after the work queued so far, for an op that waits for it itself; None
        without streams."""
        if self._stream is None:
            return None
        self._event = self._stream.record_event()  # kept, since the op takes only its address
        return self._event.cuda_event
