"""From rows of a batch to calls on files, and from their results to outcomes."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from kvtiers.data.file_settings import MAX_OP_NBYTES, MIN_OP_NBYTES, NUM_OPS
from kvtiers.data.file_slots import Place
from kvtiers.data.io.base import IoBatch, IoEngine, IoOp
from kvtiers.data.slab import Slab
from kvtiers.data.slab_file import SlabFile
from kvtiers.data.store import FrameRef, StoreTicket
from kvtiers.model.frame import round_up
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome

_IN_FILE_ORDER: Final = attrgetter("entry.place.file_idx", "entry.place.slot")
_NO_ROOM: Final = (-errno.ENOSPC, -errno.EDQUOT, -errno.EFBIG)


@dataclass(slots=True, eq=False)
class Batch:
    """A `put` or `get` under way. Outcomes are None until they are known; `held` see there."""

    ticket: StoreTicket
    outcomes: list[Outcome | None]
    started: float
    held: set[int] = field(default_factory=set)
    num_pending: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_pending = len(self.outcomes)


@dataclass(slots=True, eq=False)
class Entry:
    """A frame in a file.

    Attributes:
        written: its bytes are there. dropped: no longer found under its key.
        retired: belongs to an earlier life once it is written.
        num_readers: reads under way. change: number of the index change that removes its
            record, 0 for none.
        followers: rows that wait for the write: (batch, row, frame to read or None).
    """

    key: StoreKey
    place: Place
    nbytes: int
    sequence: int
    written: bool = False
    dropped: bool = False
    retired: bool = False
    num_readers: int = 0
    change: int = 0
    followers: list[tuple[Batch, int, FrameRef | None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A frame that moves between its entry and a slab slot, for a row of a batch."""

    batch: Batch
    row: int
    entry: Entry
    slot: int


@dataclass(slots=True, eq=False)
class Flight:
    """Operations given to the engine; `rows` has the frames of each.

    Attributes:
        change: the index change that must be durable before it starts, 0 for none.
        again: whether its operations are tried a second time.
    """

    writes: bool
    rows: list[list[Row]]
    change: int = 0
    again: bool = False


class Flights:
    """Cuts rows into operations and gives them to an engine.

    Neighbouring slots of a file move in one call, as far as their frames fill them; of the
    last one only the frame's own bytes move, padded to whole sectors.
    """

    def __init__(self, slab: Slab, files: Sequence[SlabFile], engine: IoEngine) -> None:
        self._slab = slab
        self._files = files
        self._engine = engine
        self._ids = itertools.count(1)
        self._running: dict[int, Flight] = {}

    @property
    def num_running(self) -> int:
        """Flights that the engine has not ended."""
        return len(self._running)

    def plan(self, rows: Sequence[Row], *, writes: bool) -> Flight:
        """Return a flight of rows that are of entries with places of their own."""
        ordered = sorted(rows, key=_IN_FILE_ORDER)
        runs: list[list[Row]] = []
        slot_nbytes = self._files[0].slot_nbytes
        max_nbytes = min(max(MIN_OP_NBYTES, len(rows) * slot_nbytes // NUM_OPS), MAX_OP_NBYTES)
        max_rows = max_nbytes // slot_nbytes
        for row in ordered:
            if runs and len(runs[-1]) < max_rows and self._continues(runs[-1], row, slot_nbytes):
                runs[-1].append(row)
            else:
                runs.append([row])
        return Flight(writes, runs)

    def start(self, flight: Flight) -> None:
        """Give a flight to the engine."""
        flight_id = next(self._ids)
        ops = tuple(self._op(run) for run in flight.rows)
        self._engine.submit(IoBatch(flight_id, flight.writes, ops))
        self._running[flight_id] = flight

    def ended(self) -> Iterator[tuple[Flight, list[Row], Outcome]]:
        """Yield runs that are over, and how; what is worth a second try is tried again."""
        for done in self._engine.poll():
            flight = self._running.pop(done.batch_id)
            retry: list[list[Row]] = []
            for run, result in zip(flight.rows, done.results, strict=True):
                if result == self._nbytes(run):
                    yield flight, run, Outcome.OK
                elif self._worth_a_retry(flight, run, result):
                    retry += [[row] for row in run]  # alone, so that each fails for itself
                else:
                    yield flight, run, _outcome(flight.writes, result)
            if retry:
                self.start(Flight(flight.writes, retry, again=True))

    # -- internals --------------------------------------------------------------------

    @staticmethod
    def _continues(run: Sequence[Row], row: Row, slot_nbytes: int) -> bool:
        last, place = run[-1].entry, row.entry.place
        return (
            place.file_idx == last.place.file_idx
            and place.slot == last.place.slot + 1
            and round_up(last.nbytes) == slot_nbytes
        )

    def _op(self, run: Sequence[Row]) -> IoOp:
        place = run[0].entry.place
        file = self._files[place.file_idx]
        pieces: list[tuple[int, int]] = []
        for row in run:
            address = self._slab.address + row.slot * self._slab.slot_nbytes
            nbytes = round_up(row.entry.nbytes)
            if pieces and sum(pieces[-1]) == address:
                pieces[-1] = (pieces[-1][0], pieces[-1][1] + nbytes)
            else:
                pieces.append((address, nbytes))
        return IoOp(file.fd, file.offset(place.slot), tuple(pieces))

    @staticmethod
    def _nbytes(run: Sequence[Row]) -> int:
        return sum(round_up(row.entry.nbytes) for row in run)

    def _worth_a_retry(self, flight: Flight, run: Sequence[Row], result: int) -> bool:
        if flight.again:
            return False
        file = self._files[run[0].entry.place.file_idx]
        if result == -errno.EINVAL and file.direct:
            verb = "write" if flight.writes else "read"
            file.go_buffered(f"refused at {verb}: EINVAL (errno {errno.EINVAL})")
            return True
        # EINVAL of a call that began before another one switched the file over
        return len(run) > 1 or (result == -errno.EINVAL and file.refusal is not None)


def _outcome(writes: bool, result: int) -> Outcome:
    if writes:
        return Outcome.FULL if result >= 0 or result in _NO_ROOM else Outcome.FAILED
    return Outcome.CORRUPT if result >= 0 else Outcome.FAILED
