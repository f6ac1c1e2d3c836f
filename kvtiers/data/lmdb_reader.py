"""Frames out of an LMDB environment, copied in short read transactions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import lmdb

from kvtiers.data.lmdb_access import LMDBAccess, Session
from kvtiers.data.lmdb_records import unpack_index
from kvtiers.data.slab import Slab
from kvtiers.data.slot_filler import Piece, SlotFiller
from kvtiers.data.store import FrameRef
from kvtiers.model.errors import KVTiersError
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome

logger = logging.getLogger(__name__)

_BATCH_FRAMES: Final = 64  # of one transaction, and
_BATCH_NBYTES: Final = 64 << 20  # about 5 ms: pages that are freed meanwhile wait for its end
_STREAM_NBYTES: Final = 4 << 20  # gets follow each other: none finds its slots in the cache


class LMDBReader:
    """Reads on any thread. What is not there, or not to be had, is MISSING.

    Nothing is waited for in a transaction: it looks up, copies without the interpreter's lock,
    and ends.
    """

    def __init__(self, access: LMDBAccess, slab: Slab) -> None:
        self._access = access
        self._filler = SlotFiller(
            slab, access.settings.num_copy_threads, stream_from_nbytes=_STREAM_NBYTES
        )

    def get(self, frames: Sequence[FrameRef]) -> list[Outcome]:
        """Bring frames into their slots."""
        outcomes: list[Outcome] = []
        while len(outcomes) < len(frames):
            batch = _next_batch(frames, len(outcomes))
            try:
                with self._access.reading() as session:
                    found = self._get_batch(session, batch)
            except (KVTiersError, OSError) as error:
                logger.debug("%d frames not read: %s", len(batch), error)
                found = [Outcome.MISSING] * len(batch)
            except (lmdb.Error, ValueError) as error:
                logger.warning("%d frames not read: %s", len(batch), error)
                found = [Outcome.FAILED] * len(batch)
            outcomes += found
        return outcomes

    def keys(self) -> list[StoreKey]:
        """Return the keys of all frames; of none while the store is away."""
        try:
            with self._access.reading() as session, session.txn.cursor(session.env.index) as cursor:
                return [StoreKey(bytes(key)) for key in cursor.iternext(values=False)]
        except (KVTiersError, OSError, lmdb.Error) as error:
            logger.debug("no keys: %s", error)
            return []

    def _get_batch(self, session: Session, frames: Sequence[FrameRef]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        pieces: list[Piece] = []
        get, index, values = session.txn.get, session.env.index, session.env.frames
        for frame in frames:
            key, slot = frame.key, frame.slot
            record = get(key, None, index)
            if record is None:
                outcomes.append(Outcome.MISSING)
                continue
            nbytes, _, prefix = unpack_index(record)
            value = get(key, None, values) if nbytes == frame.nbytes else None
            if value is None or len(value) != nbytes - len(prefix):
                outcomes.append(Outcome.CORRUPT)
                continue
            outcomes.append(Outcome.OK)
            pieces += ((slot, 0, prefix), (slot, len(prefix), value))
        self._filler.fill(pieces)
        return outcomes  # the views go with the pieces, before the transaction does


def _next_batch(frames: Sequence[FrameRef], start: int) -> Sequence[FrameRef]:
    nbytes, end = 0, start
    while end < len(frames) and end - start < _BATCH_FRAMES:
        nbytes += frames[end].nbytes
        if nbytes > _BATCH_NBYTES and end > start:
            break
        end += 1
    return frames[start:end]
