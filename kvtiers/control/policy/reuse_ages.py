"""How soon blocks are asked for again, by how often they have been: learnt from a sample."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt

_SAMPLED: Final = 1 << 14  # keys remembered at most; 3 MB
_SPAN: Final = 16  # the sample reaches back so many times the tier's blocks
_CLASS_OF: Final = (0, 0, 1, 2, 3, 3, 3, 3, 4)  # by uses: once, twice, three, four to seven, more
NUM_CLASSES: Final = 5
_NUM_BUCKETS: Final = 128  # four an octave
_FIRST_LOOK: Final = 256  # notes until the first estimate
_LIFE: Final = 1 << 15  # notes after which what was learnt counts half
_MIX: Final = 0x85EBCA6B  # of MurmurHash3: what is sampled must not depend on a sketch's rows


def class_of(uses: int) -> int:
    """Return the class of blocks that were asked for so often, 1 or more."""
    return _CLASS_OF[min(uses, len(_CLASS_OF) - 1)]


def bucket_of(age: int) -> int:
    """Return the bucket of an age, four to each power of two."""
    exponent = age.bit_length() - 3
    return age if exponent < 0 else 4 * exponent + (age >> exponent)


def _widths() -> npt.NDArray[np.float64]:
    edges = [
        bucket if bucket < 4 else (4 + bucket % 4) << (bucket // 4 - 1)
        for bucket in range(_NUM_BUCKETS + 1)
    ]
    return np.diff(np.array(edges, dtype=np.float64))


class ReuseAges:
    """Answers how much reuse a block promises for each moment that it is kept.

    Of a sample of all keys it knows when and how often each was asked for, here or gone, as far
    back as 16 times what the tier holds. From the ages at which keys of a class come back, and
    the share that never does, follows the rate of reuse that a block of some age promises at
    best, over whatever time it would be kept: its Gittins index. A block that is likely to come
    back at an age, as a user's next turn does, is worth more the nearer that age is.
    """

    def __init__(self, capacity: int) -> None:
        self._one_in = max(1, capacity * _SPAN // _SAMPLED)
        self._most = min(_SAMPLED, capacity * _SPAN)
        self._seen: OrderedDict[int, tuple[int, int]] = OrderedDict()  # when last, how often
        self._came_back = np.zeros((NUM_CLASSES, _NUM_BUCKETS))
        self._never = np.zeros(NUM_CLASSES)
        self._widths = _widths()
        self._num_notes = 0
        self._next_look = _FIRST_LOOK
        self.rates: list[list[float]] = [[0.0] * _NUM_BUCKETS for _ in range(NUM_CLASSES)]

    def note(self, fingerprint: int, now: int) -> None:
        """Note that a key is asked for."""
        if (fingerprint * _MIX & 0xFFFFFFFF) % self._one_in:
            return
        last, uses = self._seen.pop(fingerprint, (now, 0))
        if uses:
            self._came_back[class_of(uses), bucket_of(now - last)] += 1
        self._seen[fingerprint] = (now, uses + 1)
        if len(self._seen) > self._most:
            _, (_, uses) = self._seen.popitem(last=False)
            self._never[class_of(uses)] += 1
        self._num_notes += 1
        if self._num_notes >= self._next_look:
            self._look(now)

    def _look(self, now: int) -> None:
        self._next_look = self._num_notes + max(_FIRST_LOOK, self._most >> 4)
        waiting = np.zeros_like(self._came_back)
        for last, uses in self._seen.values():
            waiting[class_of(uses), bucket_of(now - last)] += 1
        self.rates = [
            self._indexes(came, stopped, waits).tolist()
            for came, stopped, waits in zip(self._came_back, self._never, waiting, strict=True)
        ]
        if self._num_notes >= _LIFE:
            self._came_back /= 2
            self._never /= 2
            self._num_notes //= 2
            self._next_look -= self._num_notes

    def _indexes(
        self, came: npt.NDArray[np.float64], stopped: float, waiting: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Return the best rate of reuse from each age on.

        Args:
            came: keys by the age at which they came back. stopped: keys that were forgotten.
            waiting: keys by their age now, which may still come back: they count up to it.
        """
        leaves = came + waiting
        beyond = stopped + np.cumsum(leaves[::-1])[::-1]  # reached the start of each bucket
        mean = beyond - leaves / 2  # over the bucket
        hits = np.concatenate(([0.0], np.cumsum(came)))
        kept = np.concatenate(([0.0], np.cumsum((mean + 0.5) * self._widths)))
        gain = hits[None, 1:] - hits[:-1, None]
        span = kept[None, 1:] - kept[:-1, None]
        ahead = np.triu(np.ones_like(gain, dtype=bool))
        return np.asarray(np.where(ahead, gain / np.where(ahead, span, 1.0), 0.0).max(axis=1))
