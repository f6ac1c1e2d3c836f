"""What stores are believed to hold that control did not write."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Container
from enum import Enum
from typing import Final

from kvtiers.model.keys import BlockKey, unpack_keys
from kvtiers.model.messages import NOT_LOOKED_UP, Presence

_REMEMBERED: Final = 1 << 20
FRESH_SECONDS: Final = 60.0  # a store that evicts by last access keeps a block for longer
ABSENT_SECONDS: Final = 2.0  # another engine may have computed the block meanwhile
_FOR_GOOD: Final = sys.float_info.max
_NEVER_ASKED: Final = (-math.inf, 0.0)


class Belief(Enum):
    """What is known of one key in one store."""

    UNKNOWN = "unknown"  # never asked, or forgotten: worth a lookup
    ABSENT = "absent"  # for a while: others write, too
    PRESENT = "present"  # a hint: a load may still come back MISSING


class PresenceTable:
    """Beliefs per store and key, bounded; the oldest answers are forgotten first.

    Time goes on by `tick` only: between two calls nothing changes by itself.

    Args:
        private: stores that nobody else writes to. A frame that was missing there does not come
            back, though the inventory of the start goes on to say that it is there.
    """

    def __init__(self, capacity: int = _REMEMBERED, private: Container[str] = ()) -> None:
        self._capacity = capacity
        self._private = private
        # Until when a key is believed to be absent, infinity for one that is present; since when.
        self._beliefs: OrderedDict[tuple[str, BlockKey], tuple[float, float]] = OrderedDict()
        self._now = 0.0
        self.version = 0

    def tick(self, now: float) -> None:
        """Let time go on."""
        self._now = max(now, self._now)

    def of(self, store: str, key: BlockKey) -> Belief:
        """Return what is believed of a key in a store."""
        until, _ = self._beliefs.get((store, key), _NEVER_ASKED)
        if until <= self._now:
            return Belief.UNKNOWN
        return Belief.PRESENT if until == math.inf else Belief.ABSENT

    def fresh(self, store: str, key: BlockKey) -> bool:
        """Whether a key is believed to be present, and was seen within `FRESH_SECONDS`."""
        until, since = self._beliefs.get((store, key), (0.0, -math.inf))
        return until == math.inf and self._now < since + FRESH_SECONDS

    def answered(self, answer: Presence) -> None:
        """Take in an index reader's answer; what was not looked up in time stays as it was.

        Raises:
            ValueError: the answer has another number of flags than of keys.
        """
        keys = list(unpack_keys(answer.keys))
        for key, present in zip(keys, answer.present.tolist(), strict=True):
            if present == NOT_LOOKED_UP:
                continue
            self._believe(answer.store, key, math.inf if present else self._now + ABSENT_SECONDS)

    def wrote(self, store: str, key: BlockKey) -> None:
        """Note a successful write of our own."""
        self._believe(store, key, math.inf)

    def missed(self, store: str, key: BlockKey) -> None:
        """Note that a key is not there or cannot be read, whatever was said of it before."""
        until = _FOR_GOOD if store in self._private else self._now + ABSENT_SECONDS
        self._believe(store, key, until)

    def reset(self) -> None:
        """Forget everything."""
        self._beliefs.clear()
        self.version += 1

    def _believe(self, store: str, key: BlockKey, until: float) -> None:
        self._beliefs[store, key] = (until, self._now)
        self._beliefs.move_to_end((store, key))
        self.version += 1
        if len(self._beliefs) > self._capacity:
            self._beliefs.popitem(last=False)
