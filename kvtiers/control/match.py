"""Which leading blocks of a request exist below HBM, and on which tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtiers.model.keys import BlockKey
from kvtiers.model.messages import UInt8s

ABSENT: Final = 255  # in `Match.sources`: no tier has the block

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Match:
    """Which leading blocks of a request exist below HBM.

    Attributes:
        start: blocks that the engine has itself; all else counts from here.
        sources: uint8 [groups, n], 0 for DRAM, 1 + store index, `ABSENT`.
        valid: bool [n + 1]; ``valid[m]`` says that the first m blocks make a usable prefix.
        unknown: keys whose presence in a shared store has not been looked up, by store.
        num_possible: the longest prefix beyond `start`, in blocks, if those were all there.
    """

    start: int
    sources: UInt8s
    valid: Bools
    unknown: dict[str, list[BlockKey]]
    num_possible: int

    @property
    def num_blocks(self) -> int:
        """The longest usable prefix beyond `start`, in blocks."""
        return int(np.flatnonzero(self.valid)[-1])

    @property
    def slowest_sources(self) -> UInt8s:
        """Of each block the slowest source that a KV group needs there; uint8 [n].

        What no tier has (a block outside a group's window) needs none, and counts as DRAM.
        """
        needed = np.where(self.sources == ABSENT, 0, self.sources)
        return np.asarray(needed.max(axis=0), dtype=np.uint8)

    def same_hits(self, other: Match) -> bool:
        """Whether another match found the same blocks in the same places."""
        return (
            self.start == other.start
            and self.sources.shape == other.sources.shape
            and bool((self.sources == other.sources).all())
        )
