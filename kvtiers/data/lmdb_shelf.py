"""What is done to frames within one LMDB write transaction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from kvtiers.data.lmdb_access import Session
from kvtiers.data.lmdb_records import (
    COUNTERS_KEY,
    PREFIX_NBYTES,
    IndexRecord,
    footprint,
    key_of_order,
    order_key,
)
from kvtiers.data.lmdb_settings import Eviction
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome

MAX_EVICTIONS: Final = 256  # for one frame: bounds the work of a transaction
_TOUCH_SHARE: Final = 8  # a frame is young for 1 / 8 of the time that it takes to fill the store


class Kept(NamedTuple):
    """The fate of a frame that was to be kept.

    Attributes:
        held: it was there, and was not written. seconds: of its writing, once they are known.
    """

    outcome: Outcome
    held: bool = False
    seconds: float = 0.0

    @property
    def written(self) -> bool:
        """Whether its bytes went into the store just now."""
        return self.outcome is Outcome.OK and not self.held


class Shelf:
    """Frames, index, order and counters, changed together.

    Args:
        session: a write transaction. batch_frames: frames of a usual one, for the clock.
    """

    def __init__(self, session: Session, batch_frames: int) -> None:
        self._env, self._txn = session.env, session.txn
        self._batch_frames = batch_frames
        self.counters = session.env.counters(session.txn)
        self.counters.clock += 1

    def put(self, key: StoreKey, frame: memoryview, eviction: Eviction) -> Kept:
        """Keep a frame; one that is there stays as it is.

        Raises:
            lmdb.Error: the transaction must not be committed.
        """
        if self._txn.get(key, db=self._env.index) is not None:
            self.touch(key)
            return Kept(Outcome.OK, held=True)
        if not self._make_room(footprint(len(frame)), eviction):
            return Kept(Outcome.FULL)
        counters = self.counters
        record = IndexRecord(len(frame), counters.clock, bytes(frame[:PREFIX_NBYTES]))
        self._txn.put(key, frame[PREFIX_NBYTES:], db=self._env.frames)
        self._txn.put(key, record.encode(), db=self._env.index)
        self._txn.put(order_key(counters.clock, key), b"", db=self._env.order)
        counters.used_nbytes += footprint(len(frame))
        counters.num_frames += 1
        return Kept(Outcome.OK)

    def touch(self, key: StoreKey) -> None:
        """Note an access, unless the last one noted is recent."""
        found = self._txn.get(key, db=self._env.index)
        if found is None:
            return
        record, clock = IndexRecord.decode(found), self.counters.clock
        if clock - record.clock <= self.counters.num_frames // self._batch_frames // _TOUCH_SHARE:
            return
        self._txn.delete(order_key(record.clock, key), db=self._env.order)
        moved = IndexRecord(record.nbytes, clock, record.prefix)
        self._txn.put(key, moved.encode(), db=self._env.index)
        self._txn.put(order_key(clock, key), b"", db=self._env.order)

    def delete(self, keys: Iterable[StoreKey]) -> None:
        """Drop frames; keys that are not there are no error."""
        for key in keys:
            found = self._txn.get(key, db=self._env.index)
            if found is not None:
                record = IndexRecord.decode(found)
                self._drop(key, record.nbytes, record.clock)

    def evict(self, nbytes: int, most: int = MAX_EVICTIONS) -> int:
        """Drop the frames whose last access is longest ago; returns the bytes that this freed.

        Args:
            nbytes: how many to free. most: how many frames to drop at most.
        """
        freed = 0
        while freed < nbytes and most > 0:
            most -= 1
            with self._txn.cursor(self._env.order) as cursor:
                if not cursor.first():
                    break
                place = cursor.key()
            key = key_of_order(place)
            found = self._txn.get(key, db=self._env.index)
            if found is None:  # cannot be; but a place of nothing must not stop everything
                self._txn.delete(place, db=self._env.order)
                continue
            record = IndexRecord.decode(found)
            self._drop(key, record.nbytes, record.clock)
            freed += footprint(record.nbytes)
        return freed

    def clear(self) -> None:
        """Drop every frame."""
        for db in (self._env.frames, self._env.index, self._env.order):
            self._txn.drop(db, delete=False)
        self.counters.used_nbytes = self.counters.num_frames = 0

    def save(self) -> None:
        """Write the counters: last, in a transaction that is to be committed."""
        self._txn.put(COUNTERS_KEY, self.counters.encode(), db=self._env.meta)

    # -- internals --------------------------------------------------------------------

    def _make_room(self, nbytes: int, eviction: Eviction) -> bool:
        counters = self.counters
        excess = counters.used_nbytes + nbytes - counters.capacity_nbytes
        if excess <= 0:
            return True
        if eviction is Eviction.NONE or nbytes > counters.capacity_nbytes:
            return False
        return self.evict(excess) >= excess

    def _drop(self, key: StoreKey, nbytes: int, clock: int) -> None:
        self._txn.delete(key, db=self._env.frames)
        self._txn.delete(key, db=self._env.index)
        self._txn.delete(order_key(clock, key), db=self._env.order)
        self.counters.used_nbytes -= footprint(nbytes)
        self.counters.num_frames -= 1
