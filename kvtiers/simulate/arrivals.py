"""When the requests of a trace arrive: at recorded times, or when earlier ones have ended."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvtiers.model.errors import ConfigError
from kvtiers.simulate.trace import TraceRequest

_MOST_SPEED: Final = 1e6


@dataclass(frozen=True, slots=True)
class ArrivalPlan:
    """How requests come.

    Attributes:
        speed: times as fast as recorded: gaps between arrivals, and think times, are divided by it.
        concurrency: sessions at a time, each of which goes on when its last request is answered;
            None: requests come at their times, however busy the engine is.
    """

    speed: float = 1.0
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if not 1 / _MOST_SPEED <= self.speed <= _MOST_SPEED:
            raise ConfigError(
                f"a speed of {self.speed} must be above 0 and finite, times as fast as recorded: "
                f"from {1 / _MOST_SPEED:g} to {_MOST_SPEED:g}"
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"{self.concurrency} sessions at a time; must be at least 1")

    def check(self, requests: Sequence[TraceRequest]) -> None:
        """Refuse a speed that would change nothing of these requests.

        Raises:
            ConfigError: each comes when another one ends, and nobody thinks meanwhile.
        """
        if self.concurrency is None or self.speed == 1.0:
            return
        if not any(request.think_seconds for request in requests):
            raise ConfigError(
                "a speed changes nothing where a number of sessions run at a time (--concurrency) "
                "and the trace has no think times: leave --speed out"
            )

    def of(self, requests: Sequence[TraceRequest]) -> ArrivalProcess:
        """Return the arrivals of some requests, in the order of their positions in the list."""
        if self.concurrency is None:
            return OpenLoopArrivals(requests, self.speed)
        return ClosedLoopArrivals(requests, self.concurrency, self.speed)


class ArrivalProcess(Protocol):
    """Hands out the positions of a trace's requests, each once, with their times."""

    @property
    def next_at(self) -> float | None:
        """When the next request comes; None: none will, unless another one ends first."""
        ...

    def take(self, now: float) -> list[tuple[int, float]]:
        """Return the requests that have come by now, with their times."""
        ...

    def ended(self, position: int, now: float) -> None:
        """Note the end of a request."""
        ...


class OpenLoopArrivals:
    """Requests come at their times; the first one at 0."""

    def __init__(self, requests: Sequence[TraceRequest], speed: float) -> None:
        first = requests[0].arrival_seconds if requests else 0.0
        self._times = [(request.arrival_seconds - first) / speed for request in requests]
        self._next = 0

    @property
    def next_at(self) -> float | None:
        """See `ArrivalProcess`."""
        return self._times[self._next] if self._next < len(self._times) else None

    def take(self, now: float) -> list[tuple[int, float]]:
        """See `ArrivalProcess`."""
        taken = []
        while self._next < len(self._times) and self._times[self._next] <= now:
            taken.append((self._next, self._times[self._next]))
            self._next += 1
        return taken

    def ended(self, position: int, now: float) -> None:
        """See `ArrivalProcess`; changes nothing here."""


class ClosedLoopArrivals:
    """A number of sessions run at a time; when one is over, the next begins.

    A session's next request comes once the one before it has ended and the recorded think time has
    passed; where none was recorded, at once.
    """

    def __init__(self, requests: Sequence[TraceRequest], concurrency: int, speed: float) -> None:
        sessions: dict[int, list[int]] = {}
        for position, request in enumerate(requests):
            sessions.setdefault(request.session, []).append(position)
        self._requests = requests
        self._speed = speed
        self._waiting = list(reversed(sessions.values()))
        self._rest: dict[int, list[int]] = {}  # the last one handed out to those after it
        self._due: list[tuple[float, int]] = []
        self._coming: dict[int, list[int]] = {}
        for _ in range(min(concurrency, len(sessions))):
            self._begin(0.0)

    @property
    def next_at(self) -> float | None:
        """See `ArrivalProcess`."""
        return self._due[0][0] if self._due else None

    def take(self, now: float) -> list[tuple[int, float]]:
        """See `ArrivalProcess`."""
        taken = []
        while self._due and self._due[0][0] <= now:
            time, position = heapq.heappop(self._due)
            self._rest[position] = self._coming.pop(position)
            taken.append((position, time))
        return taken

    def ended(self, position: int, now: float) -> None:
        """See `ArrivalProcess`."""
        rest = self._rest.pop(position)
        if not rest:
            self._begin(now)
            return
        think = self._requests[rest[0]].think_seconds or 0.0
        self._come(rest, now + think / self._speed)

    def _begin(self, now: float) -> None:
        if self._waiting:
            self._come(self._waiting.pop(), now)

    def _come(self, positions: list[int], time: float) -> None:
        first, *rest = positions
        self._coming[first] = rest
        heapq.heappush(self._due, (time, first))
