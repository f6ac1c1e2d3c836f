"""Waiting until nobody else uses the machine, and knowing whether somebody did."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Quiet:
    """Tells the CPU time of other processes from our own.

    The criterion looks at the machine only, never at a result, so that repeating a pair for
    its sake favours neither side.

    Args:
        patience_seconds: how long to wait in all; 0 never waits.
        others: share of the machine's CPU time that others may take.
    """

    def __init__(self, patience_seconds: float, others: float = 0.04) -> None:
        self.patience_seconds = patience_seconds
        self.others = others
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._last = self._now()

    def wait(self) -> None:
        """Return once a moment of quiet was seen, or patience is at its end."""
        while self.patience_seconds > 0:
            start = time.monotonic()
            self.restart()
            time.sleep(0.1)
            if self.held():
                return
            self.patience_seconds -= time.monotonic() - start

    def restart(self) -> None:
        """Begin a stretch of time to judge."""
        self._last = self._now()

    def held(self) -> bool:
        """Whether others used no more than their share since `restart`."""
        (total, busy, own), (total_0, busy_0, own_0) = self._now(), self._last
        others = (busy - busy_0) - (own - own_0)
        return others <= max(1.5 / self._ticks, self.others * (total - total_0))

    def _now(self) -> tuple[float, float, float]:
        """Return seconds of CPU since start: all, not idle, and of this process."""
        first = Path("/proc/stat").read_text().split("\n", 1)[0]
        ticks = [int(word) / self._ticks for word in first.split()[1:9]]
        idle = ticks[3] + ticks[4]
        spent = os.times()
        return sum(ticks), sum(ticks) - idle, spent.user + spent.system
