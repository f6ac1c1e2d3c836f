"""The modelled rank: takes orders, and answers them when its links would be done."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtiers.connector.worker import Loaded
from kvtiers.cost.links import offload_link, read_link, reload_link, write_link
from kvtiers.data.portions import PORTIONS
from kvtiers.engines.reference.modelled_media import ModelledLink, SharedStore
from kvtiers.model.keys import BlockKey, Rank
from kvtiers.model.messages import (
    DRAM,
    HBM,
    NO_SLOT,
    Completion,
    JobId,
    Link,
    StepOrders,
    Transfer,
    TransferKind,
    UInt8s,
    WorkerReport,
)
from kvtiers.model.outcome import Outcome

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class _Event:
    """The answer to one hop of a job, kept until it is due."""

    transfer: Transfer
    hop: str
    outcomes: UInt8s
    last: bool
    links: tuple[Link, ...]


@dataclass(slots=True)
class _Promotion:
    """A promotion that is not complete.

    Attributes:
        portions: those not begun: the link's name, and rows of the transfer. done: when all that
            have begun are there.
    """

    transfer: Transfer
    since: float
    outcomes: UInt8s
    portions: deque[tuple[str, Rows]]
    links: list[Link]
    done: float


class ModelledRank:
    """A rank whose bytes are counted and never moved.

    Each link serves one job after another, and each of its two directions is a link of its own.
    The blocks of a load that lie on several tiers come at the same time. Those of a store come in
    portions, as a real rank reads them, and the last portion still has to be copied to HBM. A
    promotion reads a portion whenever its link is idle. A load waits for blocks that another job
    is still bringing to the slab. Blocks that have not begun by their deadline are given up.

    Args:
        links: by name. block_nbytes: of a block on this rank.
        pieces_per_block: engine blocks that one block consists of.
        shared: the stores that evict by themselves, by name; all others hold what control ordered.
        num_slots: of the slab. notice_seconds: see `HandOver`.
    """

    def __init__(
        self,
        links: Mapping[str, ModelledLink],
        block_nbytes: int,
        pieces_per_block: int,
        shared: Mapping[str, SharedStore],
        num_slots: int,
        notice_seconds: float = 0.0,
    ) -> None:
        self._links = links
        self._notice_seconds = notice_seconds
        self._block_nbytes = block_nbytes
        num_frames = PORTIONS.num_frames(block_nbytes // pieces_per_block)
        self._num_together = max(1, num_frames // pieces_per_block)
        self._shared = shared
        self._events: list[tuple[float, int, _Event]] = []
        self._numbers = itertools.count()
        self._reads_end: dict[JobId, float] = {}
        self._loads_end: dict[JobId, float] = {}
        self._filled_at = np.zeros(num_slots)  # when each slot has its bytes; inf: not known yet
        self._promotions: deque[_Promotion] = deque()
        self._epoch = 0

    # -- orders -----------------------------------------------------------------------

    def begin_step(self, orders: StepOrders, now: float) -> float:
        """Take in what precedes a step's forward pass; returns the time at which it may begin."""
        self._promote(now)
        self._epoch = max(self._epoch, orders.epoch)
        for forget in orders.forgets:
            if forget.store in self._shared:
                self._shared[forget.store].forget(forget.block_keys())
        for transfer in orders.before:
            if transfer.kind not in (TransferKind.RELOAD, TransferKind.PROMOTE):
                self._store(transfer, now)
        ready = now
        for job_id, blocks in orders.fences.items():  # which are read before all others
            read = now + self._links[offload_link()].seconds(len(blocks))
            ready = max(ready, min(read, self._reads_end.get(job_id, now)))
        for transfer in orders.before:
            if transfer.kind is TransferKind.RELOAD:
                waited_for = transfer.job_id in orders.sync_loads
                self._load(transfer, ready, 0.0 if waited_for else self._notice_seconds)
            elif transfer.kind is TransferKind.PROMOTE:
                self._queue_promotion(transfer, ready)
        for job_id in orders.sync_loads:
            ready = max(ready, self._loads_end[job_id])
        return ready

    def end_step(self, orders: StepOrders, now: float) -> None:
        """Take in the offloads of what the forward pass filled."""
        for transfer in orders.after:
            self._store(transfer, now)

    def _load(self, transfer: Transfer, now: float, notice_seconds: float) -> None:
        """Move the blocks of a reload to HBM; it is answered `notice_seconds` after the last."""
        until, stored, done = now + transfer.deadline, 0, now
        links: list[Link] = []
        outcomes, found = self._sources(transfer)
        for name, rows in found:
            end = self._serve(read_link(name), now, rows, outcomes, until, links)
            there = rows[outcomes[rows] == Outcome.OK]
            self._note_filling(transfer, read_link(name), there, end)
            stored += len(there)
            done = max(done, end)
        way = self._links[reload_link()]
        wanted = np.flatnonzero(outcomes == Outcome.OK)
        end = self._serve(reload_link(), now, wanted, outcomes, until, links)
        coming, last = self._coming(transfer, wanted, now)
        tail = way.seconds(min(stored + coming, self._num_together))
        done = max(end, max(done, last) + tail)
        if (outcomes == Outcome.TIMED_OUT).any():
            done = max(done, until)
        self._loads_end[transfer.job_id] = done
        self._push(done + notice_seconds, _Event(transfer, HBM, outcomes, True, tuple(links)))

    def _sources(self, transfer: Transfer) -> tuple[UInt8s, list[tuple[str, Rows]]]:
        """Return the outcome of each block if all are in time, and by store the rows it brings."""
        rows = transfer.sources.astype(np.int64)
        outcomes = np.full(len(rows), Outcome.OK, np.uint8)
        if not len(transfer.window):
            outcomes[(rows > 0) & (transfer.slots == NO_SLOT)] = Outcome.TIMED_OUT
        outcomes[(rows == 0) & (transfer.slots == NO_SLOT)] = Outcome.MISSING
        by_store = []
        for source in np.unique(rows[rows > 0]).tolist():
            name = transfer.stores[source - 1]
            found = self._find(transfer, name, np.flatnonzero((rows == source) & (outcomes == 0)))
            outcomes[found[1]] = Outcome.MISSING
            by_store.append((name, found[0]))
        return outcomes, by_store

    def _queue_promotion(self, transfer: Transfer, now: float) -> None:
        """Queue a promotion's portions, to be read when their links are idle."""
        outcomes, found = self._sources(transfer)
        size = self._num_together
        portions = deque(
            (read_link(name), rows[first : first + size])
            for name, rows in found
            for first in range(0, len(rows), size)
        )
        for _, rows in portions:
            self._filled_at[transfer.slots[rows]] = np.inf
        self._promotions.append(_Promotion(transfer, now, outcomes, portions, [], now))

    def _promote(self, now: float) -> None:
        """Begin the portions of promotions whose turn has come by now."""
        while self._promotions and self._next_portion()[0] <= now:
            self._bring_portion()

    def _next_portion(self) -> tuple[float, float]:
        """Return when the next portion can begin and end, if nothing comes before it."""
        job = self._promotions[0]
        if not job.portions:
            return job.since, job.since
        name, rows = job.portions[0]
        begins = max(job.since, self._links[name].free_at)
        return begins, begins + self._links[name].seconds(len(rows))

    def _bring_portion(self) -> None:
        """Begin the next portion, and answer its job once it was the last."""
        job = self._promotions[0]
        transfer = job.transfer
        if job.portions:
            name, rows = job.portions.popleft()
            until = job.since + transfer.deadline
            begins = max(job.since, self._links[name].free_at)
            end = self._serve(name, begins, rows, job.outcomes, until, job.links)
            self._filled_at[transfer.slots[rows]] = end
            job.done = max(job.done, end)
        if not job.portions:
            self._promotions.popleft()
            event = _Event(transfer, DRAM, job.outcomes, True, tuple(job.links))
            self._push(job.done + self._notice_seconds, event)

    def _note_filling(self, transfer: Transfer, name: str, rows: Rows, end: float) -> None:
        """Note when each slot that a store fills has its bytes: portion by portion."""
        num, together = len(rows), self._num_together
        left = num - np.minimum((np.arange(num) // together + 1) * together, num)
        slots, times = transfer.slots[rows], end - left * self._links[name].per_block
        self._filled_at[slots[slots != NO_SLOT]] = times[slots != NO_SLOT]

    def _coming(self, transfer: Transfer, rows: Rows, now: float) -> tuple[int, float]:
        """Return how many of a load's blocks other jobs still bring to the slab, and until when."""
        slots = transfer.slots[rows[transfer.sources[rows] == 0]]
        while np.isinf(self._filled_at[slots]).any() and self._promotions:
            self._bring_portion()
        filled_at = self._filled_at[slots]
        return int((filled_at > now).sum()), float(filled_at.max(initial=now))

    def _store(self, transfer: Transfer, now: float) -> None:
        """Copy blocks from HBM to the slab if it is an offload, and from there to stores."""
        num = transfer.num_blocks
        outcomes = np.full(num, Outcome.OK, np.uint8)
        until, end = now + transfer.deadline, now
        targets = [
            (name, np.flatnonzero((transfer.targets >> idx) & 1))
            for idx, name in enumerate(transfer.stores)
        ]
        targets = [(name, rows) for name, rows in targets if len(rows)]
        if transfer.kind is TransferKind.OFFLOAD:
            links: list[Link] = []
            end = self._serve(offload_link(), now, np.arange(num), outcomes, until, links)
            self._reads_end[transfer.job_id] = end
            self._filled_at[transfer.slots] = end
            self._push(end, _Event(transfer, DRAM, outcomes, not targets, tuple(links)))
        for idx, (name, rows) in enumerate(targets):
            links, mine = [], outcomes.copy()
            copied = self._lacking(transfer, name, rows[mine[rows] == Outcome.OK])
            done = self._serve(write_link(name), end, copied, mine, until, links)
            end = max(end, done)
            last = idx == len(targets) - 1
            self._push(end, _Event(transfer, name, mine, last, tuple(links)))

    def _lacking(self, transfer: Transfer, name: str, rows: Rows) -> Rows:
        """Return which rows have to be written: those that a shared store does not hold."""
        store = self._shared.get(name)
        if store is None:
            return rows
        keys = transfer.block_keys()
        return np.array([row for row in rows.tolist() if not store.holds(keys[row])], np.intp)

    def _find(self, transfer: Transfer, name: str, rows: Rows) -> tuple[Rows, Rows]:
        """Return which rows a store has, noting the access, and which it has not."""
        store = self._shared.get(name)
        if store is None:
            return rows, rows[:0]
        keys = transfer.block_keys()
        there = np.array([store.read(keys[row]) for row in rows.tolist()], np.bool_)
        return rows[there], rows[~there]

    def _serve(
        self, name: str, now: float, rows: Rows, outcomes: UInt8s, until: float, links: list[Link]
    ) -> float:
        """Move rows over a link; those that do not begin by `until` time out.

        Returns:
            when the others are through.
        """
        link = self._links[name]
        num = link.begins(now, len(rows), until)
        outcomes[rows[num:]] = Outcome.TIMED_OUT
        if not num:
            return now
        links.append(Link(name, num, num * self._block_nbytes, link.seconds(num)))
        return link.serve(now, num)

    def _push(self, time: float, event: _Event) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    # -- answers ----------------------------------------------------------------------

    @property
    def next_event(self) -> float | None:
        """When the next hop ends; None when nothing runs."""
        ends = [self._events[0][0]] if self._events else []
        if self._promotions:
            ends.append(self._next_portion()[1])
        return min(ends, default=None)

    def take(self, now: float, sync: frozenset[JobId]) -> tuple[Loaded, WorkerReport | None]:
        """Return what has ended by now.

        Args:
            sync: loads within the step, which are over with it and not reported by request.
        """
        self._promote(now)
        completions: list[Completion] = []
        links: list[Link] = []
        request_ids: set[str] = set()
        failed_requests: set[str] = set()
        failed_blocks: set[int] = set()
        while self._events and self._events[0][0] <= now:
            _, _, event = heapq.heappop(self._events)
            transfer, outcomes = event.transfer, event.outcomes
            if transfer.epoch < self._epoch:
                outcomes = np.full(len(outcomes), Outcome.STALE, np.uint8)
            elif event.hop in self._shared:
                self._stored(transfer, event.hop, outcomes)
            completions.append(
                Completion(transfer.job_id, transfer.epoch, Rank(), event.hop, outcomes, event.last)
            )
            links += event.links
            self._reads_end.pop(transfer.job_id, None)
            if event.hop != HBM:
                continue
            del self._loads_end[transfer.job_id]
            failed = transfer.block_ids[outcomes != Outcome.OK].tolist()
            failed_blocks.update(failed)
            if transfer.job_id not in sync:
                request_ids.add(transfer.request_id)
                failed_requests.update([transfer.request_id] if failed else [])
        loaded = Loaded(
            frozenset(request_ids), frozenset(failed_requests), frozenset(failed_blocks)
        )
        report = WorkerReport(tuple(completions), tuple(links)) if completions else None
        return loaded, report

    def _stored(self, transfer: Transfer, name: str, outcomes: UInt8s) -> None:
        bit = transfer.stores.index(name)
        written = ((transfer.targets >> bit) & 1 == 1) & (outcomes == Outcome.OK)
        keys: list[BlockKey] = transfer.block_keys()
        for row in np.flatnonzero(written).tolist():
            self._shared[name].put(keys[row])
