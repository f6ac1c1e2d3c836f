"""Least recently used."""

from __future__ import annotations

import heapq

from kvtiers.model.keys import BlockKey

_SLACK = 64  # stale heap rows that are not worth a rebuild


class LRU:
    """Evicts the exposed block whose last use lies furthest back.

    A heap of (last use, key) of the exposed blocks, with stale rows skipped when they
    surface and swept when they outnumber the live ones: O(log n) per change.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._last_use: dict[BlockKey, int] = {}
        self._exposed: set[BlockKey] = set()
        self._heap: list[tuple[int, BlockKey]] = []

    def admitted(self, key: BlockKey) -> None:
        """Count residence as the first use."""
        self._clock += 1
        self._last_use[key] = self._clock

    def touched(self, key: BlockKey) -> None:
        """Make the block the most recently used."""
        self._clock += 1
        self._last_use[key] = self._clock
        if key in self._exposed:
            self._push(key)

    def exposed(self, key: BlockKey) -> None:
        """Rank the block by its last use, not by the time of its exposure."""
        self._exposed.add(key)
        self._push(key)

    def shielded(self, key: BlockKey) -> None:
        """Take the block out of the running; its last use is kept."""
        self._exposed.discard(key)

    def removed(self, key: BlockKey) -> None:
        """Drop all that is known of the block."""
        self._exposed.discard(key)
        self._last_use.pop(key, None)

    def next_victim(self) -> BlockKey | None:
        """Return the least recently used exposed block."""
        while self._heap:
            used, key = self._heap[0]
            if key in self._exposed and self._last_use[key] == used:
                return key
            heapq.heappop(self._heap)
        return None

    def _push(self, key: BlockKey) -> None:
        heapq.heappush(self._heap, (self._last_use[key], key))
        if len(self._heap) > 2 * len(self._exposed) + _SLACK:
            self._heap = [(self._last_use[key], key) for key in self._exposed]
            heapq.heapify(self._heap)
