"""Turns what has left the tiers into orders to drop it, and into metrics."""

from __future__ import annotations

from collections.abc import Iterable

from kvtiers.control.places import Places
from kvtiers.control.tier import Tier
from kvtiers.model.keys import BlockKey
from kvtiers.model.messages import Forget
from kvtiers.observe.metrics import BLOCKS_EVICTED, OFFLOADS_DROPPED, Counters


class Departures:
    """Turns what left since the last step into orders for the ranks."""

    def __init__(self, places: Places, counters: Counters) -> None:
        self._places = places
        self._counters = counters
        self._num_evicted: dict[str, int] = {}
        self._writes_back = any(store.write == "back" for store in places.settings)
        self._num_unwritten = 0

    def forgets(self) -> list[Forget]:
        """Return the keys that stores must drop; DRAM needs no telling."""
        self._count_evicted(self._places.dram)
        self._count_unwritten(self._places.dram)
        self._places.dram.take_left()
        forgets = []
        for idx, tier in enumerate(self._places.stores):
            if tier is not None:
                self._count_evicted(tier)
            left = self._places.take_left(idx)
            if left:
                forgets.append(Forget.of(self._places.settings[idx].name, left))
                self._unback(left)
        return forgets

    def _unback(self, keys: Iterable[BlockKey]) -> None:
        """Note in DRAM that a store has lost some blocks."""
        for key in keys:
            entry = self._places.dram.get(key)
            if entry is not None and not self._places.held_below(key):
                self._places.dram.unback(entry)

    def _count_evicted(self, tier: Tier) -> None:
        new = tier.num_evicted - self._num_evicted.get(tier.name, 0)
        if new:
            self._num_evicted[tier.name] = tier.num_evicted
            self._counters.add(BLOCKS_EVICTED, (tier.name,), new)

    def _count_unwritten(self, dram: Tier) -> None:
        """Count what left DRAM before a write-back store had it."""
        new, self._num_unwritten = dram.num_unbacked - self._num_unwritten, dram.num_unbacked
        if new and self._writes_back:
            self._counters.add(OFFLOADS_DROPPED, ("unwritten",), new)
