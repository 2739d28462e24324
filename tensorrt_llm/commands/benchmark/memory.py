"""How much memory processes took at most, and whether that is within the promise."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

LIBRARIES_BYTES = 300 * 10**6  # Python and torch before any weight is there
HEADROOM = 1.3


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Memory of one rank on the CPU, in bytes, against what it needs.

    Args:
        weights_bytes: rank 0's weights in the type they are computed in.
        kv_cache_bytes: rank 0's cache pools.
        peak_rss_bytes: of the rank that took most.
    """

    weights_bytes: int
    kv_cache_bytes: int
    peak_rss_bytes: int

    @property
    def bound_bytes(self) -> int:
        """1.3 times the sum of weights, cache and libraries."""
        return int(HEADROOM * (self.weights_bytes + self.kv_cache_bytes + LIBRARIES_BYTES))

    @property
    def within_bound(self) -> bool:
        return self.peak_rss_bytes <= self.bound_bytes


def peak_rss_bytes(pid: int) -> int:
    """Largest resident set size that a running process has had, from Linux's `VmHWM`.

    Raises:
        ProcessLookupError: there is no such process.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has ended")  # a zombie has no memory to report


def child_pids() -> set[int]:
    """Processes that this one has started and that still run."""
    import psutil

    return {child.pid for child in psutil.Process().children()}


def peak_of(pids: Collection[int]) -> int:
    """The largest peak among some processes."""
    return max(map(peak_rss_bytes, pids))
