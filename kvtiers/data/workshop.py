"""What all lanes of one executor share: slab, copier, stores, and what was measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvtiers.data.copier import Copier, CopyBatch, Direction, Ticket
from kvtiers.data.key_space import KeySpace
from kvtiers.data.link_meter import LinkMeter
from kvtiers.data.runs import Run
from kvtiers.data.slab import Slab
from kvtiers.data.slot_map import SlotMap
from kvtiers.data.store import BlockStore, FrameRef
from kvtiers.data.store_desk import StoreDesk, Storing
from kvtiers.model.errors import KVTiersError
from kvtiers.model.frame import FrameFormat
from kvtiers.model.keys import Rank
from kvtiers.model.layout import KVLayout
from kvtiers.model.messages import DRAM, HBM, Link
from kvtiers.model.outcome import Outcome

logger = logging.getLogger(__name__)

_COPIER_ERRORS = (KVTiersError, OSError, RuntimeError)


@dataclass(frozen=True, slots=True, eq=False)
class Copying:
    """A batch that the copier holds."""

    ticket: Ticket
    run: Run
    rows: tuple[int, ...]
    direction: Direction
    nbytes: int
    started: float


class Workshop:
    """The tools of one rank, each wrapped so that its failures become outcomes."""

    def __init__(
        self,
        slab: Slab,
        copier: Copier,
        layout: KVLayout,
        key_space: KeySpace,
        stores: Mapping[str, BlockStore],
        rank: Rank,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slab = slab
        self.copier = copier
        self.layout = layout
        self.key_space = key_space
        self.rank = rank
        self.clock = clock
        self.formats = [FrameFormat.of(group) for group in layout.groups]
        self.slots = SlotMap(slab.num_slots)
        self._meter = LinkMeter()
        self.stores = StoreDesk(stores, self._meter)
        self._copies: list[Copying] = []
        self._counted_until = dict.fromkeys(Direction, 0.0)  # by the caller's clock

    # -- copies -----------------------------------------------------------------------

    def copy(self, run: Run, rows: Sequence[int], direction: Direction) -> list[int]:
        """Submit rows to the copier, one batch per KV group; returns the rows it refused."""
        refused: list[int] = []
        chosen = np.asarray(rows, np.int64)
        for group in sorted(set(run.groups[chosen].tolist())):
            part = chosen[run.groups[chosen] == group]
            block_ids = run.transfer.block_ids[part]
            batch = CopyBatch(group, np.ascontiguousarray(block_ids), run.slots[part].copy())
            started = self.clock()
            try:
                ticket = self.copier.submit(direction, batch, run.marker)
            except _COPIER_ERRORS as error:
                logger.error("job %d: %s failed: %s", run.transfer.job_id, direction.value, error)
                refused += part.tolist()
                continue
            nbytes = self.formats[group].payload_nbytes * len(part)
            self._copies.append(
                Copying(ticket, run, tuple(part.tolist()), direction, nbytes, started)
            )
        return refused

    def copies_of(self, run: Run) -> list[Copying]:
        """Return the batches of a run that the copier holds."""
        return [copy for copy in self._copies if copy.run is run]

    def nbytes_copying(self, direction: Direction) -> int:
        """Return how many bytes of a direction the copier has yet to copy."""
        return sum(copy.nbytes for copy in self._copies if copy.direction is direction)

    def finished_copies(self) -> Iterator[tuple[Copying, Outcome]]:
        """Yield the batches that are over since the last call, and how they ended."""
        now = self.clock()  # what is done with one of them is no time of the next
        for copy in list(self._copies):
            try:
                if not self.copier.done(copy.ticket):
                    continue
                outcome = Outcome.OK
            except _COPIER_ERRORS as error:
                logger.error(
                    "job %d: %s failed: %s", copy.run.transfer.job_id, copy.direction.value, error
                )
                outcome = Outcome.FAILED
            self._copies.remove(copy)
            if outcome is Outcome.OK:
                gather = copy.direction is Direction.GATHER
                name = f"{HBM}>{DRAM}" if gather else f"{DRAM}>{HBM}"
                self._meter.add(name, len(copy.rows), copy.nbytes, self._seconds(copy, now))
            yield copy, outcome

    def _seconds(self, copy: Copying, now: float) -> float:
        """Return what a copy took: the link's time, not that of the engine's work before it.

        By the caller's clock, of batches that are under way together each counts from where the
        one before it has.
        """
        seconds = self.copier.seconds(copy.ticket)
        if seconds is not None:
            return seconds
        started = max(copy.started, self._counted_until[copy.direction])
        self._counted_until[copy.direction] = max(started, now)
        return max(0.0, now - started)

    def hold_engine(self, tickets: Iterable[Ticket]) -> bool:
        """Let the engine's device wait for batches; False where it does not. For its thread."""
        try:
            held = [self.copier.hold_engine(ticket) for ticket in tickets]
        except _COPIER_ERRORS as error:
            logger.error("the engine's device cannot wait for copies: %s", error)
            return False
        return all(held)

    def drain_copies(self) -> None:
        """Block until every submitted batch is over, and forget them."""
        copies, self._copies = self._copies, []
        for copy in copies:
            try:
                self.copier.wait(copy.ticket)
                self.copier.done(copy.ticket)
            except Exception:  # thread top: the memory must be let go of whatever a driver raises
                logger.exception("job %d: copy failed", copy.run.transfer.job_id)

    # -- stores -----------------------------------------------------------------------

    def store(self, name: str, run: Run, rows: Sequence[int], *, writes: bool) -> None:
        """Submit rows to a store."""
        frames = tuple(self._frame(run, row) for row in rows)
        self.stores.submit(Storing(name, run, tuple(rows), frames, writes))

    def _frame(self, run: Run, row: int) -> FrameRef:
        frame_format = self.formats[run.groups[row]]
        key = self.key_space.name(run.keys[row])
        return FrameRef(key, int(run.slots[row]), frame_format.frame_nbytes)

    # -- frames -----------------------------------------------------------------------

    def seal(self, run: Run, row: int) -> None:
        """Write the header of a row's frame, once."""
        slot = int(run.slots[row])
        if not self.slots.sealed(slot):
            view = self.slab.view(slot)
            self.formats[run.groups[row]].seal(view, self.key_space.name(run.keys[row]))
            self.slots.seal(slot)

    def fault(self, run: Run, row: int) -> str | None:
        """Return what is wrong with the frame in a row's slot, None when it may be served."""
        frame_format: FrameFormat = self.formats[run.groups[row]]
        view = self.slab.view(int(run.slots[row]))
        return frame_format.fault(view, self.key_space.name(run.keys[row]))

    def take_links(self) -> tuple[Link, ...]:
        """Return what each link did since the last call."""
        return self._meter.take()

    def close(self) -> None:
        """Wait for running copies, then release everything."""
        self.drain_copies()
        self.stores.close()
        self.copier.close()
        self.slab.close()
