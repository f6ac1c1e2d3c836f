"""When a link that stalled, or that was found slow, is tried again."""

from __future__ import annotations

from typing import Final

FIRST_WAIT_SECONDS: Final = 5.0  # as long as a person would wait before trying again
LONGEST_WAIT_SECONDS: Final = 300.0
HOPE_AFTER_SECONDS: Final = 10.0


class Trust:
    """One link's standing: trusted until a job stalls, then avoided, then tried.

    A stall costs a request its deadline, so one is enough. After the wait the link is trusted
    again; a stall soon after doubles the next wait, and a job that ends makes it short again.
    """

    def __init__(self) -> None:
        self.held = True
        self._wait_seconds = FIRST_WAIT_SECONDS
        self._until = 0.0
        self._last_measured = 0.0
        self._num_measured = 0

    def lose(self, now: float) -> None:
        """Note a stall; one of several while the link is avoided counts once."""
        if self.held:
            self.held = False
            self._until = now + self._wait_seconds
            self._wait_seconds = min(2 * self._wait_seconds, LONGEST_WAIT_SECONDS)

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
            if self.held:
                self._wait_seconds = FIRST_WAIT_SECONDS
        if not self.held and now >= self._until:
            self.held = True
            self._last_measured = now
        if now - self._last_measured < HOPE_AFTER_SECONDS:
            return False
        self._last_measured = now
        return True
