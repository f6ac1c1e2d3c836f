"""The stores of a simulated engine: what they hold, and whether they work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtiers.control.settings import ControlSettings
from kvtiers.control.tier import Tier
from kvtiers.model.keys import Rank, unpack_keys
from kvtiers.model.messages import Lookup, Presence
from kvtiers.testing.sim_rank import SimStore

Choose = Callable[[Sequence[Any]], Any]  # picks one of some possibilities


class SimMedia:
    """One store per rank and name, but that a shared store is one for all.

    Attributes:
        shared: that one.
    """

    def __init__(self, settings: ControlSettings, num_ranks: int) -> None:
        self.shared = SimStore()
        self.of_rank: list[dict[str, SimStore]] = [
            {
                s.name: self.shared if s.capacity_blocks is None else SimStore(s.capacity_blocks)
                for s in settings.stores
            }
            for _ in range(num_ranks)
        ]

    def break_or_mend(self, choose: Choose) -> None:
        """A medium works again with all that it held, or now and then stops, for all ranks."""
        name = choose(sorted(self.of_rank[0]))
        works = not self.of_rank[0][name].broken
        broken = works and choose((False, False, False, True))
        for stores in self.of_rank:
            stores[name].broken = broken

    def mend(self) -> None:
        """Every medium works again."""
        for stores in self.of_rank:
            for store in stores.values():
                store.broken = False

    def drop_shared_frame(self, choose: Choose) -> None:
        """Another process evicts."""
        self.shared.frames.discard(choose(sorted(self.shared.frames, key=repr)))

    def presence(self, lookup: Lookup) -> Presence:
        """Say what the shared store holds, by its first rank's frames."""
        names = [(lookup.epoch, Rank(), key) for key in unpack_keys(lookup.keys)]
        present = np.array([name in self.shared.frames for name in names], np.uint8)
        return Presence(lookup.store, lookup.keys, present, lookup.epoch)

    def check_private(self, tiers: Sequence[Tier | None], settings: ControlSettings) -> None:
        """Assert that ranks hold in a private store what control thinks, not more."""
        for store, tier in zip(settings.stores, tiers, strict=True):
            if tier is not None:
                keys = {entry.key for entry in tier.entries()}
                for stores in self.of_rank:
                    held = {key for _, _, key in stores[store.name].frames}
                    assert held <= keys, "a frame that control has forgotten"
