"""How much memory processes took at most, and whether that is within the promise."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Memory of one rank on the CPU, in bytes, against what it needs.

    Args:
        weights_bytes: rank 0's weights in the type they are computed in.
        kv_cache_bytes: rank 0's cache pools.
        peak_rss_bytes: of the rank that took most.
    """

    HEADROOM: ClassVar = 1.3
    LIBRARIES_BYTES: ClassVar = 300 * 10**6  # Python and torch before any weight is there

    weights_bytes: int
    kv_cache_bytes: int
    peak_rss_bytes: int

    @property
    def bound_bytes(self) -> int:
        """1.3 times the sum of weights, cache and libraries."""
        needed = self.weights_bytes + self.kv_cache_bytes + self.LIBRARIES_BYTES
        return int(self.HEADROOM * needed)

    @property
    def within_bound(self) -> bool:
        return self.peak_rss_bytes <= self.bound_bytes

    def as_dict(self) -> dict[str, Any]:
        bound = {"bound_bytes": self.bound_bytes, "within_bound": self.within_bound}
        return {**asdict(self), **bound}


def peak_rss_bytes(pid: int) -> int:
    """Largest resident set that a running process has had (Linux's `VmHWM`).

    Raises:
        ProcessLookupError: there is no such process any more.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has ended")  # a zombie holds no memory


def child_pids() -> set[int]:
    """Processes that this one has started and that still run."""
    import psutil

    return {child.pid for child in psutil.Process().children()}
