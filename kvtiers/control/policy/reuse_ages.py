"""How soon blocks are asked for again, by how often they have been: learnt from a sample."""

from __future__ import annotations

from array import array
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
PRIOR_KEYS: Final = 16.0  # of a class, that are taken to be like those of the class before
_MIX: Final = 0x85EBCA6B  # of MurmurHash3: what is sampled must not depend on a sketch's rows

_Floats = npt.NDArray[np.float64]


def class_of(uses: int) -> int:
    """Return the class of blocks that were asked for so often, 1 or more."""
    return _CLASS_OF[min(uses, len(_CLASS_OF) - 1)]


def bucket_of(age: int) -> int:
    """Return the bucket of an age, four to each power of two."""
    exponent = age.bit_length() - 3
    return age if exponent < 0 else 4 * exponent + (age >> exponent)


def _widths() -> _Floats:
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

    Attributes:
        rates: of reuse, by class and bucket of age. prior_keys: of a class, that are taken to be
            like those of the class before.
    """

    def __init__(self, capacity: int) -> None:
        self._one_in = max(1, capacity * _SPAN // _SAMPLED)
        self._most = min(_SAMPLED, capacity * _SPAN)
        self._places: OrderedDict[int, int] = OrderedDict()  # of keys, the oldest first, in:
        self._when, self._uses = array("q"), array("q")  # asked for last, and how often
        self._came_back = np.zeros((NUM_CLASSES, _NUM_BUCKETS))
        self._lately = [0] * (NUM_CLASSES * _NUM_BUCKETS)  # came back since the last look
        self._never = np.zeros(NUM_CLASSES)
        self._widths = _widths()
        self._num_notes = 0
        self._next_look = _FIRST_LOOK
        self.prior_keys = PRIOR_KEYS
        self.rates: list[list[float]] = [[0.0] * _NUM_BUCKETS for _ in range(NUM_CLASSES)]

    def note(self, fingerprint: int, now: int) -> None:
        """Note that a key is asked for."""
        if (fingerprint * _MIX & 0xFFFFFFFF) % self._one_in:
            return
        place = self._places.get(fingerprint)
        if place is not None:
            uses = self._uses[place]
            bucket = bucket_of(now - self._when[place])
            self._lately[class_of(uses) * _NUM_BUCKETS + bucket] += 1
            self._when[place], self._uses[place] = now, uses + 1
            self._places.move_to_end(fingerprint)
        else:
            self._add(fingerprint, now)
        self._num_notes += 1
        if self._num_notes >= self._next_look:
            self._look(now)

    def _add(self, fingerprint: int, now: int) -> None:
        place = len(self._places)
        if place < self._most:
            self._when.append(now)
            self._uses.append(1)
        else:
            _, place = self._places.popitem(last=False)
            self._never[class_of(self._uses[place])] += 1
            self._when[place], self._uses[place] = now, 1
        self._places[fingerprint] = place

    def _look(self, now: int) -> None:
        self._next_look = self._num_notes + max(_FIRST_LOOK, self._most >> 4)
        waiting = self._waiting(now)
        self._came_back += np.reshape(self._lately, self._came_back.shape)
        self._lately = [0] * len(self._lately)
        end = 1 + int(np.flatnonzero((self._came_back + waiting).any(axis=0)).max(initial=0))
        widths = self._widths[:end]
        later = np.triu(np.ones((end, end), dtype=bool))
        beyond = [0.0] * (_NUM_BUCKETS - end)
        rates = []
        came, waits, stopped = np.zeros(end), np.zeros(end), 0.0
        for idx in range(NUM_CLASSES):
            num = came.sum() + waits.sum() + stopped
            share = self.prior_keys / num if num else 0.0
            came = self._came_back[idx, :end] + share * came
            waits = waiting[idx, :end] + share * waits
            stopped = self._never[idx] + share * stopped
            rates.append(_indexes(came, stopped, waits, widths, later).tolist() + beyond)
        self.rates = rates
        if self._num_notes >= _LIFE:
            self._came_back /= 2
            self._never /= 2
            self._num_notes //= 2
            self._next_look -= self._num_notes

    def _waiting(self, now: int) -> _Floats:
        """Return how many keys of each class are of each age now."""
        uses = np.frombuffer(self._uses, np.int64)
        ages = now - np.frombuffer(self._when, np.int64)
        classes = np.array(_CLASS_OF)[np.minimum(uses, len(_CLASS_OF) - 1)]
        exponents = np.frexp(ages)[1] - 3  # as in `bucket_of`
        buckets = np.where(exponents < 0, ages, 4 * exponents + (ages >> exponents.clip(0)))
        shape = (NUM_CLASSES, _NUM_BUCKETS)
        counts = np.bincount(classes * _NUM_BUCKETS + buckets, minlength=shape[0] * shape[1])
        return counts.reshape(shape).astype(np.float64)


def _indexes(
    came: _Floats, stopped: float, waiting: _Floats, widths: _Floats, later: npt.NDArray[np.bool_]
) -> _Floats:
    """Return the best rate of reuse from each age on.

    Args:
        came: keys by the age at which they came back. stopped: keys that were forgotten.
        waiting: keys by their age now, which may still come back: they count up to it.
        widths: of the buckets of ages. later: whether a bucket, the column, is not before another.
    """
    leaves = came + waiting
    beyond = stopped + np.cumsum(leaves[::-1])[::-1]  # reached the start of each bucket
    mean = beyond - leaves / 2  # over the bucket
    hits = np.concatenate(([0.0], np.cumsum(came)))
    kept = np.concatenate(([0.0], np.cumsum((mean + 0.5) * widths)))
    gain = hits[None, 1:] - hits[:-1, None]
    span = kept[None, 1:] - kept[:-1, None]
    return np.asarray(np.where(later, gain / np.where(later, span, 1.0), 0.0).max(axis=1))
