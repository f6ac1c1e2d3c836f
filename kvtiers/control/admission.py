"""Which blocks are worth a write to a slower store."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvtiers.control.reuse import ReuseChances
from kvtiers.control.settings import ControlSettings
from kvtiers.cost.links import write_link
from kvtiers.cost.model import CostModel
from kvtiers.cost.value import block_values
from kvtiers.model.errors import ConfigError
from kvtiers.model.keys import BlockKey

_REMEMBERED: Final = 1 << 20  # keys; about 150 MB at worst, days of traffic for one host
# Share of a write's time that counts as a cost: nobody waits for a write, and it delays a load only
# where both meet on the disk.
_WRITE_SHARE: Final = 0.1
_BELIEVED_SECONDS: Final = 1.0  # then speeds are looked at again, which costs 0.1 ms
_LEAST_POSITIONS: Final = 1024


class Admission(Protocol):
    """Decides whether a store takes a block."""

    def worth(self, key: BlockKey, position: int) -> bool:
        """Whether the block should be written now; a question, it changes nothing.

        Args:
            position: of the block in its prefix, counted from 0.
        """
        ...

    def offered(self, key: BlockKey) -> None:
        """Note that the block was offered to the store, admitted or not."""
        ...

    def tick(self, now: float) -> None:
        """Let time pass."""
        ...


class Always:
    """Takes every block."""

    def worth(self, key: BlockKey, position: int) -> bool:  # noqa: ARG002 - the interface's
        """Return True."""
        return True

    def offered(self, key: BlockKey) -> None:
        """Keep nothing."""

    def tick(self, now: float) -> None:
        """Keep nothing."""


class SecondTouch:
    """Takes a block when it is offered again: what is seen once is seldom seen twice.

    Remembers the most recent `capacity` offers.
    """

    def __init__(self, capacity: int = _REMEMBERED) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[BlockKey, None] = OrderedDict()

    def worth(self, key: BlockKey, position: int) -> bool:  # noqa: ARG002 - the interface's
        """Return whether the block was offered before."""
        return key in self._seen

    def offered(self, key: BlockKey) -> None:
        """Remember the offer, forgetting the oldest."""
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def tick(self, now: float) -> None:
        """Keep nothing."""


class WorthItsWrite:
    """Takes a block that is expected to save more time than its write costs.

    Saved are the seconds of computing it less those of loading it from the store, which grow with
    its position, times the chance that it is asked for again. A block that is computed faster
    than it is loaded saves nothing, and is never written.

    Args:
        idx: of the store.
    """

    def __init__(
        self, settings: ControlSettings, idx: int, cost: CostModel, chances: ReuseChances
    ) -> None:
        self._settings = settings
        self._idx = idx
        self._cost = cost
        self._chances = chances
        self._values: npt.NDArray[np.float64] = np.empty(0)
        self._price = 0.0
        self._until = 0.0

    def worth(self, key: BlockKey, position: int) -> bool:
        """Return whether the expected seconds saved per byte exceed those of the write."""
        if position >= len(self._values):
            self._look(max(2 * position, _LEAST_POSITIONS))
        return bool(self._chances.of(key) * self._values[position] > self._price)

    def offered(self, key: BlockKey) -> None:
        """Keep nothing: what is asked for again is noted where it is asked for."""

    def tick(self, now: float) -> None:
        """Look at the speeds again from time to time."""
        if now >= self._until:
            self._until = now + _BELIEVED_SECONDS
            self._values = np.empty(0)

    def _look(self, num_positions: int) -> None:
        """Work out, per byte, what a block at each position saves if it is asked for again."""
        size, nbytes = self._settings.block_size, self._settings.block_nbytes
        first_tokens = np.arange(num_positions) * size
        saved = self._cost.seconds_saved(first_tokens, size, nbytes, 1 + self._idx)
        self._values = block_values(saved, 1.0, nbytes)
        link = self._cost.links[write_link(self._settings.stores[self._idx].name)]
        seconds = link.seconds_per_piece + nbytes / link.bandwidth_bytes_per_second
        self._price = _WRITE_SHARE * seconds / nbytes


def make_admission(
    settings: ControlSettings, idx: int, cost: CostModel, chances: ReuseChances
) -> Admission:
    """Return a new admission rule for a store, as its settings name it.

    Raises:
        ConfigError: no rule has that name; the message lists those that exist.
    """
    name = settings.stores[idx].admit
    if name == "cost":
        return WorthItsWrite(settings, idx, cost, chances)
    registry: dict[str, type[Always | SecondTouch]] = {
        "always": Always,
        "second_touch": SecondTouch,
    }
    if name not in registry:
        raise ConfigError(
            f"admit: no rule {name!r}; known: {', '.join(sorted([*registry, 'cost']))}"
        )
    return registry[name]()
