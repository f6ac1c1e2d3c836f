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
        stream_from_nbytes: batches from this size on go past the cache; None for half of it, which
            is right for a batch alone. Of a stream of batches each finds the cache full of others.
    """

    def __init__(
        self, slab: Slab, num_threads: int = 1, *, stream_from_nbytes: int | None = None
    ) -> None:
        self._slab = slab
        self._native: Any = None
        if native.available():
            bound = -1 if stream_from_nbytes is None else stream_from_nbytes
            self._native = native.load().PieceCopier(num_threads, bound)

    def fill(self, pieces: Sequence[Piece], *, method: CopyMethod = "auto") -> None:
        """Copy all pieces; returns when done.

        Args:
            pieces: slots and sources. method: how; "auto" goes by the size of the batch.

        Raises:
            TransferError: a piece leaves its slot; no byte has moved.
        """
        slab = self._slab
        num_slots, slot_nbytes, address = slab.num_slots, slab.slot_nbytes, slab.address
        targets, sources = [], []
        for slot, start, source in pieces:
            if not (0 <= slot < num_slots and 0 <= start <= slot_nbytes - len(source)):
                raise TransferError(
                    f"{len(source)} bytes at {start} of slot {slot} leave {num_slots} slots of "
                    f"{slot_nbytes}"
                )
            targets.append(address + slot * slot_nbytes + start)
            sources.append(source)
        if self._native is not None:
            chosen = getattr(native.load().Method, method.upper())
            self._native.copy(targets, sources, chosen)
            return
        for slot, start, source in pieces:
            slab.view(slot)[start : start + len(source)] = source
