"""What an earlier life left in a private store, as ranks told it at the start."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtiers.model.keys import StoreKey
from kvtiers.model.messages import UInt8s

PREFIX_NBYTES = 8


class Inventory:
    """The first 8 bytes of each store key, of every rank; of 2^32 other keys one would seem there.

    Args:
        of_ranks: per rank the prefixes one after another, big-endian, sorted.

    Raises:
        ValueError: bytes that are no whole number of prefixes, or not sorted.
    """

    def __init__(self, of_ranks: Sequence[bytes]) -> None:
        self._of_ranks = [_column(prefixes) for prefixes in of_ranks]

    def __len__(self) -> int:
        """Return how many frames the rank with the fewest has."""
        return min(map(len, self._of_ranks), default=0)

    def present(self, names: Sequence[Sequence[StoreKey]]) -> UInt8s:
        """Return one flag per block: whether every rank has its frame.

        Args:
            names: per block, per rank.
        """
        flags = np.ones(len(names), np.uint8)
        for rank, column in enumerate(self._of_ranks):
            joined = b"".join(of_block[rank][:PREFIX_NBYTES] for of_block in names)
            wanted = np.frombuffer(joined, ">u8").astype(np.uint64)
            at = np.searchsorted(column, wanted)
            if not len(column):
                return np.zeros(len(names), np.uint8)
            flags &= column[np.minimum(at, len(column) - 1)] == wanted
        return flags


def _column(prefixes: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    if len(prefixes) % PREFIX_NBYTES:
        raise ValueError(f"an inventory of {len(prefixes)} bytes is no whole number of prefixes")
    column = np.frombuffer(prefixes, ">u8").astype(np.uint64)
    if (column[1:] < column[:-1]).any():
        raise ValueError("an inventory is not sorted")
    return column
