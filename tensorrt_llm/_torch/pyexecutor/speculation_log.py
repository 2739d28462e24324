"""Tells the log how drafting goes, while there is traffic."""

import time
from collections.abc import Callable

from tensorrt_llm._torch.pyexecutor.messages import SpeculationStats
from tensorrt_llm.logger import logger

LOG_INTERVAL_S = 5.0


class SpeculationLog:
    """A line every `LOG_INTERVAL_S` of traffic and one at its end, each about the time since the
    line before it; none when nothing was verified.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since: float | None = None  # None while the engine is idle
        self._logged: SpeculationStats | None = None

    def update(self, total: SpeculationStats, *, idle: bool) -> None:
        """To be called after every step.

        Args:
            total: since the engine started.
            idle: nobody is left.
        """
        now = self._clock()
        if self._since is None:
            # The first step after a pause reads a prompt: nothing was verified before its end.
            self._since = now
        if idle or now - self._since >= LOG_INTERVAL_S:
            self._log(total, now - self._since)
            self._since = None if idle else now

    def _log(self, total: SpeculationStats, seconds: float) -> None:
        news = total if self._logged is None else total.since(self._logged)
        self._logged = total
        if news.verify_steps:
            logger.info(
                "speculation: %d verify steps in %.1f s, %s",
                news.verify_steps,
                seconds,
                news.acceptance_text(),
            )
