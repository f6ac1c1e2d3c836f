"""Frames into an LMDB environment, in batches that fail one by one if they must."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

import lmdb

from kvtiers.data.lmdb_access import LMDBAccess
from kvtiers.data.lmdb_errors import UnavailableError
from kvtiers.data.lmdb_records import footprint
from kvtiers.data.lmdb_settings import Eviction
from kvtiers.data.lmdb_shelf import Kept, Shelf
from kvtiers.data.slab import Slab
from kvtiers.data.store import FrameRef
from kvtiers.model.errors import KVTiersError
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome

logger = logging.getLogger(__name__)

_DELETE_KEYS: Final = 256  # of one transaction
_SINGLE_ATTEMPTS: Final = 4  # freed pages return two transactions later
_CHECK_EVERY: Final = 256  # transactions
_BATCH_SHARE: Final = 16  # a transaction writes at most 1 / 16 of the map


class LMDBWriter:
    """Writes on one thread. Every frame's fate is an `Outcome`, whatever LMDB raises."""

    def __init__(self, access: LMDBAccess, slab: Slab) -> None:
        self._access = access
        self._slab = slab
        self._settings = access.settings
        self._num_transactions = 0
        self._says_failure = True

    def put(self, frames: Sequence[FrameRef]) -> list[Kept]:
        """Keep frames, in as many transactions as it takes.

        The time of each transaction is that of the frames written in it. One that holds all its
        frames already takes 0.1 ms, to note accesses, which no write is to be measured by.
        """
        kept: list[Kept] = []
        while len(kept) < len(frames):
            batch = self._next_batch(frames, len(kept))
            started = time.perf_counter()
            try:
                fates = self._put_batch(batch)
                kept += _timed(batch, fates, time.perf_counter() - started)
            except UnavailableError as error:  # which was said already
                logger.debug("%d frames not written: %s", len(batch), error)
                kept += [Kept(Outcome.FAILED)] * len(batch)
            except (KVTiersError, OSError, ValueError) as error:
                self._say(len(batch), error)
                kept += [Kept(Outcome.FAILED)] * len(batch)
        return kept

    def delete(self, keys: Sequence[StoreKey]) -> None:
        """Drop frames; those of a store that is away stay, which is safe: a key is content."""
        for start in range(0, len(keys), _DELETE_KEYS):
            part = keys[start : start + _DELETE_KEYS]
            self._change(lambda shelf, part=part: shelf.delete(part), "delete frames")  # type: ignore[misc]

    def clear(self) -> None:
        """Drop every frame."""
        self._change(Shelf.clear, "drop all frames")

    def touch(self, keys: Iterable[StoreKey]) -> None:
        """Note accesses."""

        def touch(shelf: Shelf) -> None:
            for key in keys:
                shelf.touch(key)

        self._change(touch, "note accesses")

    # -- internals --------------------------------------------------------------------

    def _next_batch(self, frames: Sequence[FrameRef], start: int) -> Sequence[FrameRef]:
        """Return the frames of the next transaction: at least one, bounded in number and bytes."""
        room = self._settings.capacity_nbytes // _BATCH_SHARE
        end = start
        while end < len(frames) and end - start < self._settings.batch_frames:
            room -= footprint(frames[end].nbytes)
            if room < 0 and end > start:
                break
            end += 1
        return frames[start:end]

    def _put_batch(self, frames: Sequence[FrameRef]) -> list[Kept]:
        """Write a batch; where it fails, its halves, down to single frames."""
        attempts = _SINGLE_ATTEMPTS if len(frames) == 1 else 1
        full = False
        for _ in range(attempts):
            try:
                return self._transact(frames)
            except lmdb.MapFullError:
                full = True
                if self._adopt_growth():
                    return self._put_batch(frames)
            except lmdb.Error as error:  # EIO is what a full disk makes of a commit
                full = False
                self._say(len(frames), error)
            self._make_room(frames)
        if len(frames) == 1:
            return [Kept(Outcome.FULL if full else Outcome.FAILED)]
        middle = len(frames) // 2
        return self._put_batch(frames[:middle]) + self._put_batch(frames[middle:])

    def _transact(self, frames: Sequence[FrameRef]) -> list[Kept]:
        eviction = self._settings.eviction
        with self._access.writing() as session:
            shelf = Shelf(session, self._settings.batch_frames)
            session.env.prepare(shelf.counters, sum(footprint(frame.nbytes) for frame in frames))
            kept = [
                shelf.put(frame.key, self._slab.view(frame.slot)[: frame.nbytes], eviction)
                for frame in frames
            ]
            shelf.save()
        if shelf.counters.capacity_nbytes != session.env.state.capacity_nbytes:
            self._adopt_growth()
        self._after()
        self._says_failure = True
        return kept

    def _adopt_growth(self) -> bool:
        """Map what another process has grown the file to; returns whether it had."""
        try:
            return self._access.open().adopt_growth()
        except (KVTiersError, OSError) as error:
            logger.debug("%s: %s", self._settings.path, error)
            return False

    def _make_room(self, frames: Sequence[FrameRef]) -> None:
        """Free pages for frames that found none: those of dead readers, then of old frames."""
        nbytes = 2 * sum(footprint(frame.nbytes) for frame in frames)
        self._access.open().free_stale_readers()
        if self._settings.eviction is Eviction.OLDEST:
            self._change(lambda shelf: shelf.evict(nbytes), "evict")
        for _ in range(2):  # what was freed can be used by the transaction after the next
            self._change(Shelf.save, "pass on free pages")

    def _change(self, change: Callable[[Shelf], object], what: str) -> None:
        try:
            with self._access.writing() as session:
                shelf = Shelf(session, self._settings.batch_frames)
                change(shelf)
                shelf.save()
        except (KVTiersError, OSError, lmdb.Error) as error:
            logger.debug("%s: cannot %s: %s", self._settings.path, what, error)
            return
        self._after()

    def _after(self) -> None:
        """After each transaction: let another process have its turn, and look for dead readers."""
        self._num_transactions += 1
        if self._num_transactions % _CHECK_EVERY == 0:
            with suppress(UnavailableError):
                self._access.open().free_stale_readers()
        os.sched_yield()  # the write lock is not fair: who asks again at once may get it again

    def _say(self, num_frames: int, error: Exception) -> None:
        """Report the first failure since something was written."""
        log = logger.warning if self._says_failure else logger.debug
        log("%s: %d frames not written: %s", self._settings.path, num_frames, error)
        self._says_failure = False


def _timed(frames: Sequence[FrameRef], fates: Sequence[Kept], seconds: float) -> list[Kept]:
    """Share the time of a batch among the frames that were written, by their bytes."""
    nbytes = [
        frame.nbytes if fate.written else 0 for frame, fate in zip(frames, fates, strict=True)
    ]
    per_byte = seconds / max(1, sum(nbytes))
    return [fate._replace(seconds=per_byte * n) for fate, n in zip(fates, nbytes, strict=True)]
