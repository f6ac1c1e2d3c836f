"""Where blocks can be, below HBM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtiers.control.gates import Gates
from kvtiers.control.jobs import Row
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
        withdrawn: by index of a shared store the keys that it must drop, for all engines.
        false: keys of which running jobs may write false frames, and how many: not believed, nor
            written, until those are over, since a store takes a frame that is there for another.
    """

    dram: Tier
    stores: Sequence[Tier | None]
    presence: PresenceTable
    settings: Sequence[StoreSettings]
    gates: Gates
    inherited: set[int] = field(default_factory=set)
    withdrawn: dict[int, list[BlockKey]] = field(default_factory=dict)
    false: Counter[BlockKey] = field(default_factory=Counter)

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
        return any(self.belief(idx, key) is Belief.PRESENT for idx in range(len(self.stores)))

    def lacks(self, idx: int, key: BlockKey) -> bool:
        """Whether a store in use has no such block, or has not heard of it for long."""
        tier = self.stores[idx]
        if key in self.false:
            return False
        if not self.gates.most_writes(idx) or (tier is not None and tier.get(key) is not None):
            return False
        return tier is not None or not self.presence.fresh(self.settings[idx].name, key)

    def held_below(self, key: BlockKey) -> bool:
        """Whether a block is in a store, or on its way there."""
        return self.stored(key) or any(tier and tier.get(key) for tier in self.stores)

    def adopt(self, idx: int, key: BlockKey, parent: BlockKey | None) -> None:
        """Enter a frame of an earlier life into the books of its store, so that it is kept.

        Where nothing may leave for it, it is dropped: the store takes it for ours by now.
        """
        tier = self.stores[idx]
        if tier is None or tier.get(key) is not None:
            return
        entry = tier.reserve(key, parent)
        if entry is None:
            self.disclaim(idx, key)
        else:
            tier.commit(entry)

    def disclaim(self, idx: int, key: BlockKey) -> None:
        """Drop a frame of an earlier life from every rank: some have lost theirs."""
        tier = self.stores[idx]
        self.presence.missed(self.settings[idx].name, key)
        if tier is not None and tier.get(key) is None:
            tier.leave(key)

    def withdraw(self, idx: int, key: BlockKey) -> None:
        """Have every rank drop a frame that is false, whoever's books it is in by now.

        What was written under a key is never written again, so that it must go before the key is
        put anew; to drop a true frame costs a miss.
        """
        tier = self.stores[idx]
        if tier is not None:
            tier.leave(key)
            return
        self.presence.missed(self.settings[idx].name, key)
        self.withdrawn.setdefault(idx, []).append(key)

    def may_be_false(self, rows: Iterable[Row]) -> None:
        """Note what running jobs write that the engine has taken back."""
        for row in rows:
            self.false[row.key] += not row.false
            row.false = True

    def over(self, row: Row) -> None:
        """Note that a job which writes is over."""
        if row.false:
            self.false[row.key] -= 1
            if not self.false[row.key]:
                del self.false[row.key]

    def lose_hope(self, idx: int, keys: Sequence[BlockKey]) -> None:
        """Note that frames have left a private store, some of an earlier life."""
        store = self.settings[idx].name
        for key in keys if idx in self.inherited else ():
            if self.presence.of(store, key) is Belief.PRESENT:
                self.presence.missed(store, key)

    def reset(self) -> None:
        """Serve nothing that is there now."""
        self.inherited.clear()
        self.withdrawn.clear()
        self.dram.reset()
        for tier in self.stores:
            if tier is not None:
                tier.reset()
        self.presence.reset()
        self.gates.reset()
