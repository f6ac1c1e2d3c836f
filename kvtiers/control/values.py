"""Makes tiers whose replacement rule knows how many seconds each block saves."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvtiers.control.policy import make_policy
from kvtiers.control.settings import ControlSettings
from kvtiers.control.tier import Tier
from kvtiers.cost.model import CostModel
from kvtiers.model.keys import BlockKey

_BELIEVED: Final = 1 << 14  # questions; then speeds are looked at again, which costs 0.1 ms
_LEAST_POSITIONS: Final = 1024


class SavedSeconds:
    """Answers how many seconds a hit on a block of one tier saves, by its place in the prefix.

    Computing it less loading it from there; all slots of a tier are of one size, so that this
    is its value per byte too. A rule multiplies it by its own estimate of the chance of reuse.

    Attributes:
        tier: whose blocks are asked about.

    Args:
        source: where the blocks lie, 0 for DRAM, else 1 + store index.
    """

    def __init__(self, settings: ControlSettings, cost: CostModel, source: int) -> None:
        self.tier: Tier | None = None
        self._settings = settings
        self._cost = cost
        self._source = source
        self._seconds: list[float] = []
        self._left = 0

    def __call__(self, key: BlockKey) -> float:
        """Return the seconds that a hit on a block saves; 0 for one that is not here."""
        entry = None if self.tier is None else self.tier.get(key)
        if entry is None:
            return 0.0
        self._left -= 1
        if self._left < 0 or entry.position >= len(self._seconds):
            self._look(max(2 * entry.position, len(self._seconds), _LEAST_POSITIONS))
        return self._seconds[entry.position]

    def _look(self, num_positions: int) -> None:
        self._left = _BELIEVED
        size, nbytes = self._settings.block_size, self._settings.block_nbytes
        first_tokens = np.arange(num_positions) * size
        saved = self._cost.seconds_saved(first_tokens, size, nbytes, self._source)
        self._seconds = saved.tolist()


def make_tier(
    name: str, capacity_blocks: int, settings: ControlSettings, cost: CostModel, source: int
) -> Tier:
    """Return an empty tier with the configured replacement rule, which knows what blocks save.

    Args:
        source: see `SavedSeconds`.
    """
    value = SavedSeconds(settings, cost, source)
    value.tier = Tier(name, capacity_blocks, make_policy(settings.evict, capacity_blocks, value))
    return value.tier
