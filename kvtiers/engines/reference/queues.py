"""Requests that wait, in the order in which they are admitted."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator

from kvtiers.engines.reference.requests import Request, State
from kvtiers.engines.reference.settings import Policy


class RequestQueue:
    """Waiting and preempted requests: first come, first served, or by priority.

    Preempted requests go before new ones of their priority, the last one preempted first: it is
    the oldest, whether it was swapped or is computed again. By priority, swapped requests go
    before all others.

    Attributes:
        num_swapped: swapped requests among them.
    """

    def __init__(self, policy: Policy) -> None:
        self._by_priority = policy is Policy.PRIORITY
        self.num_swapped = 0
        self._rows: list[tuple[float, int, Request]] = []
        self._next_last = 0
        self._next_first = -1

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._rows)

    def __getitem__(self, idx: int) -> Request:
        return self._rows[idx][2]

    def append(self, request: Request) -> None:
        """Queue a new request."""
        self._insert(request, self._next_last)
        self._next_last += 1

    def put_back(self, request: Request) -> None:
        """Queue a preempted request, before all of its priority."""
        self._insert(request, self._next_first)
        self._next_first -= 1

    def remove(self, request: Request) -> None:
        """Take a request out."""
        idx = next(i for i, (_, _, found) in enumerate(self._rows) if found is request)
        del self._rows[idx]
        self.num_swapped -= request.state is State.SWAPPED

    def _insert(self, request: Request, place: int) -> None:
        rank: float = 0
        if self._by_priority:
            rank = -math.inf if request.state is State.SWAPPED else request.new.priority
        insort(self._rows, (rank, place, request), key=lambda row: row[:2])
        self.num_swapped += request.state is State.SWAPPED
