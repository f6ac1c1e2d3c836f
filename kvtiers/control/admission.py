"""Which blocks are worth a write to a slower store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

from kvtiers.model.errors import ConfigError
from kvtiers.model.keys import BlockKey

_REMEMBERED: Final = 1 << 20  # keys; about 150 MB at worst, days of traffic for one host


class Admission(Protocol):
    """Decides whether a store takes a block."""

    def worth(self, key: BlockKey) -> bool:
        """Whether the block should be written now; a question, it changes nothing."""
        ...

    def offered(self, key: BlockKey) -> None:
        """Note that the block was offered to the store, admitted or not."""
        ...


class Always:
    """Takes every block."""

    def worth(self, key: BlockKey) -> bool:  # noqa: ARG002 - the interface's parameter
        """Return True."""
        return True

    def offered(self, key: BlockKey) -> None:
        """Keep nothing."""


class SecondTouch:
    """Takes a block when it is offered again: what is seen once is seldom seen twice.

    Remembers the most recent `capacity` offers.
    """

    def __init__(self, capacity: int = _REMEMBERED) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[BlockKey, None] = OrderedDict()

    def worth(self, key: BlockKey) -> bool:
        """Return whether the block was offered before."""
        return key in self._seen

    def offered(self, key: BlockKey) -> None:
        """Remember the offer, forgetting the oldest."""
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)


def make_admission(name: str) -> Admission:
    """Return a new admission rule by its name in the configuration.

    Raises:
        ConfigError: no rule has that name; the message lists those that exist.
    """
    registry: dict[str, Callable[[], Admission]] = {"always": Always, "second_touch": SecondTouch}
    if name not in registry:
        raise ConfigError(f"admit: no rule {name!r}; known: {', '.join(sorted(registry))}")
    return registry[name]()
