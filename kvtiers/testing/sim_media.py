"""The stores of a simulated engine: what they hold, and whether they work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtiers.control.settings import ControlSettings
from kvtiers.model.keys import Rank, unpack_keys
from kvtiers.model.messages import Lookup, Presence
from kvtiers.testing.sim_documents import private_store
from kvtiers.testing.sim_rank import SimStore

Choose = Callable[[Sequence[Any]], Any]  # picks one of some possibilities


class SimMedia:
    """One store per rank and name, but that a shared store is one for all.

    Attributes:
        shared: that one.
    """

    def __init__(self, settings: ControlSettings, num_ranks: int) -> None:
        self.shared = SimStore()
        groups = len(settings.groups)
        self.of_rank: list[dict[str, SimStore]] = [
            {
                store.name: self.shared
                if store.capacity_blocks is None
                else private_store(store, Rank(i), groups)
                for store in settings.stores
            }
            for i in range(num_ranks)
        ]

    def break_or_mend(self, choose: Choose) -> None:
        """A medium works again with all that it held, or now and then stops, for all ranks."""
        name = choose(sorted(self.of_rank[0]))
        works = not self.of_rank[0][name].broken
        broken = works and choose((*[False] * 7, True))
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
        """Say what a store holds of every rank."""
        frames = [stores[lookup.store].frames for stores in self.of_rank]
        present = [
            all((lookup.epoch, Rank(i), key) in held for i, held in enumerate(frames))
            for key in unpack_keys(lookup.keys)
        ]
        return Presence(lookup.store, lookup.keys, np.array(present, np.uint8), lookup.epoch)
