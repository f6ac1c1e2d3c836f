"""A circuit breaker: whether a medium that has failed may be used again."""

from __future__ import annotations

from enum import Enum
from typing import Final

# A healthy medium hardly ever fails twice in a row; three is more than a single bad frame and a
# single slow moment reach together. A hang counts double: it costs whoever waits a whole deadline,
# and holds slots until it ends.
NUM_FAILURES: Final = 3
FIRST_BACKOFF_SECONDS: Final = 1.0
MAX_BACKOFF_SECONDS: Final = 60.0


class BreakerState(Enum):
    """What may be asked of the medium."""

    CLOSED = "closed"  # everything
    OPEN = "open"  # nothing, until the back-off is over
    HALF_OPEN = "half_open"  # one probe, whose fate decides


class Breaker:
    """Watches one direction of one medium; time is a parameter.

    It opens after `num_failures` failures in a row; a hang counts as two. From then on a single
    failure opens it again, and each opening doubles the next back-off, up to `max_backoff`. Both
    end once `num_failures` successes in a row have shown that the medium works.

    Attributes:
        state: see `BreakerState`. probing: whether the probe of HALF_OPEN is under way.
        version: changes with `state`.
    """

    def __init__(
        self,
        num_failures: int = NUM_FAILURES,
        first_backoff: float = FIRST_BACKOFF_SECONDS,
        max_backoff: float = MAX_BACKOFF_SECONDS,
    ) -> None:
        self.state = BreakerState.CLOSED
        self.probing = False
        self.version = 0
        self._num_failures = num_failures
        self._first_backoff = first_backoff
        self._max_backoff = max_backoff
        self._backoff = first_backoff  # of the next opening
        self._closed_after_failure = False
        self._in_a_row = 0  # failures if negative, else successes
        self._until = 0.0

    # -- questions --------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the medium is used as ever."""
        return self.state is BreakerState.CLOSED

    @property
    def wants_probe(self) -> bool:
        """Whether it is time for a probe, and none is under way."""
        return self.state is BreakerState.HALF_OPEN and not self.probing

    # -- commands ---------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Let time pass: an open breaker becomes half-open when its back-off is over."""
        if self.state is BreakerState.OPEN and now >= self._until:
            self._become(BreakerState.HALF_OPEN)

    def succeeded(self) -> None:
        """Note work that the medium has done; without effect unless the breaker is closed."""
        if not self.closed:
            return
        self._in_a_row = max(self._in_a_row, 0) + 1
        if self._in_a_row >= self._num_failures:
            self._backoff = self._first_backoff
            self._closed_after_failure = False

    def failed(self, now: float) -> None:
        """Note work that the medium has refused, or done badly."""
        self._fail(1, now)

    def hung(self, now: float) -> None:
        """Note work of which the medium has done nothing in time."""
        self._fail(2, now)

    def probe(self) -> None:
        """Note that a probe is under way."""
        self.probing = True

    def probe_succeeded(self) -> None:
        """Use the medium again."""
        self.probing = False
        if not self.closed:
            self._in_a_row = 0
            self._closed_after_failure = True
            self._become(BreakerState.CLOSED)

    def probe_failed(self, now: float) -> None:
        """Leave the medium alone for longer."""
        self.probing = False
        if not self.closed:
            self._open(now)

    def probe_said_nothing(self) -> None:
        """Note that a probe has shown nothing either way: the next one may follow at once."""
        self.probing = False

    def _fail(self, weight: int, now: float) -> None:
        if not self.closed:
            return
        self._in_a_row = min(self._in_a_row, 0) - weight
        if self._closed_after_failure or -self._in_a_row >= self._num_failures:
            self._open(now)

    def _open(self, now: float) -> None:
        self._until = now + self._backoff
        self._backoff = min(2 * self._backoff, self._max_backoff)
        self._become(BreakerState.OPEN)

    def _become(self, state: BreakerState) -> None:
        self.state = state
        self.version += 1
