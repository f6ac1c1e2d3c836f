"""Copying bytes from elsewhere in memory into slots, without the interpreter's lock if it can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtiers import native
from kvtiers.data.copier_host import CopyMethod
from kvtiers.data.slab import Slab
from kvtiers.model.errors import TransferError

Piece = tuple[int, int, bytes | memoryview]
"""Slot, where in it, and the bytes that come there; contiguous."""


class SlotFiller:
    """Copies batches of pieces; one by one in Python where the compiled module is missing.

    Args:
        slab: where the slots are. num_threads: that copy, the caller's included, >= 1.
    """

    def __init__(self, slab: Slab, num_threads: int = 1) -> None:
        self._slab = slab
        self._native: Any = native.load().PieceCopier(num_threads) if native.available() else None

    def fill(self, pieces: Sequence[Piece], *, method: CopyMethod = "auto") -> None:
        """Copy all pieces; returns when done.

        Args:
            pieces: slots and sources. method: how; "auto" goes by the size of the batch.

        Raises:
            TransferError: a piece leaves its slot; no byte has moved.
        """
        slab = self._slab
        targets, sources = [], []
        for slot, start, source in pieces:
            if not (0 <= slot < slab.num_slots and 0 <= start <= slab.slot_nbytes - len(source)):
                raise TransferError(
                    f"{len(source)} bytes at {start} of slot {slot} leave {slab.num_slots} slots "
                    f"of {slab.slot_nbytes}"
                )
            targets.append(slab.address + slot * slab.slot_nbytes + start)
            sources.append(source)
        if self._native is not None:
            chosen = getattr(native.load().Method, method.upper())
            self._native.copy(targets, sources, chosen)
            return
        for slot, start, source in pieces:
            slab.view(slot)[start : start + len(source)] = source
