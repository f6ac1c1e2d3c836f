"""Least recently used."""

from __future__ import annotations

import heapq
from typing import Final

from kvtiers.model.keys import BlockKey

_SLACK: Final = 64  # stale rows that are not worth a rebuild


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
        self._new: list[BlockKey] = []
        self._queued: set[BlockKey] = set()  # what stands in either

    def admitted(self, key: BlockKey) -> None:
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

    def shielded(self, key: BlockKey) -> None:
        """Take the block out of the running; its last use is kept."""
        self._exposed.discard(key)
        if len(self._queued) > 2 * len(self._exposed) + _SLACK:
            self._sweep()

    def removed(self, key: BlockKey) -> None:
        """Drop all that is known of the block."""
        del self._last_use[key]
        self.shielded(key)

    def next_victim(self) -> BlockKey | None:
        """Return the least recently used exposed block."""
        heap, last_use, exposed = self._heap, self._last_use, self._exposed
        if self._new:
            for key in self._new:
                if key in exposed:
                    heapq.heappush(heap, (last_use[key], key))
                else:
                    self._queued.discard(key)
            self._new = []
        while heap:
            row = heap[0]
            key = row[1]
            if key not in exposed:
                heapq.heappop(heap)
                self._queued.discard(key)
            elif last_use[key] != row[0]:
                heapq.heapreplace(heap, (last_use[key], key))
            else:
                return key
        return None

    def _sweep(self) -> None:
        """Forget the rows of blocks that may not leave."""
        self._queued = self._exposed.copy()
        self._new = [key for key in self._new if key in self._exposed]
        if self._heap:
            self._heap = [row for row in self._heap if row[1] in self._exposed]
            heapq.heapify(self._heap)
