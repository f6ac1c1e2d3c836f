"""How long a finished load waits until a step can use it."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

_WINDOW: Final = 7  # of which four must agree on a change, and three stalls change nothing
_NUM_SEEDS: Final = 3  # that count as measurements until real ones have replaced them
# Copies are polled for with pauses of up to 2 ms: half of one.
_SEED_IDLE_SECONDS: Final = 0.001
_SEED_SHARE: Final = 0.5  # of a step: a load ends anywhere in it
_MOST_IDLE_SECONDS: Final = 0.05  # more than that is something else: a stall, a thread left out
_MOST_SHARE: Final = 2.0  # the step that runs, and one that was scheduled already
_NUM_STEPS: Final = 5


class Noticing:
    """Learns how long a finished load waits until the scheduler hears of it.

    A load ends when its last copy does; a poll notices, the ranks answer at the end of a step,
    and the next one can compute the rest. On an engine without other work that takes a time of
    its own; on one that computes, a share of its steps, whose length is measured.

    What is learnt is a median: one stall changes nothing, and a lasting change is believed
    after four loads.
    """

    def __init__(self) -> None:
        self._idle = deque([_SEED_IDLE_SECONDS] * _NUM_SEEDS, maxlen=_WINDOW)
        self._shares = deque([_SEED_SHARE] * _NUM_SEEDS, maxlen=_WINDOW)
        self._steps: deque[float] = deque(maxlen=_NUM_STEPS)

    def seconds(self, *, computes: bool) -> float:
        """Return what a load waits, once it is done.

        Args:
            computes: whether the engine runs steps for others.
        """
        idle = statistics.median(self._idle)
        if not (computes and self._steps):
            return idle
        return idle + statistics.median(self._shares) * statistics.median(self._steps)

    @property
    def step_seconds(self) -> float:
        """Median time of the engine's last steps; 0 while none was seen."""
        return statistics.median(self._steps) if self._steps else 0.0

    def step_took(self, seconds: float) -> None:
        """Take in the time of a step that computed something."""
        if seconds > 0:
            self._steps.append(seconds)

    def observe(self, seconds: float, *, computes: bool) -> None:
        """Learn from what one load waited; a negative time says nothing and is left out.

        Args:
            computes: as it was when the load began.
        """
        if not seconds >= 0:
            return
        if not computes:
            self._idle.append(min(seconds, _MOST_IDLE_SECONDS))
        elif self._steps:
            beyond = max(0.0, seconds - statistics.median(self._idle))
            self._shares.append(min(beyond / statistics.median(self._steps), _MOST_SHARE))
