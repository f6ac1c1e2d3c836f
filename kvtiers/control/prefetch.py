"""Bringing blocks from stores to DRAM while their request still waits in the engine's queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtiers.control.answers import Answer
from kvtiers.control.jobs import Job, JobTable, Row
from kvtiers.control.load_order import load_order
from kvtiers.control.match import ABSENT
from kvtiers.control.places import Places
from kvtiers.control.presence import Belief
from kvtiers.control.settings import ControlSettings
from kvtiers.control.tier import Entry
from kvtiers.model.keys import BlockKey
from kvtiers.model.messages import Transfer, TransferKind
from kvtiers.observe.metrics import BLOCKS_PREFETCHED, Counters

_MAX_PLANS: Final = 8  # requests planned in one step: a plan takes up to a millisecond
_MAX_ROWS: Final = 64  # of one order: what a store is given at once


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that has come.

    Attributes:
        keys: per KV group, from block 0. start: blocks that the engine has itself, as far as is
            known. num_tokens: of the request.
    """

    request_id: str
    keys: Sequence[Sequence[BlockKey]]
    start: int
    num_tokens: int


@dataclass(slots=True)
class _Wish:
    """What is to be brought to DRAM for a waiting request.

    Attributes:
        rows: blocks still to be ordered, head first: key, the block before it, source, position.
            None until it has been planned. num_held: blocks ordered so far.
    """

    arrival: Arrival
    rows: deque[tuple[BlockKey, BlockKey | None, int, int]] | None = None
    num_held: int = field(default=0)


class PrefetchDesk:
    """Orders promotions for requests that the engine has not admitted.

    Only what the plan would reload is brought, heads first, oldest request first. All waiting
    requests together hold at most `ControlSettings.prefetch_share` of the slots, one of them
    half of that. A prefetch takes free slots, or that of the policy's next victim if a lower tier
    has that block too: it makes no block vanish. What was brought is an ordinary evictable block
    from the start, and stays when its request goes.
    """

    def __init__(
        self, settings: ControlSettings, places: Places, jobs: JobTable, counters: Counters
    ) -> None:
        self._settings = settings
        self._places = places
        self._jobs = jobs
        self._counters = counters
        self._budget = int(settings.num_slots * settings.prefetch_share) if settings.stores else 0
        self._wishes: dict[str, _Wish] = {}  # of requests that wait, all of them
        self._open: dict[str, _Wish] = {}  # those of which something is still to be ordered
        self._num_held = 0

    # -- what happens to a request ----------------------------------------------------

    def arrived(self, arrival: Arrival) -> None:
        """Note a request that waits."""
        if self._budget > 0:
            self.left(arrival.request_id)
            wish = _Wish(arrival)
            self._wishes[arrival.request_id] = self._open[arrival.request_id] = wish

    def left(self, request_id: str) -> None:
        """Forget a request: it was admitted, or is over."""
        wish = self._wishes.pop(request_id, None)
        if wish is not None:
            self._open.pop(request_id, None)
            self._num_held -= wish.num_held

    def reset(self) -> None:
        """Forget what was found: none of it is served any more."""
        self._wishes.clear()
        self._open.clear()
        self._num_held = 0

    # -- once per step ----------------------------------------------------------------

    def orders(
        self, ask: Callable[[Arrival], Answer], epoch: int, now: float
    ) -> tuple[list[Job], list[Transfer]]:
        """Return the jobs that begin now, and their orders.

        Args:
            ask: plans the reload of a request; `Answer.num_blocks` None means "ask again".
        """
        left = self._budget - self._num_held
        num_plans = 0
        jobs: list[Job] = []
        served: list[str] = []
        for request_id, wish in self._open.items():
            # A queue may be thousands long: without a slot none of them is looked at.
            if left <= 0 or num_plans >= _MAX_PLANS or not self._may_take_slot():
                break
            if wish.rows is None:
                num_plans += 1
                self._look_up(wish, ask(wish.arrival))
            if not wish.rows:
                served += [] if wish.rows is None else [request_id]
                continue
            room = min(left, max(1, self._budget // 2) - wish.num_held, _MAX_ROWS)
            job = self._bring(wish, room, epoch, now)
            if job is None:
                continue
            left -= len(job.rows)
            jobs.append(job)
        for request_id in served:
            del self._open[request_id]
        return jobs, [load_order(job, self._settings, now) for job in jobs]

    # -- internals --------------------------------------------------------------------

    def _look_up(self, wish: _Wish, answer: Answer) -> None:
        if answer.num_blocks is None:
            return
        settings, keys = self._settings, wish.arrival.keys
        start, end = answer.match.start, answer.match.start + answer.num_blocks
        wish.rows = deque()
        first = [
            max(start, group.first_needed(end, settings.block_size)) for group in settings.groups
        ]
        for position in range(start, end):
            for group, column in enumerate(keys):
                source = int(answer.match.sources[group, position - start])
                if position >= first[group] and source not in (0, ABSENT):
                    parent = column[position - 1] if position else None
                    wish.rows.append((column[position], parent, source, position))

    def _bring(self, wish: _Wish, room: int, epoch: int, now: float) -> Job | None:
        """Open a job for the next blocks of a request; None where none can be brought now."""
        dram = self._places.dram
        job: Job | None = None
        while wish.rows and room > 0:
            key, parent, _, position = wish.rows[0]
            row = None if dram.get(key) is not None else self._row(wish.rows[0])
            if row is None:  # it is there, or gone
                wish.rows.popleft()
                continue
            entry = dram.reserve(key, parent) if self._may_take_slot() else None
            if entry is None:
                break
            wish.rows.popleft()
            dram.pin(entry)
            entry.position = position
            row.entry, row.lands = entry, True
            self._pin_below(row)
            if job is None:
                job = self._jobs.open(TransferKind.PROMOTE, epoch)
                job.started = now
                job.deadline_seconds = self._settings.reload_deadline
            job.rows.append(row)
            room -= 1
        if job is not None:
            wish.num_held += len(job.rows)
            self._num_held += len(job.rows)
            dram.touch(row.entry for row in reversed(job.rows) if row.entry is not None)
            self._counters.add(BLOCKS_PREFETCHED, (), len(job.rows))
        return job

    def _row(self, found: tuple[BlockKey, BlockKey | None, int, int]) -> Row | None:
        """Return a row that reads a block where it was found; None if that is no longer so."""
        key, parent, source, position = found
        idx = source - 1
        places = self._places
        if not places.gates.readable(idx) or places.belief(idx, key) is not Belief.PRESENT:
            return None
        tier = places.stores[idx]
        entry = None if tier is None else tier.get(key)
        held: dict[int, Entry | None] = {} if entry is None else {idx: entry}
        return Row(key, -1, store_entries=held, source=source, parent=parent, position=position)

    def _pin_below(self, row: Row) -> None:
        for idx, stored in row.store_entries.items():
            tier = self._places.stores[idx]
            if tier is not None and stored is not None:
                tier.pin(stored)
                tier.touch((stored,))

    def _may_take_slot(self) -> bool:
        """Whether a slot is free, or held by a block that a lower tier has too."""
        dram = self._places.dram
        if dram.num_busy >= self._settings.num_slots // 2:
            return False
        if dram.num_free:
            return True
        victim = dram.next_victim()
        return victim is not None and victim.backed
