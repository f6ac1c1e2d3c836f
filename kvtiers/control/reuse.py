"""How likely a block is to be asked for again, by how often it has been."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from kvtiers.model.keys import BlockKey

_REMEMBERED: Final = 1 << 20  # keys; about 150 MB at worst, days of traffic for one host
_MOST_TIMES: Final = 8  # beyond, a block is asked for again like one seen so often
# Until blocks have been seen, one in two is expected back; that counts as much as 16 of them.
_PRIOR_KEYS: Final = 16.0
_PRIOR_CHANCE: Final = 0.5


class ReuseChances:
    """A bounded list of the keys seen last, here or gone, with how often each was.

    Of all blocks that were seen ``k`` times, the share that came back is the chance of the next
    such one. What was seen lately has had little time to come back, so that chances are
    estimated low rather than high.
    """

    def __init__(self, capacity: int = _REMEMBERED) -> None:
        self._capacity = capacity
        self._times: OrderedDict[BlockKey, int] = OrderedDict()
        self._num_reached = [0] * (_MOST_TIMES + 2)  # keys seen at least so often

    def seen(self, keys: Iterable[BlockKey]) -> None:
        """Note that blocks were computed, or asked for; the oldest are forgotten."""
        for key in keys:
            times = self._times.pop(key, 0) + 1
            self._times[key] = times
            if times < len(self._num_reached):
                self._num_reached[times] += 1
        while len(self._times) > self._capacity:
            self._times.popitem(last=False)

    def of(self, key: BlockKey) -> float:
        """Return the chance that a block is asked for again, 0 to 1; one never seen is new."""
        times = min(max(self._times.get(key, 1), 1), _MOST_TIMES)
        came_back, reached = self._num_reached[times + 1], self._num_reached[times]
        return (came_back + _PRIOR_KEYS * _PRIOR_CHANCE) / (reached + _PRIOR_KEYS)
