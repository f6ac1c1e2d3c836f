"""What left a tier lately, by fingerprint."""

from __future__ import annotations

from collections import OrderedDict


class Ghosts:
    """A bounded list of fingerprints, the oldest first; it holds no block and no key."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._left: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._left)

    def recall(self, ghost: int) -> bool:
        """Strike a block off the list; whether it was there."""
        return self._left.pop(ghost, False) is None

    def remember(self, ghost: int, room: int | None = None) -> None:
        """Put a block at the end; the oldest are forgotten beyond the capacity, or `room`."""
        left = self._left
        left[ghost] = None
        left.move_to_end(ghost)
        bound = self._capacity if room is None else max(0, min(room, self._capacity))
        while len(left) > bound:
            left.popitem(last=False)
