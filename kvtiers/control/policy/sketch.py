"""How often keys were seen of late, in a byte or two each."""

from __future__ import annotations

from typing import Final

_PER_BLOCK: Final = 256  # counters per block of the tier: one new key in 150 is taken for another
_MOST_COUNTERS: Final = 1 << 26  # 64 MiB; of more than 256k blocks each has fewer
_MOST: Final = 15
_LIFE: Final = 10  # after so many notes per block of the tier, all counts are halved
_HALVES: Final = bytes(count >> 1 for count in range(256))
_MIX: Final = 0x9E3779B1  # 2^32 over the golden ratio: Knuth's multiplicative hashing


class Sketch:
    """A count-min sketch that ages: counts are halved from time to time.

    A key has two one-byte counters of a table; the lower one counts.
    """

    def __init__(self, capacity: int) -> None:
        self._size = min(capacity * _PER_BLOCK, _MOST_COUNTERS)
        self._table = bytearray(self._size)
        self._life = _LIFE * capacity
        self._left = self._life

    def note(self, fingerprint: int) -> None:
        """Count one use of a key, given as 32 bits."""
        table, size = self._table, self._size
        first, second = fingerprint % size, (fingerprint * _MIX >> 7 & 0xFFFFFFFF) % size
        one, two = table[first], table[second]
        if one < two:
            table[first] = one + 1
        elif two < one:
            table[second] = two + 1
        elif one < _MOST:
            table[first] = table[second] = one + 1
        self._left -= 1
        if self._left <= 0:
            self._table = table.translate(_HALVES)
            self._left = self._life - (self._life >> 1)

    def count(self, fingerprint: int) -> int:
        """Return how often a key was noted of late, or more; 15 at most."""
        one = self._table[fingerprint % self._size]
        two = self._table[(fingerprint * _MIX >> 7 & 0xFFFFFFFF) % self._size]
        return one if one < two else two
