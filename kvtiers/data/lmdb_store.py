"""The shared store: frames in an LMDB environment that several engines of a host use at once."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Final, NoReturn

from kvtiers.data.call_order import Call, CallOrder, Verb
from kvtiers.data.lmdb_access import LMDBAccess
from kvtiers.data.lmdb_reader import LMDBReader
from kvtiers.data.lmdb_settings import LMDBStoreSettings
from kvtiers.data.lmdb_writer import LMDBWriter
from kvtiers.data.slab import Slab
from kvtiers.data.store import FrameRef, StoreAnswer, StoreTicket
from kvtiers.model.errors import ProtocolError, TransferError
from kvtiers.model.keys import STORE_KEY_NBYTES, StoreKey
from kvtiers.model.outcome import Outcome

logger = logging.getLogger(__name__)

_IDLE_SECONDS: Final = 1.0  # accesses are noted at the latest after as long without a put
_MAX_TOUCHED: Final = 1 << 16
_NUM_READERS: Final = 2  # while one copies, without the interpreter's lock, the other looks up
_TOUCH_KEYS: Final = 512  # of one transaction
_CLOSE_SECONDS: Final = 60.0  # another process may have stopped while it held the write lock


class LMDBStore:
    """Frames that other processes find, and that other processes may evict.

    One thread writes and two read, each copying with more. What is not to be had, since
    the file was removed, damaged or made unreadable, is MISSING or FAILED; the store says so once
    and opens the file again when it is back. Two calls may wait: `keys` for the changes before
    it, `close` for everything.

    A store belongs to the process that made it: to a spawned one give the settings.

    Args:
        slab: where slots are. settings: where the environment is, and its bounds.

    Raises:
        StoreError, CapacityError: the environment cannot be had; says why, and the remedy.
        UnavailableError: another process keeps it, or it cannot be opened now.
    """

    def __init__(self, slab: Slab, settings: LMDBStoreSettings) -> None:
        self._slab = slab
        self._settings = settings
        self._access = LMDBAccess(settings)
        self._access.open()
        self._pid = os.getpid()
        self._tickets = itertools.count(1)
        self._order = CallOrder()
        self._mutex = threading.Lock()
        self._answers: list[StoreAnswer] = []
        self._touched: dict[StoreKey, None] = {}
        self._writer = LMDBWriter(self._access, slab)
        self._reader = LMDBReader(self._access, slab)
        self._threads = [
            threading.Thread(target=target, name=f"kvtiers-lmdb-{name}", daemon=True)
            for name, target in (
                ("writer", self._serve_changes),
                *((f"reader-{i}", self._serve_reads) for i in range(_NUM_READERS)),
            )
        ]
        self._closed = False
        for thread in self._threads:
            thread.start()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LMDBStore has threads and a slab: pickle its LMDBStoreSettings instead")

    def put(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Submit frames to keep.

        Raises:
            ProtocolError: the store is closed, or another process's, or a key has another size.
            TransferError: there is no such slot, or it is smaller.
        """
        return self._submit_frames(Verb.PUT, frames)

    def get(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Submit frames to bring into slots; raises what `put` does."""
        return self._submit_frames(Verb.GET, frames)

    def poll(self) -> list[StoreAnswer]:
        """Return the batches answered since the last call."""
        with self._mutex:
            answers, self._answers = self._answers, []
        return answers

    def delete(self, keys: Iterable[StoreKey]) -> None:
        """Drop frames, for all processes, after the calls before."""
        self._submit(Call(Verb.DELETE, tuple(keys)))

    def keys(self) -> list[StoreKey]:
        """Return the keys of all frames, of all processes; waits for the changes before it."""
        self._order.settle_changes(_CLOSE_SECONDS)
        return self._reader.keys()

    def retire(self) -> None:
        """Keep everything: other engines may ask for it. What nobody asks for leaves in time."""

    def clear(self) -> None:
        """Drop every frame, for all processes, after the calls before."""
        self._submit(Call(Verb.CLEAR))

    def close(self) -> None:
        """Finish what was submitted, and let go of the environment; idempotent."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._order.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            logger.error("%s: a transaction does not end; left as it is", self._settings.path)
            return
        self._access.close()

    # -- submission -------------------------------------------------------------------

    def _submit_frames(self, verb: Verb, frames: Sequence[FrameRef]) -> StoreTicket:
        num_slots, slot_nbytes = self._slab.num_slots, self._slab.slot_nbytes
        for frame in frames:
            if not (0 <= frame.slot < num_slots and 1 <= frame.nbytes <= slot_nbytes):
                raise TransferError(
                    f"{frame.nbytes} bytes in slot {frame.slot}: there are {num_slots} slots of "
                    f"{slot_nbytes} bytes"
                )
        ticket = StoreTicket(next(self._tickets))
        keys = tuple(frame.key for frame in frames)
        self._submit(Call(verb, keys, tuple(frames), ticket))
        return ticket

    def _submit(self, call: Call) -> None:
        if self._closed or self._pid != os.getpid():
            raise ProtocolError("the store is closed, or was made by another process")
        for nbytes in set(map(len, call.keys)) - {STORE_KEY_NBYTES}:
            raise ProtocolError(f"store key has {nbytes} bytes, expected {STORE_KEY_NBYTES}")
        self._order.submit(call)

    # -- the threads ------------------------------------------------------------------

    def _serve_changes(self) -> None:
        batch_frames = self._settings.batch_frames
        while (calls := self._order.next_changes(batch_frames, _IDLE_SECONDS)) is not None:
            try:
                self._note_accesses()  # first, that what was just read is not what leaves
                self._change(calls)
            except Exception:  # thread top: a batch that fails must not end the store
                logger.exception("%s: %d calls failed", self._settings.path, len(calls))
            for call in calls:
                self._finish(call)

    def _serve_reads(self) -> None:
        while (call := self._order.next_read()) is not None:
            started = time.perf_counter()
            try:
                call.outcomes = self._reader.get(call.frames)
                self._touch(call)
            except Exception:  # thread top: a batch that fails must not end the store
                logger.exception("%s: a batch was not read", self._settings.path)
            call.seconds = time.perf_counter() - started
            self._finish(call)

    def _change(self, calls: Sequence[Call]) -> None:
        if not calls:
            self._access.check()
        elif calls[0].verb is Verb.PUT:
            self._put(calls)
        elif calls[0].verb is Verb.DELETE:
            self._writer.delete(calls[0].keys)
        else:
            self._writer.clear()

    def _put(self, calls: Sequence[Call]) -> None:
        """Write the frames of several calls together, each call answered its share of the time."""
        fates = iter(self._writer.put([frame for call in calls for frame in call.frames]))
        for call in calls:
            kept = list(itertools.islice(fates, len(call.frames)))
            call.outcomes = [fate.outcome for fate in kept]
            call.held = frozenset(row for row, fate in enumerate(kept) if fate.held)
            call.seconds = sum(fate.seconds for fate in kept)

    def _finish(self, call: Call) -> None:
        if call.ticket is not None:
            missing = len(call.frames) - len(call.outcomes)
            outcomes = (*call.outcomes, *(Outcome.FAILED,) * missing)
            with self._mutex:
                self._answers.append(StoreAnswer(call.ticket, outcomes, call.seconds, call.held))
        self._order.done(call)

    # -- accesses ---------------------------------------------------------------------

    def _touch(self, call: Call) -> None:
        with self._mutex:
            if len(self._touched) < _MAX_TOUCHED:
                pairs = zip(call.keys, call.outcomes, strict=True)
                self._touched.update((key, None) for key, what in pairs if what is Outcome.OK)

    def _note_accesses(self) -> None:
        """Write some of the accesses that were seen; one that is lost only ages a frame."""
        with self._mutex:
            keys = list(itertools.islice(self._touched, _TOUCH_KEYS))
            for key in keys:
                del self._touched[key]
        if keys:
            self._writer.touch(keys)
