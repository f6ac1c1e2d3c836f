"""Where blocks can be below HBM, and what is known of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtiers.control.gates import Gates
from kvtiers.control.presence import Belief, PresenceTable
from kvtiers.control.settings import StoreSettings
from kvtiers.control.tier import Residence, Tier
from kvtiers.model.keys import BlockKey


@dataclass(frozen=True, slots=True)
class Places:
    """The tiers of one engine.

    Attributes:
        dram: the slab. stores: in the order of the settings; None for a shared store, whose
            contents are known through `presence` only.
        gates: which stores are in use.
        inherited: indexes of private stores with frames of an earlier life; emptied by a reset.
        retracted: by index of a shared store, keys that ranks are still to be told to drop.
        false: key to the number of running jobs that may write a wrong frame for it. Until they
            are over the key is neither believed nor written: a store would keep the wrong frame.
    """

    dram: Tier
    stores: Sequence[Tier | None]
    presence: PresenceTable
    settings: Sequence[StoreSettings]
    gates: Gates
    inherited: set[int] = field(default_factory=set)
    retracted: dict[int, list[BlockKey]] = field(default_factory=dict)
    false: Counter[BlockKey] = field(default_factory=Counter)

    @property
    def need_lookups(self) -> bool:
        """Whether the contents of some store are known through its index only."""
        return bool(self.inherited) or None in self.stores

    def belief(self, idx: int, key: BlockKey) -> Belief:
        """Return what is known of a block in a store: by control's own books, else by hearsay."""
        tier = self.stores[idx]
        if key in self.false:
            return Belief.ABSENT
        if tier is not None:
            entry = tier.get(key)
            if entry is not None:
                ready = entry.residence is Residence.READY
                return Belief.PRESENT if ready else Belief.ABSENT
            if idx not in self.inherited:
                return Belief.ABSENT
        return self.presence.of(self.settings[idx].name, key)

    def stored(self, key: BlockKey) -> bool:
        """Whether a store has a block, all of it, as far as is known."""
        for idx in range(len(self.stores)):  # noqa: SIM110 - asked for every block
            if self.belief(idx, key) is Belief.PRESENT:
                return True
        return False

    def lacks(self, idx: int, key: BlockKey) -> bool:
        """Whether a store in use has no such block, or may have evicted it since it was seen."""
        tier = self.stores[idx]
        if not self.gates.most_writes(idx) or (tier is not None and tier.get(key) is not None):
            return False
        return tier is not None or not self.presence.fresh(self.settings[idx].name, key)

    def held_below(self, key: BlockKey) -> bool:
        """Whether a block is in a store, or on its way there."""
        return self.stored(key) or any(tier and tier.get(key) for tier in self.stores)

    def adopt(self, idx: int, key: BlockKey, parent: BlockKey | None, position: int) -> None:
        """Enter a frame of an earlier life into its store's books, now that it has been used.

        If there is no room for it, it is dropped: the store no longer counts it as inherited.
        """
        tier = self.stores[idx]
        if tier is None or tier.get(key) is not None:
            return
        entry = tier.reserve(key, parent)
        if entry is None:
            self.disclaim(idx, key)
        else:
            entry.position = position
            tier.commit(entry)

    def disclaim(self, idx: int, key: BlockKey) -> None:
        """Drop a frame of an earlier life from every rank: one of them has lost it."""
        tier = self.stores[idx]
        self.presence.missed(self.settings[idx].name, key)
        if tier is not None and tier.get(key) is None:
            tier.leave(key)

    def retract(self, idx: int, key: BlockKey) -> None:
        """Drop a wrong frame from every rank, whether it is in the books or not."""
        tier = self.stores[idx]
        if tier is None:
            self.presence.missed(self.settings[idx].name, key)
            self.retracted.setdefault(idx, []).append(key)
            return
        entry = tier.get(key)
        if entry is None:
            tier.leave(key)
        else:
            tier.doom(entry)

    def no_longer_false(self, key: BlockKey) -> None:
        """Note that a job which may have written a wrong frame is over."""
        self.false[key] -= 1
        if self.false[key] <= 0:
            del self.false[key]

    def take_left(self, idx: int) -> list[BlockKey]:
        """Return the keys that ranks must drop from a store, since the last call."""
        tier = self.stores[idx]
        if tier is not None:
            left = tier.take_left()
            if idx in self.inherited:
                self._forget_inherited(self.settings[idx].name, left)
            return left
        return list(dict.fromkeys(self.retracted.pop(idx, ())))

    def _forget_inherited(self, store: str, keys: Sequence[BlockKey]) -> None:
        """Note that frames are gone, of which the inventory of an earlier life still says more."""
        for key in keys:
            if self.presence.of(store, key) is Belief.PRESENT:
                self.presence.missed(store, key)

    def reset(self) -> None:
        """Serve nothing that is there now."""
        self.inherited.clear()
        self.retracted.clear()
        self.dram.reset()
        for tier in self.stores:
            if tier is not None:
                tier.reset()
        self.presence.reset()
        self.gates.reset()
