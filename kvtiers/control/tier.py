"""A bounded set of blocks on one medium: who is in, who is pinned, who leaves next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvtiers.control.chain import ChainNode, Chains
from kvtiers.control.policy.base import EvictionPolicy
from kvtiers.control.uncollected import uncollected
from kvtiers.model.errors import CapacityError, ProtocolError
from kvtiers.model.keys import BlockKey


class Residence(Enum):
    """How far a block has come."""

    RESERVED = "reserved"  # a slot is set aside; the bytes are on their way
    READY = "ready"  # every rank has the bytes


_READY: Final = Residence.READY  # looking a member up takes longer than all else of `Entry.idle`


@dataclass(slots=True, eq=False)
class Entry(ChainNode):
    """One block of a tier. Held by jobs; only the tier changes it. It refers to no job or tier, so
    that it is in no cycle of references, and the garbage collector need not look at it.

    Attributes:
        slot: the place it occupies, unique among all entries and windows of the tier.
        pins: running jobs that read it. doomed: no longer served; gone at the last release.
        backed: whether a lower tier has the block too, so that it leaves no hole.
        position: of the block in its prefix, counted from 0; a policy may value blocks by it.
    """

    slot: int = -1
    residence: Residence = Residence.RESERVED
    pins: int = 0
    doomed: bool = False
    backed: bool = False
    position: int = 0

    @property
    def idle(self) -> bool:
        """Whether it is served and no job holds it."""
        return not self.pins and self.residence is _READY and not self.doomed

    @property
    def evictable(self) -> bool:
        """Whether it may leave: idle, and the tail of its chain unless a lower tier has it."""
        return (self.first_child is None or self.backed) and self.idle


class Tier:
    """Slots, entries and pins of one private medium.

    Every `reserve` is followed by exactly one of `commit` and `abandon`, every `pin` by
    one `unpin`, every `take_window` by one `give_window`. Only evictable entries leave.
    """

    def __init__(self, name: str, capacity_blocks: int, policy: EvictionPolicy) -> None:
        if capacity_blocks < 1:
            raise CapacityError(f"tier {name!r} has room for {capacity_blocks} blocks, needs 1")
        self.name = name
        self.capacity_blocks = capacity_blocks
        self.version = 0  # changes whenever the answer to a lookup may change
        self.num_evicted = 0
        self.num_unbacked = 0  # of the evicted, those that made room at once and lay nowhere else
        self.num_pins = 0
        self._policy = policy
        self._entries: dict[BlockKey, Entry] = {}
        self._chains = Chains(self._entries)
        self._free: list[int] = []  # given back; those from `_num_fresh` on were never taken
        self._num_fresh = 0
        self._num_idle = 0
        self._left: list[BlockKey] = []

    # -- questions --------------------------------------------------------------------

    def get(self, key: BlockKey) -> Entry | None:
        """Return the entry that serves a key: RESERVED or READY; None on a miss."""
        return self._entries.get(key)

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free) + self.capacity_blocks - self._num_fresh

    @property
    def num_entries(self) -> int:
        """Blocks that are served."""
        return len(self._entries)

    @property
    def num_busy(self) -> int:
        """Slots that come back only when a job lets go of them: pinned, reserved, in a window."""
        return self.capacity_blocks - self.num_free - self._num_idle

    def entries(self) -> Iterator[Entry]:
        """Iterate over the served entries."""
        return iter(self._entries.values())

    def next_victim(self) -> Entry | None:
        """Return the entry that would leave next, None when none may."""
        key = self._policy.next_victim()
        return None if key is None else self._entries[key]

    # -- commands ---------------------------------------------------------------------

    def reserve(self, key: BlockKey, parent: BlockKey | None) -> Entry | None:
        """Set a slot aside for a block, evicting if need be; None when nothing may leave.

        The parent never leaves to make room for its child.

        Raises:
            ProtocolError: the key is here already.
        """
        if key in self._entries:
            raise ProtocolError(f"tier {self.name!r}: {key.hex()} is here already")
        slot: int | None
        if self._free:
            slot = self._free.pop()
        elif self._num_fresh < self.capacity_blocks:
            slot = self._num_fresh
            self._num_fresh += 1
        else:
            slot = self._take_slot(protect=self._entries.get(parent) if parent else None)
        if slot is None:
            return None
        entry = Entry(key, parent, slot=slot)
        self._entries[key] = entry
        self._policy.admitted(key, parent)
        tail = self._chains.add(entry)  # of its chain, until now
        if isinstance(tail, Entry) and not tail.pins and not tail.backed and tail.idle:
            self._policy.shielded(tail.key)
        return entry

    def commit(self, entry: Entry) -> None:
        """Make a reserved block READY; a doomed one gives its slot back instead."""
        self._settle(entry)
        entry.residence = Residence.READY
        if entry.doomed:
            self._release(entry)
            return
        uncollected(entry)
        self.version += 1
        self._num_idle += entry.pins == 0
        self._expose(entry)

    def abandon(self, entry: Entry) -> None:
        """Give up a reservation: the bytes never came."""
        self._settle(entry)
        self.doom(entry)
        entry.residence = Residence.READY  # no transfer holds it any longer, only pins may
        self._release(entry)

    def pin(self, entry: Entry) -> None:
        """Forbid eviction while a job reads the entry."""
        if not entry.pins and entry.residence is _READY and not entry.doomed:  # it was idle
            self._num_idle -= 1
            if entry.first_child is None or entry.backed:
                self._policy.shielded(entry.key)
        entry.pins += 1
        self.num_pins += 1

    def unpin(self, entry: Entry) -> None:
        """Undo one `pin`.

        Raises:
            ProtocolError: the entry is not pinned.
        """
        if entry.pins < 1:
            raise ProtocolError(f"tier {self.name!r}: unpin of {entry.key.hex()}, no pin held")
        entry.pins -= 1
        self.num_pins -= 1
        if entry.idle:
            self._num_idle += 1
            self._expose(entry)
        elif entry.doomed:
            self._release(entry)

    def back(self, entry: Entry) -> None:
        """Note that a lower tier has the block too: it may leave before what follows it."""
        if entry.doomed or entry.backed:
            return
        was_evictable = entry.evictable
        entry.backed = True
        if not was_evictable:
            self._expose(entry)

    def unback(self, entry: Entry) -> None:
        """Note that no lower tier has the block any longer."""
        if entry.doomed or not entry.backed:
            return
        was_evictable = entry.evictable
        entry.backed = False
        if was_evictable and not entry.evictable:
            self._policy.shielded(entry.key)

    def touch(self, entries: Iterable[Entry]) -> None:
        """Note hits on a chain; give it tail first, so that heads stay the most recent."""
        for entry in entries:
            if not entry.doomed:
                self._policy.touched(entry.key)

    def doom(self, entry: Entry) -> None:
        """Stop serving an entry at once; its slot is free when the last job lets go."""
        if entry.doomed:
            return
        self._num_idle -= entry.idle
        entry.doomed = True
        self.version += 1
        self._left.append(entry.key)
        del self._entries[entry.key]
        self._policy.removed(entry.key)
        self._unlink(entry)
        self._release(entry)

    def evict(self, entry: Entry) -> None:
        """Drop an evictable entry and free its slot.

        Raises:
            ProtocolError: the entry is pinned, reserved, or others that need it follow it.
        """
        if not entry.evictable:
            raise ProtocolError(f"tier {self.name!r}: {entry.key.hex()} may not leave")
        self.num_evicted += 1
        self.doom(entry)

    def leave(self, key: BlockKey) -> None:
        """Count a key that is not in the tier among those that left: a rank still holds it."""
        self._left.append(key)

    def take_left(self) -> list[BlockKey]:
        """Return the keys that left since the last call, which ranks must be told to drop.

        Keys that have come back meanwhile are among them: ranks drop the old frame before they
        write the new one. Those that a reset removed are not: ranks forget them by themselves.
        """
        if not self._left:
            return []
        left, self._left = self._left, []
        return list(dict.fromkeys(left))

    def take_window(self, num_slots: int) -> list[int]:
        """Set up to `num_slots` keyless slots aside, evicting if need be; [] when none can be."""
        window: list[int] = []
        while len(window) < num_slots:
            slot = self._take_slot(protect=None)
            if slot is None:
                break
            window.append(slot)
        return window

    def give_window(self, window: Iterable[int]) -> None:
        """Return the slots of a window."""
        self._free.extend(window)

    def reset(self) -> None:
        """Stop serving every entry; slots under transfer come back as their jobs end."""
        for entry in list(self._entries.values()):
            self.doom(entry)
        self._left.clear()

    # -- internals --------------------------------------------------------------------

    def _take_slot(self, protect: Entry | None) -> int | None:
        if not self.num_free:
            if protect is not None and protect.evictable:
                self.pin(protect)
                victim = self.next_victim()
                self.unpin(protect)
            else:
                victim = self.next_victim()
            if victim is None:
                return None
            self.num_unbacked += not victim.backed
            self.evict(victim)
        if self._free:
            return self._free.pop()
        self._num_fresh += 1
        return self._num_fresh - 1

    def _settle(self, entry: Entry) -> None:
        if entry.residence is not Residence.RESERVED:
            raise ProtocolError(
                f"tier {self.name!r}: {entry.key.hex()} is {entry.residence.value}, not reserved"
            )

    def _release(self, entry: Entry) -> None:
        """Free a doomed entry's slot once nothing holds it."""
        if entry.pins == 0 and entry.residence is Residence.READY and entry.slot >= 0:
            self._free.append(entry.slot)
            entry.slot = -1

    def _expose(self, entry: Entry) -> None:
        if entry.evictable:
            self._policy.exposed(entry.key)

    def _unlink(self, entry: Entry) -> None:
        parent = self._chains.remove(entry)
        if isinstance(parent, Entry) and not parent.backed:
            self._expose(parent)
