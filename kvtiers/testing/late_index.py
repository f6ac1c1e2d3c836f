"""An inventory on a medium that answers late, or hangs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from kvtiers.data.inventory import Inventory
from kvtiers.model.keys import StoreKey
from kvtiers.model.messages import UInt8s

HANGS: Final = 600.0  # longer than any test


class LateInventory(Inventory):
    """Answers so many seconds after it was asked, or as soon as it is released for good.

    Args:
        of_ranks: see `Inventory`.
    """

    def __init__(self, of_ranks: Sequence[bytes], seconds: float) -> None:
        super().__init__(of_ranks)
        self.seconds = seconds
        self._released = threading.Event()

    def present(self, names: Sequence[Sequence[StoreKey]]) -> UInt8s:
        """Return one flag per block, late."""
        self._released.wait(self.seconds)
        return super().present(names)

    def release(self) -> None:
        """Answer at once from now on, what waits included."""
        self._released.set()
