"""Drives an engine while requests arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from kvtiers.engines.reference.engine import Engine
from kvtiers.engines.reference.report import StepReport
from kvtiers.engines.reference.requests import NewRequest


class Arrivals(Protocol):
    """Hands out requests, each once."""

    @property
    def next_at(self) -> float | None:
        """When the next request comes; None: none will, unless another one ends first."""
        ...

    def take(self, now: float) -> Iterable[NewRequest]:
        """Return the requests that have come by now."""
        ...


class OpenLoop:
    """Requests come when they say, however busy the engine is.

    Args:
        requests: by `arrived_at`, the earliest first.
    """

    def __init__(self, requests: Iterable[NewRequest]) -> None:
        self._left = deque(requests)

    @property
    def next_at(self) -> float | None:
        """See `Arrivals`."""
        return self._left[0].arrived_at if self._left else None

    def take(self, now: float) -> list[NewRequest]:
        """See `Arrivals`."""
        taken = []
        while self._left and self._left[0].arrived_at <= now:
            taken.append(self._left.popleft())
        return taken


def drive(engine: Engine, arrivals: Arrivals) -> Iterator[StepReport]:
    """Serve requests until none is left and none comes; yields what each step reports.

    In a closed loop, where requests arrive as others end, the caller tells `arrivals` of
    `StepReport.finished` before it asks for the next report.
    """
    while engine.num_unfinished or arrivals.next_at is not None:
        for request in arrivals.take(engine.now):
            engine.add(request)
        next_at = arrivals.next_at
        if engine.num_unfinished:
            yield engine.step(next_at)
        elif next_at is not None:
            engine.wait_until(next_at)
