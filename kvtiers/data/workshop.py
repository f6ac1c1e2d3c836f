"""What all lanes of one executor share: slab, copier, stores, and what was measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvtiers.data.copier import Copier, CopyBatch, Direction, Ticket
from kvtiers.data.key_space import KeySpace
from kvtiers.data.runs import Run
from kvtiers.data.slab import Slab
from kvtiers.data.slot_map import SlotMap
from kvtiers.data.store import BlockStore, FrameRef, StoreAnswer, StoreTicket
from kvtiers.model.errors import KVTiersError
from kvtiers.model.frame import FrameFormat
from kvtiers.model.keys import Rank
from kvtiers.model.layout import KVLayout
from kvtiers.model.messages import DRAM, HBM, Link
from kvtiers.model.outcome import Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copying:
    """A batch that the copier holds."""

    ticket: Ticket
    run: Run
    rows: tuple[int, ...]
    direction: Direction
    nbytes: int
    started: float


@dataclass(frozen=True, slots=True)
class Storing:
    """A batch that a store holds."""

    run: Run
    rows: tuple[int, ...]
    writes: bool
    nbytes: int


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
        self.stores = dict(stores)
        self.rank = rank
        self.clock = clock
        self.formats = [FrameFormat.of(group) for group in layout.groups]
        self.slots = SlotMap(slab.num_slots)
        self._copies: list[Copying] = []
        self._storing: dict[tuple[str, StoreTicket], Storing] = {}
        self._failed: list[tuple[Storing, StoreAnswer]] = []
        self._links: dict[str, list[float]] = {}

    # -- copies -----------------------------------------------------------------------

    def copy(self, run: Run, rows: Sequence[int], direction: Direction) -> list[int]:
        """Submit rows to the copier, one batch per KV group; returns the rows it refused."""
        refused: list[int] = []
        chosen = np.asarray(rows, np.int64)
        for group in np.unique(run.groups[chosen]).tolist():
            part = chosen[run.groups[chosen] == group]
            block_ids = run.transfer.block_ids[part]
            batch = CopyBatch(group, np.ascontiguousarray(block_ids), run.slots[part].copy())
            started = self.clock()
            try:
                ticket = self.copier.submit(direction, batch, run.marker)
            except (KVTiersError, OSError, RuntimeError) as error:
                logger.error("job %d: %s failed: %s", run.transfer.job_id, direction.value, error)
                refused += part.tolist()
                continue
            nbytes = self.formats[group].payload_nbytes * len(part)
            self._copies.append(
                Copying(ticket, run, tuple(part.tolist()), direction, nbytes, started)
            )
        return refused

    def finished_copies(self) -> list[Copying]:
        """Return the batches copied since the last call."""
        done = [copy for copy in self._copies if self.copier.done(copy.ticket)]
        if done:
            self._copies = [copy for copy in self._copies if copy not in done]
        for copy in done:
            gather = copy.direction is Direction.GATHER
            name = f"{HBM}>{DRAM}" if gather else f"{DRAM}>{HBM}"
            self._measure(name, len(copy.rows), copy.nbytes, self.clock() - copy.started)
        return done

    def wait_copies(self) -> None:
        """Block until every submitted batch has been copied."""
        for copy in self._copies:
            self.copier.wait(copy.ticket)

    # -- stores -----------------------------------------------------------------------

    def frame(self, run: Run, row: int) -> FrameRef:
        """Name the frame of a row, for a store."""
        frame_format = self.formats[run.groups[row]]
        key = self.key_space.name(run.keys[row])
        return FrameRef(key, int(run.slots[row]), frame_format.frame_nbytes)

    def store(self, name: str, run: Run, rows: Sequence[int], *, writes: bool) -> None:
        """Submit rows to a store. A store that raises has failed the whole batch."""
        frames = [self.frame(run, row) for row in rows]
        nbytes = sum(frame.nbytes for frame in frames)
        storing = Storing(run, tuple(rows), writes, nbytes)
        store = self.stores[name]
        try:
            ticket = store.put(frames) if writes else store.get(frames)
        except Exception:  # thread top: a store is a plugin, and may raise anything
            logger.exception("store %s failed", name)
            answer = StoreAnswer(StoreTicket(0), (Outcome.FAILED,) * len(rows), 0.0)
            self._failed.append((storing, answer))
            return
        self._storing[name, ticket] = storing

    def in_store(self, name: str) -> int:
        """Return the number of frames that a store is working on."""
        return sum(len(s.rows) for (store, _), s in self._storing.items() if store == name)

    def store_answers(self) -> Iterator[tuple[str, Storing, StoreAnswer]]:
        """Yield what stores have answered since the last call."""
        failed, self._failed = self._failed, []
        for storing, answer in failed:
            yield "", storing, answer
        for name, store in self.stores.items():
            for answer in store.poll():
                storing = self._storing.pop((name, answer.ticket))
                link = f"{DRAM}>{name}" if storing.writes else f"{name}>{DRAM}"
                self._measure(link, len(storing.rows), storing.nbytes, answer.seconds)
                yield name, storing, answer

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

    # -- measurements -----------------------------------------------------------------

    def take_links(self) -> tuple[Link, ...]:
        """Return what each link did since the last call."""
        links, self._links = self._links, {}
        return tuple(
            Link(name, int(blocks), int(nbytes), seconds)
            for name, (blocks, nbytes, seconds) in links.items()
        )

    def _measure(self, name: str, num_blocks: int, nbytes: int, seconds: float) -> None:
        total = self._links.setdefault(name, [0.0, 0.0, 0.0])
        for idx, value in enumerate((num_blocks, nbytes, seconds)):
            total[idx] += value

    def close(self) -> None:
        """Wait for running copies, then release everything."""
        self.wait_copies()
        for store in self.stores.values():
            store.close()
        self.copier.close()
        self.slab.close()
