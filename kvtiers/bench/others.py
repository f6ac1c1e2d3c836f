"""How much of the machine other programs use meanwhile."""

from __future__ import annotations

import os
from pathlib import Path


class Others:
    """Counts the CPU time of other processes from its construction on.

    Args:
        proc: where procfs is mounted.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._stat = proc / "stat"
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._start = self._now()

    def share(self) -> float | None:
        """Return what others used of all CPU time so far, 0 to 1; None where nobody says."""
        now = self._now()
        if now is None or self._start is None:
            return None
        total, busy, own = (after - before for after, before in zip(now, self._start, strict=True))
        return min(1.0, max(0.0, busy - own) / total) if total > 0 else 0.0

    def _now(self) -> tuple[float, float, float] | None:
        """Return CPU seconds of the machine: all, those that were not idle, and our own."""
        try:
            words = self._stat.read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return None
        ticks = [int(word) / self._ticks for word in words]
        spent = os.times()
        return sum(ticks), sum(ticks) - ticks[3] - ticks[4], spent.user + spent.system
