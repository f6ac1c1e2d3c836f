"""When a link that stalled is tried again, and when one that was found slow is believed faster."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

FIRST_WAIT_SECONDS: Final = 5.0  # as long as a person would wait before trying again
LONGEST_WAIT_SECONDS: Final = 60.0  # a link that hangs costs one deadline in so long
HOPE_AFTER_SECONDS: Final = 10.0


class Standing(Enum):
    """What a link may be used for."""

    HELD = auto()  # any load
    LOST = auto()  # none: a job stalled, and the wait is not over
    ON_TRIAL = auto()  # few blocks at a time, until one such load has shown how it is


class Trust:
    """One link's standing: trusted until a job stalls, then avoided, then tried with few blocks.

    A stall costs a request its deadline, so one is enough. A trial that ends well gives all trust
    back; one that does not doubles the next wait.
    """

    def __init__(self) -> None:
        self.standing = Standing.HELD
        self._wait_seconds = FIRST_WAIT_SECONDS
        self._until: float | None = None
        self._last_measured = 0.0
        self._num_measured = 0

    def lose(self, now: float) -> None:
        """Note a stall; another one while the link is avoided changes nothing."""
        if self.standing is not Standing.LOST:
            self.fail()
            self._avoid(now)

    def fail(self) -> None:
        """Note that a trial went badly; the wait begins when time next passes."""
        self.standing = Standing.LOST
        self._until = None

    def regain(self) -> None:
        """Note that a trial went well."""
        self.standing = Standing.HELD
        self._wait_seconds = FIRST_WAIT_SECONDS

    def pass_time(self, now: float, num_measured: int) -> bool:
        """Bring the standing up to date.

        Args:
            num_measured: jobs that were measured on the link so far.

        Returns:
            whether nothing was measured for `HOPE_AFTER_SECONDS`, once each time they pass.
        """
        if num_measured != self._num_measured:
            self._num_measured = num_measured
            self._last_measured = now
        if self.standing is Standing.LOST:
            if self._until is None:
                self._avoid(now)
            elif now >= self._until:
                self.standing = Standing.ON_TRIAL
        if now - self._last_measured < HOPE_AFTER_SECONDS:
            return False
        self._last_measured = now
        return True

    def _avoid(self, now: float) -> None:
        self._until = now + self._wait_seconds
        self._wait_seconds = min(2 * self._wait_seconds, LONGEST_WAIT_SECONDS)
