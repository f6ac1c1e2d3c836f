"""What shared stores are believed to hold: hints, filled from messages only."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import Final

from kvtiers.model.keys import BlockKey, unpack_keys
from kvtiers.model.messages import Presence

_REMEMBERED: Final = 1 << 20


class Belief(Enum):
    """What is known of one key in one store."""

    UNKNOWN = "unknown"  # never asked, or forgotten: worth a lookup
    ABSENT = "absent"
    PRESENT = "present"  # a hint: a load may still come back MISSING


class PresenceTable:
    """Beliefs per store and key, bounded; the oldest answers are forgotten first."""

    def __init__(self, capacity: int = _REMEMBERED) -> None:
        self._capacity = capacity
        self._beliefs: OrderedDict[tuple[str, BlockKey], Belief] = OrderedDict()
        self.version = 0

    def of(self, store: str, key: BlockKey) -> Belief:
        """Return what is believed of a key in a store."""
        return self._beliefs.get((store, key), Belief.UNKNOWN)

    def answered(self, answer: Presence) -> None:
        """Take in an index reader's answer.

        Raises:
            ValueError: the answer has another number of flags than of keys.
        """
        keys = list(unpack_keys(answer.keys))
        for key, present in zip(keys, answer.present.tolist(), strict=True):
            self._believe(answer.store, key, Belief.PRESENT if present else Belief.ABSENT)

    def wrote(self, store: str, key: BlockKey) -> None:
        """Note a successful write of our own."""
        self._believe(store, key, Belief.PRESENT)

    def missed(self, store: str, key: BlockKey) -> None:
        """Note that a load found nothing: the hint was wrong, and must not be given again."""
        self._believe(store, key, Belief.ABSENT)

    def reset(self) -> None:
        """Forget everything."""
        self._beliefs.clear()
        self.version += 1

    def _believe(self, store: str, key: BlockKey, belief: Belief) -> None:
        self._beliefs[store, key] = belief
        self._beliefs.move_to_end((store, key))
        self.version += 1
        if len(self._beliefs) > self._capacity:
            self._beliefs.popitem(last=False)
