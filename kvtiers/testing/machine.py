"""A Hypothesis state machine that drives one tier against a plain model."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtiers.control.policy import POLICIES, make_policy
from kvtiers.control.tier import Entry, Residence, Tier
from kvtiers.model.keys import BlockKey, block_key
from kvtiers.testing.invariants import check_tier

MAX_DEPTH = 5
MAX_CAPACITY = 6
NUM_CHAINS = 3

places = st.tuples(st.integers(0, NUM_CHAINS - 1), st.integers(0, MAX_DEPTH - 1))


def chain_key(chain: int, depth: int) -> BlockKey:
    """Return the key of one block of a chain; chains fork after their first block."""
    return block_key(bytes([chain if depth else 0, depth]).ljust(32, b"\0"), 0)


class TierMachine(RuleBasedStateMachine):
    """Reservations, pins, windows and resets in any order.

    The model is what the caller holds: entries in flight, pins taken, windows. A tier may
    never lose or share a slot, never let go of what is held, and never serve what it said
    is gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Entry] = []
        self.in_flight: list[Entry] = []
        self.pinned: list[Entry] = []
        self.windows: list[list[int]] = []
        self.served: dict[BlockKey, Entry] = {}

    @initialize(capacity=st.integers(1, MAX_CAPACITY), policy=st.sampled_from(POLICIES))
    def make_tier(self, capacity: int, policy: str) -> None:
        """Start empty."""
        self.tier = Tier("dram", capacity, make_policy(policy, capacity))

    @rule(place=places)
    def reserve(self, place: tuple[int, int]) -> None:
        """Ask for room; it may cost a victim, which is never the parent."""
        key = chain_key(*place)
        parent = chain_key(place[0], place[1] - 1) if place[1] else None
        if self.tier.get(key) is not None:
            return
        free, before = self.tier.num_free, list(self.tier.entries())
        may_leave = [entry for entry in before if entry.evictable and entry.key != parent]
        entry = self.tier.reserve(key, parent)
        assert (entry is None) == (not free and not may_leave)
        if entry is None:
            assert list(self.tier.entries()) == before, "a refusal changed something"
            return
        left = [other for other in before if other.doomed]
        assert left == [] if free else len(left) == 1
        assert all(other in may_leave for other in left)
        self._forget(left)
        self.in_flight.append(entry)
        self.seen.append(entry)
        self.served[key] = entry

    @rule(data=st.data(), arrived=st.booleans())
    def settle(self, data: st.DataObject, arrived: bool) -> None:
        """The bytes of a reservation came, or did not."""
        if self.in_flight:
            entry = data.draw(st.sampled_from(self.in_flight))
            self.in_flight = [e for e in self.in_flight if e is not entry]
            if arrived:
                self.tier.commit(entry)
                return
            self.tier.abandon(entry)
            assert entry.doomed
            self._forget([entry])

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """A job begins to read an entry that is served."""
        if self.served:
            entry = data.draw(st.sampled_from(list(self.served.values())))
            self.tier.pin(entry)
            self.tier.touch((entry,))
            self.pinned.append(entry)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """A job is done with an entry, which may be doomed by now."""
        if self.pinned:
            index = data.draw(st.integers(0, len(self.pinned) - 1))
            self.tier.unpin(self.pinned.pop(index))

    @rule(data=st.data())
    def doom(self, data: st.DataObject) -> None:
        """An entry turned out to be bad."""
        ready = [e for e in self.served.values() if e.residence is Residence.READY]
        if ready:
            entry = data.draw(st.sampled_from(ready))
            self.tier.doom(entry)
            self._forget([entry])

    @rule()
    def evict(self) -> None:
        """Make room ahead of need."""
        victim = self.tier.next_victim()
        if victim is not None:
            self.tier.evict(victim)
            assert victim.key in self.tier.take_left()
            self._forget([victim])

    @rule(num_slots=st.integers(0, MAX_CAPACITY))
    def take_window(self, num_slots: int) -> None:
        """A job wants staging slots: it gets as many as there can be."""
        window = self.tier.take_window(num_slots)
        self._forget([entry for entry in self.served.values() if entry.doomed])
        assert len(window) == num_slots or self.tier.next_victim() is None
        self.windows.append(window)

    @rule(data=st.data())
    def give_window(self, data: st.DataObject) -> None:
        """A job is done staging."""
        if self.windows:
            index = data.draw(st.integers(0, len(self.windows) - 1))
            self.tier.give_window(self.windows.pop(index))

    @rule()
    def reset(self) -> None:
        """Nothing is served any more; what jobs hold stays theirs."""
        self.tier.reset()
        self._forget(list(self.served.values()))
        assert self.tier.take_left() == []

    @invariant()
    def books_agree(self) -> None:
        """See `check_tier`; and what is served is what the model says."""
        assert {e.key: e for e in self.tier.entries()} == self.served
        for entry in self.seen:
            pins = sum(entry is other for other in self.pinned)
            assert entry.pins == pins
        gone = [entry for entry in self.seen if entry.doomed]
        check_tier(self.tier, gone, [slot for window in self.windows for slot in window])

    def teardown(self) -> None:
        """Let go of everything: every slot comes back."""
        if not hasattr(self, "tier"):
            return
        for entry in self.in_flight:
            self.tier.commit(entry)
        for entry in self.pinned:
            self.tier.unpin(entry)
        for window in self.windows:
            self.tier.give_window(window)
        self.tier.reset()
        assert self.tier.num_free == self.tier.capacity_blocks
        assert self.tier.num_pins == self.tier.num_busy == 0

    def _forget(self, entries: list[Entry]) -> None:
        for entry in entries:
            assert self.tier.get(entry.key) is not entry
            if self.served.get(entry.key) is entry:
                del self.served[entry.key]
