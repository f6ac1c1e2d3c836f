"""Which key each slab slot holds, as this rank knows it: the last check before bytes are served."""

from __future__ import annotations

from enum import Enum

from kvtiers.model.keys import BlockKey


class SlotState(Enum):
    """What a slot is, to someone who wants one key."""

    HOLDS = "holds"  # the key's frame is complete
    LANDING = "landing"  # the key's frame is on its way
    OTHER = "other"  # anything else


class SlotMap:
    """Slot to key. A slot holds nothing from the moment its overwriting is ordered.

    One frame is on its way to a slot: the one begun last. What becomes of an earlier one
    is of no interest any more.
    """

    def __init__(self, num_slots: int) -> None:
        self._held: list[BlockKey | None] = [None] * num_slots
        self._landing: dict[int, BlockKey] = {}
        self._sealed: set[int] = set()

    def begin(self, slot: int, key: BlockKey) -> None:
        """Note that a frame will be written into a slot."""
        self.vacate(slot)
        self._landing[slot] = key

    def landed(self, slot: int, key: BlockKey, *, sealed: bool) -> None:
        """Note that the frame which was on its way is complete; `sealed`: so is its header."""
        if self._landing.get(slot) != key:
            return
        self._held[slot] = self._landing.pop(slot)
        if sealed:
            self._sealed.add(slot)

    def lost(self, slot: int, key: BlockKey) -> None:
        """Note that the frame which was on its way will not come."""
        if self._landing.get(slot) == key:
            del self._landing[slot]

    def vacate(self, slot: int) -> None:
        """Note that a slot no longer holds anything to be found under a key."""
        self._held[slot] = None
        self._sealed.discard(slot)
        self._landing.pop(slot, None)

    def clear(self) -> None:
        """Forget every key: what the slots hold was true in an earlier epoch."""
        for slot in range(len(self._held)):
            self.vacate(slot)

    def state(self, slot: int, key: BlockKey) -> SlotState:
        """Return what a slot is to someone who wants a key."""
        if self._held[slot] == key:
            return SlotState.HOLDS
        return SlotState.LANDING if self._landing.get(slot) == key else SlotState.OTHER

    def sealed(self, slot: int) -> bool:
        """Whether the header of the frame in a slot has been written."""
        return slot in self._sealed

    def seal(self, slot: int) -> None:
        """Note that the header of the frame in a slot has been written."""
        self._sealed.add(slot)
