"""Least recently used."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Final

from kvtiers.model.keys import BlockKey

_SLACK: Final = 64  # stale rows that are not worth a sweep
_LATELY: Final = 256  # exposed of late, of which most are shielded soon
_AT_ONCE: Final = 4  # rows that one call sweeps


class LRU:
    """Evicts the exposed block whose last use lies furthest back.

    As `Line`, for one line, but of plain numbers: nothing here is an object that the garbage
    collector looks at, of which a large tier would have a million.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._last_use: dict[BlockKey, int] = {}
        self._exposed: set[BlockKey] = set()
        # Last uses, which may lie behind by now, of those that are or were exposed; and those
        # that have no row yet, for most blocks of a chain that grows are exposed for a step.
        self._heap: list[tuple[int, BlockKey]] = []
        self._unswept: list[tuple[int, BlockKey]] = []  # a heap too
        self._new: deque[BlockKey] = deque()
        self._queued: set[BlockKey] = set()  # what stands in one of these

    def admitted(self, key: BlockKey, parent: BlockKey | None = None) -> None:  # noqa: ARG002
        """Count residence as the first use."""
        self._clock = self._last_use[key] = self._clock + 1

    def touched(self, key: BlockKey) -> None:
        """Make the block the most recently used."""
        self._clock = self._last_use[key] = self._clock + 1

    def exposed(self, key: BlockKey) -> None:
        """Rank the block by its last use, not by the time of its exposure."""
        self._exposed.add(key)
        if key not in self._queued:
            self._queued.add(key)
            self._new.append(key)
            if len(self._new) > _LATELY:
                self._take_new(2)

    def shielded(self, key: BlockKey) -> None:
        """Take the block out of the running; its last use is kept."""
        self._exposed.discard(key)
        if self._unswept:
            self._sweep()
        elif len(self._heap) > 2 * len(self._exposed) + _SLACK:
            self._unswept, self._heap = self._heap, []

    def removed(self, key: BlockKey) -> None:
        """Drop all that is known of the block."""
        del self._last_use[key]
        self.shielded(key)

    def next_victim(self) -> BlockKey | None:
        """Return the least recently used exposed block."""
        if self._new:
            self._take_new(len(self._new))
        first = self._top(self._heap)
        if self._unswept:
            other = self._top(self._unswept)
            if first is None or (other is not None and other < first):
                first = other
        return None if first is None else first[1]

    def shrink(self, num: int) -> bool:
        """Forget so many blocks, whichever; False if there are none left."""
        for _ in range(min(num, len(self._last_use))):
            key, _ = self._last_use.popitem()
            self.shielded(key)
        return bool(self._last_use)

    def _top(self, heap: list[tuple[int, BlockKey]]) -> tuple[int, BlockKey] | None:
        last_use, exposed = self._last_use, self._exposed
        while heap:
            row = heap[0]
            key = row[1]
            if key not in exposed:
                heapq.heappop(heap)
                self._queued.discard(key)
            elif last_use[key] != row[0]:
                heapq.heapreplace(heap, (last_use[key], key))
            else:
                return row
        return None

    def _take_new(self, num: int) -> None:
        """Make rows for the oldest of those without; for what may not leave there is no need."""
        new, exposed = self._new, self._exposed
        for _ in range(num):
            key = new.popleft()
            if key in exposed:
                heapq.heappush(self._heap, (self._last_use[key], key))
            else:
                self._queued.discard(key)

    def _sweep(self) -> None:
        """Forget some of the rows of blocks that may not leave."""
        unswept, exposed = self._unswept, self._exposed
        for _ in range(min(_AT_ONCE, len(unswept))):
            row = unswept.pop()  # which leaves a heap
            if row[1] in exposed:
                heapq.heappush(self._heap, row)
            else:
                self._queued.discard(row[1])
