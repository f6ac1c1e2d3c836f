"""The stores of one rank: what each is working on, and their failures turned into outcomes."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtiers.data.link_meter import LinkMeter
from kvtiers.data.runs import Run
from kvtiers.data.store import BlockStore, FrameRef, StoreAnswer, StoreTicket
from kvtiers.model.keys import StoreKey
from kvtiers.model.messages import DRAM
from kvtiers.model.outcome import Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Storing:
    """A batch that a store holds.

    Attributes:
        store: its name. rows: of the run. writes: slab to store; else store to slab.
        frames: of the rows, in their order.
    """

    store: str
    run: Run
    rows: tuple[int, ...]
    frames: tuple[FrameRef, ...]
    writes: bool


@dataclass(slots=True)
class _Busy:
    """A stretch of time in which a store had batches of one direction.

    Attributes:
        started: when. num_batches: not answered. counted: seconds that the meter has of it.
    """

    started: float
    num_batches: int = 0
    counted: float = 0.0


class StoreDesk:
    """Submits batches to stores by name and collects their answers.

    A store is a plugin and may raise anything; whatever it raises fails one batch. Each answer
    says how long its batch was at work; batches that were at work together count no longer than
    the link was busy. Frames that did not move, since they failed or the store held them, count as
    none: of a batch in which others moved these take all of its time, and one in which none did
    is no measurement.

    Args:
        clock: of the same seconds that answers are in.
    """

    def __init__(
        self,
        stores: Mapping[str, BlockStore],
        meter: LinkMeter,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._stores = dict(stores)
        self._meter = meter
        self._clock = clock
        self._busy: dict[tuple[str, bool], _Busy] = {}  # by store and direction
        self._running: dict[tuple[str, StoreTicket], Storing] = {}
        self._refused: deque[Storing] = deque()
        self._answered: deque[tuple[str, StoreAnswer]] = deque()
        self._silent: set[str] = set()  # stores whose poll raises, reported once

    @property
    def names(self) -> frozenset[str]:
        """The names of all stores."""
        return frozenset(self._stores)

    def submit(self, storing: Storing) -> None:
        """Give a batch to its store. A store that raises has not taken it."""
        store = self._stores[storing.store]
        started = self._clock()
        try:
            submit = store.put if storing.writes else store.get
            ticket = submit(storing.frames)
        except Exception:  # thread top: a store is a plugin, and may raise anything
            logger.exception("store %s refused %d frames", storing.store, len(storing.rows))
            self._refused.append(storing)
            return
        self._running[storing.store, ticket] = storing
        self._busy.setdefault((storing.store, storing.writes), _Busy(started)).num_batches += 1

    def num_frames(self, name: str, *, writes: bool) -> int:
        """Return how many frames a store is writing, or reading."""
        return sum(
            len(storing.rows)
            for storing in self._running.values()
            if storing.store == name and storing.writes is writes
        )

    def rows_held(self, run: Run, name: str | None = None) -> set[int]:
        """Return the rows of a run whose slots belong to a store now; of one store, if named."""
        return {
            row
            for storing in self._running.values()
            if storing.run is run and name in (None, storing.store)
            for row in storing.rows
        }

    def answers(self) -> Iterator[tuple[Storing, Sequence[Outcome]]]:
        """Yield what stores have answered since the last call."""
        for name in self._stores:
            self._answered += [(name, answer) for answer in self._poll(name)]
        while self._refused:
            storing = self._refused.popleft()
            yield storing, (Outcome.FAILED,) * len(storing.rows)
        while self._answered:  # one by one: should the taker raise, the rest comes next time
            name, answer = self._answered.popleft()
            if (name, answer.ticket) not in self._running:
                logger.error("store %s answered unknown ticket %d", name, answer.ticket)
                continue
            storing = self._running.pop((name, answer.ticket))
            yield storing, self._outcomes(storing, answer)

    def delete(self, name: str, keys: Sequence[StoreKey]) -> None:
        """Drop frames from a store; one that fails keeps them, which is safe: a key is content."""
        try:
            self._stores[name].delete(keys)
        except Exception:  # thread top: a store is a plugin, and may raise anything
            logger.exception("store %s failed to delete %d frames", name, len(keys))

    def retire(self) -> None:
        """Tell all stores that what they hold is not asked for any more."""
        for name, store in self._stores.items():
            try:
                store.retire()
            except Exception:  # thread top: a store is a plugin, and may raise anything
                logger.exception("store %s failed to retire its frames", name)

    def close(self) -> None:
        """Close all stores."""
        for name, store in self._stores.items():
            try:
                store.close()
            except Exception:  # thread top: a store is a plugin, and may raise anything
                logger.exception("store %s failed to close", name)

    # -- internals --------------------------------------------------------------------

    def _poll(self, name: str) -> list[StoreAnswer]:
        try:
            answers = self._stores[name].poll()
        except Exception:  # thread top: a store is a plugin, and may raise anything
            if name not in self._silent:
                logger.exception("store %s does not answer; asking on", name)
            self._silent.add(name)
            return []
        self._silent.discard(name)
        return answers

    def _outcomes(self, storing: Storing, answer: StoreAnswer) -> Sequence[Outcome]:
        num = len(storing.rows)
        busy = self._leave(storing)
        if len(answer.outcomes) != num:
            logger.error(
                "store %s answered %d outcomes for %d frames",
                storing.store,
                len(answer.outcomes),
                num,
            )
            return (Outcome.FAILED,) * num
        held = answer.held if storing.writes else frozenset[int]()
        moved = [
            frame.nbytes
            for idx, (frame, outcome) in enumerate(
                zip(storing.frames, answer.outcomes, strict=True)
            )
            if outcome is Outcome.OK and idx not in held
        ]
        if moved:  # else nothing was measured, and no batch beside it loses time to this one
            name = storing.store
            link = f"{DRAM}>{name}" if storing.writes else f"{name}>{DRAM}"
            seconds = max(0.0, min(answer.seconds, self._clock() - busy.started - busy.counted))
            busy.counted += seconds
            self._meter.add(link, len(moved), sum(moved), seconds)
        return answer.outcomes

    def _leave(self, storing: Storing) -> _Busy:
        """Take a batch out of its stretch of time, and return that."""
        link = storing.store, storing.writes
        busy = self._busy[link]
        busy.num_batches -= 1
        if not busy.num_batches:
            del self._busy[link]
        return busy
