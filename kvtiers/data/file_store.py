"""The store on local disks: frames in slots of preallocated files, found again after a restart."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Final

from kvtiers.data.file_flights import Batch, Entry, Flight, Flights, Row
from kvtiers.data.file_index import IndexChange, IndexRecord
from kvtiers.data.file_opening import PathReport, open_files
from kvtiers.data.file_orders import OrderBox
from kvtiers.data.file_recovery import inventory_of
from kvtiers.data.file_settings import FileStoreSettings, spare_slots
from kvtiers.data.file_slots import FileSlots, Place
from kvtiers.data.index_publisher import IndexPublisher
from kvtiers.data.io.base import IoEngine
from kvtiers.data.io.choice import make_io
from kvtiers.data.slab import Slab
from kvtiers.data.store import FrameRef, StoreAnswer, StoreTicket
from kvtiers.model.errors import KVTiersError, ProtocolError, TransferError
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome

_DRAIN_SECONDS: Final = 0.0005  # between looks at the engine while closing


class FileStore:
    """Frames in files, by key. It places them itself and keeps a bound in bytes on disk.

    A frame is found by `get` as soon as its `put` is answered; a restart finds it once the
    index has been published, half a second later or at `close`. Frames of an earlier
    life that nobody has asked for leave by themselves, oldest first, when room is needed:
    control cannot name them. All others leave by `delete` only.

    A read that fails in the medium (FAILED, or CORRUPT for a file that was cut) may have
    changed its slot.

    Args:
        slab: where slots are; it outlives the store. settings: see there.
        engine: moves the bytes, and is closed with the store; None for what settings say.

    Raises:
        StoreError: a folder or file cannot be used, or another process owns it.
        CapacityError: the capacity holds no frame, or the disk has less room.
        NativeModuleError: a compiled I/O engine is a must, and missing.
    """

    def __init__(
        self, slab: Slab, settings: FileStoreSettings, engine: IoEngine | None = None
    ) -> None:
        self.settings = settings
        self._slab = slab
        self._clock = time.perf_counter
        self._disk = open_files(settings, slab.slot_nbytes)
        try:
            self._engine = engine or make_io(settings.io, settings.depth)
        except KVTiersError:
            self._disk.close()
            raise
        records = self._disk.records
        num_files, per_file = len(settings.paths), self._disk.slots_per_file
        self._slots = FileSlots(
            num_files,
            per_file,
            [Place(record.file_idx, record.slot) for record in records.values()],
            spare_slots(num_files * per_file, slab.slot_nbytes),
        )
        self._entries = {key: _entry_of(key, record) for key, record in records.items()}
        self._inventory = inventory_of(records)
        self._inherited = OrderedDict.fromkeys(records)
        last = max((record.sequence for record in records.values()), default=0)
        self._sequence = itertools.count(last + 1)
        records.clear()  # a million of them take as much memory as their entries, which know it all
        self._generation = self._disk.index.generation
        self._publisher = IndexPublisher(
            self._disk.index, self._disk.files, settings.publish_seconds
        )
        self._orders = OrderBox(self._disk.folders[0].path, self._publisher)
        self._flights = Flights(slab, self._disk.files, self._engine)
        self._gated: deque[Flight] = deque()
        self._tickets = itertools.count(1)
        self._answers: list[StoreAnswer] = []
        self._closed = False

    # -- what it is -------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Frames that fit: `max_frames` of the capacity."""
        return self._slots.num_slots

    @property
    def num_free(self) -> int:
        """Slots that are free now; frames that are being written or read have theirs."""
        return self._slots.num_free

    @property
    def generation(self) -> int:
        """Grows with every `clear`, also over restarts."""
        return self._generation

    @property
    def io(self) -> str:
        """The I/O engine that serves."""
        return self._engine.name

    @property
    def paths(self) -> tuple[PathReport, ...]:
        """How each path is used now."""
        return self._disk.reports()

    @property
    def num_inherited(self) -> int:
        """Frames of an earlier life that nobody has asked for."""
        return len(self._inherited)

    @property
    def inventory(self) -> bytes:
        """The first 8 bytes of the key of each frame that was found at opening, sorted, joined."""
        return self._inventory

    @property
    def num_unsynced(self) -> int:
        """Frames that a restart will not find, since the disk did not confirm them."""
        return self._publisher.num_unsynced

    # -- the interface of a store -----------------------------------------------------

    def put(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Submit frames to write."""
        batch = self._begin(frames)
        fresh: dict[StoreKey, int] = {}
        repeated: list[int] = []
        for row, frame in enumerate(frames):
            entry = self._entries.get(frame.key)
            if entry is None:
                if frame.key in fresh:
                    repeated.append(row)
                else:
                    fresh[frame.key] = row
            elif entry.written:
                self._inherited.pop(frame.key, None)
                self._settle_held(batch, row, Outcome.OK)
            else:
                entry.followers.append((batch, row, None))
        self._write(batch, frames, list(fresh.values()))
        for row in repeated:
            entry = self._entries.get(frames[row].key)
            if entry is None:
                self._settle(batch, row, Outcome.FULL)
            else:
                entry.followers.append((batch, row, None))
        return batch.ticket

    def get(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Submit frames to read."""
        batch = self._begin(frames)
        rows = []
        for row, frame in enumerate(frames):
            entry = self._entries.get(frame.key)
            if entry is None:
                self._settle(batch, row, Outcome.MISSING)
                continue
            self._inherited.pop(frame.key, None)
            if entry.nbytes != frame.nbytes:
                self._settle(batch, row, Outcome.CORRUPT)
            elif entry.written:
                entry.num_readers += 1
                rows.append(Row(batch, row, entry, frame.slot))
            else:
                entry.followers.append((batch, row, frame))
        if rows:
            self._flights.start(self._flights.plan(rows, writes=False))
        return batch.ticket

    def poll(self) -> list[StoreAnswer]:
        """Return the batches answered since the last call."""
        if not self._closed:
            self._orders.attend(self)
            self._advance()
        answers, self._answers = self._answers, []
        return answers

    def delete(self, keys: Iterable[StoreKey]) -> None:
        """Drop frames; their room is free once nothing reads or writes them."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                self._drop(entry)

    def keys(self) -> list[StoreKey]:
        """Return the keys of all frames, those first that were put first."""
        return [key for key, entry in self._entries.items() if entry.written]

    def retire(self) -> None:
        """Treat all frames as those of an earlier life: they leave, oldest first, as need be."""
        for key, entry in self._entries.items():
            if entry.written:
                self._inherited[key] = None
            else:
                entry.retired = True

    def clear(self) -> None:
        """Drop every frame and begin a new generation, durably within `publish_seconds`."""
        if self._closed:
            return
        self._generation += 1
        change = self._publisher.add(IndexChange(None, generation=self._generation))
        entries, self._entries = self._entries, {}
        self._inherited.clear()
        for entry in entries.values():
            entry.dropped = True
            entry.change = change if entry.written else 0
            self._give_back(entry)

    def close(self) -> None:
        """Finish what was submitted, publish the index, and let go of the folders."""
        if self._closed:
            return
        while self._flights.num_running or self._gated:
            self._advance()
            if self._publisher.failed:
                self._refuse_gated()
            time.sleep(_DRAIN_SECONDS)
        self._closed = True
        self._publisher.close()
        self._orders.close()
        self._engine.close()
        self._disk.close()

    # -- internals --------------------------------------------------------------------

    def _begin(self, frames: Sequence[FrameRef]) -> Batch:
        """Check a batch and enrol it. One that raises has taken nothing."""
        if self._closed:
            raise ProtocolError("the file store is closed")
        for frame in frames:
            if not 0 <= frame.slot < self._slab.num_slots:
                raise TransferError(f"slot {frame.slot} is not in 0..{self._slab.num_slots - 1}")
            if not 0 < frame.nbytes <= self._slab.slot_nbytes:
                raise TransferError(
                    f"a frame of {frame.nbytes} bytes, in slots of {self._slab.slot_nbytes}"
                )
        batch = Batch(StoreTicket(next(self._tickets)), [None] * len(frames), self._clock())
        if not frames:
            self._answers.append(StoreAnswer(batch.ticket, (), 0.0))
        return batch

    def _settle(self, batch: Batch, row: int, outcome: Outcome) -> None:
        batch.outcomes[row] = outcome
        batch.num_pending -= 1
        if batch.num_pending == 0:
            outcomes = tuple(found for found in batch.outcomes if found is not None)
            seconds = self._clock() - batch.started
            self._answers.append(
                StoreAnswer(batch.ticket, outcomes, seconds, frozenset(batch.held))
            )

    def _settle_held(self, batch: Batch, row: int, outcome: Outcome) -> None:
        """Settle a row of a put that another row has written, or has failed to."""
        if outcome is Outcome.OK:
            batch.held.add(row)
        self._settle(batch, row, outcome)

    def _write(self, batch: Batch, frames: Sequence[FrameRef], rows: Sequence[int]) -> None:
        """Place frames and write them; those without a place are FULL."""
        self._make_room(len(rows))
        places, change = self._slots.take(len(rows), self._publisher.num_committed)
        flying = []
        for row, place in zip(rows, places, strict=False):
            frame = frames[row]
            entry = Entry(frame.key, place, frame.nbytes, next(self._sequence))
            self._entries[frame.key] = entry
            flying.append(Row(batch, row, entry, frame.slot))
        for row in rows[len(places) :]:
            self._settle(batch, row, Outcome.FULL)
        if not flying:
            return
        flight = self._flights.plan(flying, writes=True)
        self._publisher.want(max(change, self._slots.newest_stale))
        if change:
            flight.change = change
            self._gated.append(flight)
        else:
            self._flights.start(flight)

    def _make_room(self, num: int) -> None:
        """Drop frames of an earlier life, as far as they are in the way."""
        while self._inherited and self._slots.num_free < num:
            key, _ = self._inherited.popitem(last=False)
            self._drop(self._entries[key])

    def _advance(self) -> None:
        """Take what the engine has ended, and start what need not wait any longer."""
        changes: list[IndexChange] = []
        for flight, run, outcome in self._flights.ended():
            for row in run:
                if flight.writes:
                    self._written(row, outcome, changes)
                else:
                    self._read(row, outcome)
        if changes:  # all at once; no frame is read or dropped in the round that wrote it
            self._publisher.add(*changes)
        if self._gated and self._publisher.failed:
            self._refuse_gated()
        while self._gated and self._gated[0].change <= self._publisher.num_committed:
            self._flights.start(self._gated.popleft())

    def _written(self, row: Row, outcome: Outcome, changes: list[IndexChange]) -> None:
        """Enter a frame, if it was written; `changes` gains what is to be published."""
        entry = row.entry
        self._settle(row.batch, row.row, outcome)
        followers, entry.followers = entry.followers, []
        entry.written = outcome is Outcome.OK
        if entry.written and not entry.dropped:
            place = entry.place
            record = IndexRecord(place.file_idx, place.slot, entry.nbytes, entry.sequence)
            changes.append(IndexChange(entry.key, record))
            if entry.retired:
                self._inherited[entry.key] = None
        elif not entry.dropped:
            del self._entries[entry.key]
            entry.dropped = True
        self._follow(entry, followers, outcome)
        self._give_back(entry, written_now=True)

    def _follow(
        self,
        entry: Entry,
        followers: Sequence[tuple[Batch, int, FrameRef | None]],
        outcome: Outcome,
    ) -> None:
        """Serve the rows that waited for a write."""
        rows = []
        for batch, number, frame in followers:
            if frame is None:
                self._settle_held(batch, number, outcome)
            elif outcome is Outcome.OK:
                entry.num_readers += 1
                rows.append(Row(batch, number, entry, frame.slot))
            else:
                self._settle(batch, number, Outcome.MISSING)
        for row in rows:  # one by one: the same slot of the file cannot be in a run twice
            self._flights.start(self._flights.plan([row], writes=False))

    def _read(self, row: Row, outcome: Outcome) -> None:
        entry = row.entry
        entry.num_readers -= 1
        self._settle(row.batch, row.row, outcome)
        if outcome is Outcome.CORRUPT and not entry.dropped:
            self._drop(entry)
        elif entry.dropped:
            self._give_back(entry)

    def _drop(self, entry: Entry) -> None:
        """Take an entry out of sight; its slot comes back when nothing uses it."""
        del self._entries[entry.key]
        self._inherited.pop(entry.key, None)
        entry.dropped = True
        if entry.written:
            entry.change = self._publisher.add(IndexChange(entry.key))
        self._give_back(entry)

    def _give_back(self, entry: Entry, *, written_now: bool = False) -> None:
        """Free the slot of a dropped entry, unless it is being written or read."""
        busy = entry.num_readers > 0 or not (entry.written or written_now)
        if entry.dropped and not busy:
            self._slots.give(entry.place, entry.change or None)

    def _refuse_gated(self) -> None:
        """The index cannot be written: refuse the frames that wait for it, lose none."""
        while self._gated:
            for run in self._gated.popleft().rows:
                for row in run:
                    self._unplace(row)

    def _unplace(self, row: Row) -> None:
        # Its slot's old record may still be there: it becomes free with the next commit.
        row.entry.change = self._publisher.add(IndexChange(row.entry.key))
        self._written(row, Outcome.FULL, [])


def _entry_of(key: StoreKey, record: IndexRecord) -> Entry:
    place = Place(record.file_idx, record.slot)
    return Entry(key, place, record.nbytes, record.sequence, written=True)
