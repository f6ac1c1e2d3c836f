"""Frames out of an LMDB environment, copied in short read transactions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import lmdb

from kvtiers.data.lmdb_access import LMDBAccess, Session
from kvtiers.data.lmdb_environment import UnavailableError
from kvtiers.data.lmdb_records import IndexRecord
from kvtiers.data.piece_copier import Piece, PieceCopier
from kvtiers.data.slab import Slab
from kvtiers.data.store import FrameRef
from kvtiers.model.errors import KVTiersError
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome

logger = logging.getLogger(__name__)

_BATCH_FRAMES: Final = 64  # of one transaction, and
_BATCH_NBYTES: Final = 64 << 20  # about 5 ms: pages that are freed meanwhile wait for its end


class LMDBReader:
    """Reads on one thread. What is not there, or not to be had, is MISSING."""

    def __init__(self, access: LMDBAccess, slab: Slab) -> None:
        self._access = access
        self._slab = slab
        self._copier = PieceCopier(access.settings.num_copy_threads)

    def get(self, frames: Sequence[FrameRef]) -> list[Outcome]:
        """Bring frames into their slots."""
        outcomes: list[Outcome] = []
        while len(outcomes) < len(frames):
            batch = _next_batch(frames, len(outcomes))
            try:
                with self._access.reading() as session:
                    found = self._get_batch(session, batch)
            except (UnavailableError, KVTiersError, OSError) as error:
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
        except (UnavailableError, KVTiersError, OSError, lmdb.Error) as error:
            logger.debug("no keys: %s", error)
            return []

    def _get_batch(self, session: Session, frames: Sequence[FrameRef]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        pieces: list[Piece] = []
        prefixes: list[tuple[memoryview, bytes]] = []
        for frame in frames:
            outcome, value, prefix = _find(session, frame)
            outcomes.append(outcome)
            if value is not None:
                target = self._slab.view(frame.slot)[: frame.nbytes]
                prefixes.append((target, prefix))
                pieces.append((target[len(prefix) :], value))
        self._copier.copy(pieces)
        for target, prefix in prefixes:
            target[: len(prefix)] = prefix
        for _, value in pieces:
            value.release()  # it must not be looked at after the transaction
        return outcomes


def _find(session: Session, frame: FrameRef) -> tuple[Outcome, memoryview | None, bytes]:
    """Return a frame's outcome and, where it is OK, the bytes of its value and before them."""
    found = session.txn.get(frame.key, db=session.env.index)
    if found is None:
        return Outcome.MISSING, None, b""
    record = IndexRecord.decode(found)
    if record.nbytes != frame.nbytes:
        return Outcome.CORRUPT, None, b""
    value = session.txn.get(frame.key, db=session.env.frames)
    if value is None or len(value) != frame.nbytes - len(record.prefix):
        return Outcome.CORRUPT, None, b""
    return Outcome.OK, value, record.prefix


def _next_batch(frames: Sequence[FrameRef], start: int) -> Sequence[FrameRef]:
    nbytes, end = 0, start
    while end < len(frames) and end - start < _BATCH_FRAMES:
        nbytes += frames[end].nbytes
        if nbytes > _BATCH_NBYTES and end > start:
            break
        end += 1
    return frames[start:end]
