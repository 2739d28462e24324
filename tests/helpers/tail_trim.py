"""The gate of the trimmed draft step, for tests that run both sides of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tensorrt_llm._torch.speculative.mtp_tail_trim import ENV, mtp_tail_trim_enabled


@contextmanager
def tail_trim_gate() -> Iterator[Callable[[str | None], None]]:
    """Sets the gate as a new process would find it; unset to begin with, as before in the end."""
    with pytest.MonkeyPatch.context() as patch:

        def set_gate(value: str | None) -> None:
            if value is None:
                patch.delenv(ENV, raising=False)
            else:
                patch.setenv(ENV, value)
            mtp_tail_trim_enabled.cache_clear()

        set_gate(None)
        yield set_gate
    mtp_tail_trim_enabled.cache_clear()
