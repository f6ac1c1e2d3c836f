"""How often keys were seen of late, in a byte or two each."""

from __future__ import annotations

from typing import Final

_PER_BLOCK: Final = 256  # counters per block of the tier: one new key in 150 is taken for another
_MOST_COUNTERS: Final = 1 << 26  # 64 MiB; of more than 256k blocks each has fewer
_MOST: Final = 15
_LIFE: Final = 10  # after so many notes per block of the tier, all counts are halved
_HALVED_AT_ONCE: Final = 4096  # counters; a table is done long before its counts are old again
_HALVES: Final = bytes(count >> 1 for count in range(256))
_MIX: Final = 0x9E3779B1  # 2^32 over the golden ratio: Knuth's multiplicative hashing


class Sketch:
    """A count-min sketch that ages: counts are halved from time to time.

    A key has two one-byte counters of a table; the lower one counts. Halving a large table takes
    long: each note halves a part of it, and the counters that are yet to be halved say double.
    """

    def __init__(self, capacity: int) -> None:
        self._size = min(capacity * _PER_BLOCK, _MOST_COUNTERS)
        self._table = bytearray(self._size)
        self._life = _LIFE * capacity
        self._left = self._life
        self._halved = self._size  # counters, the first ones, that need no halving

    def note(self, fingerprint: int) -> None:
        """Count one use of a key, given as 32 bits."""
        table, size = self._table, self._size
        if self._halved < size:
            self._halve()
        first, second = fingerprint % size, (fingerprint * _MIX >> 7 & 0xFFFFFFFF) % size
        one, two = table[first], table[second]
        doubled = doubled_too = False
        if self._halved < size:
            doubled, doubled_too = first >= self._halved, second >= self._halved
            one, two = one >> doubled, two >> doubled_too
        if one < two:
            table[first] = one + 1 << doubled
        elif two < one:
            table[second] = two + 1 << doubled_too
        elif one < _MOST:
            table[first] = one + 1 << doubled
            table[second] = one + 1 << doubled_too
        self._left -= 1
        if self._left <= 0:
            self._halved = 0
            self._left = self._life - (self._life >> 1)

    def _halve(self) -> None:
        part = slice(self._halved, self._halved + _HALVED_AT_ONCE)
        self._table[part] = self._table[part].translate(_HALVES)
        self._halved += _HALVED_AT_ONCE

    def count(self, fingerprint: int) -> int:
        """Return how often a key was noted of late, or more; 15 at most."""
        table, size = self._table, self._size
        first, second = fingerprint % size, (fingerprint * _MIX >> 7 & 0xFFFFFFFF) % size
        one, two = table[first], table[second]
        if self._halved < size:
            one, two = one >> (first >= self._halved), two >> (second >= self._halved)
        return one if one < two else two
