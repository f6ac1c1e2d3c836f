"""What left private tiers since the last step, and who has to know."""

from __future__ import annotations

from collections.abc import Iterable

from kvtiers.control.places import Places
from kvtiers.control.tier import Tier
from kvtiers.model.keys import BlockKey
from kvtiers.model.messages import Forget
from kvtiers.observe.metrics import BLOCKS_EVICTED, Counters


class Departures:
    """Collects the blocks that tiers dropped; counts them."""

    def __init__(self, places: Places, counters: Counters) -> None:
        self._dram = places.dram
        self._stores = places.stores
        self._counters = counters
        self._num_evicted: dict[str, int] = {}

    def take(self) -> list[Forget]:
        """Return the keys that private stores must drop; DRAM needs no telling."""
        self._count_evicted(self._dram)
        self._dram.take_left()
        forgets = []
        for tier in self._stores:
            if tier is not None:
                self._count_evicted(tier)
                left = tier.take_left()
                if left:
                    forgets.append(Forget.of(tier.name, left))
                    self._unback(left)
        return forgets

    def _unback(self, keys: Iterable[BlockKey]) -> None:
        """Note in DRAM that a store has lost some blocks."""
        for key in keys:
            entry = self._dram.get(key)
            if entry is not None and not any(tier and tier.get(key) for tier in self._stores):
                self._dram.unback(entry)

    def _count_evicted(self, tier: Tier) -> None:
        new = tier.num_evicted - self._num_evicted.get(tier.name, 0)
        if new:
            self._num_evicted[tier.name] = tier.num_evicted
            self._counters.add(BLOCKS_EVICTED, (tier.name,), new)
