"""Loads blocks back to HBM: finds where they are, and runs the jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np

from kvtiers.control.jobs import Job, JobTable, Row
from kvtiers.control.load_order import load_order
from kvtiers.control.match import ABSENT, Bools, Match
from kvtiers.control.places import Places
from kvtiers.control.presence import Belief
from kvtiers.control.settings import ControlSettings
from kvtiers.control.tier import Entry, Residence
from kvtiers.model.keys import BlockKey
from kvtiers.model.messages import (
    DRAM,
    NO_BLOCK,
    JobId,
    Transfer,
    TransferKind,
    UInt8s,
)
from kvtiers.model.outcome import Outcome
from kvtiers.observe.metrics import BLOCKS_FAILED, BLOCKS_PROMOTED, BLOCKS_RELOADED, Counters

_UNKNOWN = 254  # no tier is known to have the block, a shared store has not said


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Blocks that an engine wants loaded.

    Attributes:
        keys: of the request, per KV group, from block 0.
        block_ids: engine blocks per KV group, `NO_BLOCK` where the engine keeps none.
        start, num_blocks: load blocks ``start .. start + num_blocks - 1``.
        in_step: whether the engine's next step reads them, range of layers by range of layers.
    """

    request_id: str
    keys: Sequence[Sequence[BlockKey]]
    block_ids: Sequence[Sequence[int]]
    start: int
    num_blocks: int
    in_step: bool = False


class ReloadDesk:
    """Answers what can be reloaded, and runs the jobs that do it."""

    def __init__(
        self,
        settings: ControlSettings,
        places: Places,
        jobs: JobTable,
        counters: Counters,
    ) -> None:
        self._settings = settings
        self._places = places
        self._dram = places.dram
        self._stores = places.stores
        self._gates = places.gates
        self._jobs = jobs
        self._counters = counters
        self._waiting: deque[Job] = deque()

    # -- questions --------------------------------------------------------------------

    def match(self, keys: Sequence[Sequence[BlockKey]], start: int, limit: int) -> Match:
        """Find which of the blocks ``start .. limit - 1`` exist; pure.

        Args:
            keys: per KV group, from block 0.
            start: blocks present in HBM. limit: first block not wanted.
        """
        unknown: dict[str, list[BlockKey]] = {}
        num = reach = max(limit - start, 0)
        columns = []
        for group, group_keys in zip(self._settings.groups, keys, strict=True):
            whole = group.window is None
            column, end = self._locate(group_keys, start, start + reach, whole, unknown)
            if whole:  # no later group needs to look further
                num, reach = min(num, len(column)), end - start
            columns.append(column)
        sources = np.full((len(columns), num), ABSENT, np.uint8)
        for idx, column in enumerate(columns):
            sources[idx, : min(num, len(column))] = column[:num]
        valid = self._cuts(sources, start)
        if ((sources != 0) & (sources != ABSENT)).any():
            valid &= self._fits(sources, keys, start)
        return Match(start, sources, valid, unknown, reach)

    def _locate(
        self,
        keys: Sequence[BlockKey],
        start: int,
        limit: int,
        stop_at_gap: bool,
        unknown: dict[str, list[BlockKey]],
    ) -> tuple[list[int], int]:
        """Return the source of each block, and the end of the prefix that may exist at best.

        With `stop_at_gap` both end at the first block that is absent for certain. One that a store
        has yet to answer for counts as absent, but the search goes on behind it, so that one
        lookup asks for all such keys.
        """
        get = self._dram.get
        column: list[int] = []
        gap = False
        for position in range(start, limit):
            key = keys[position]
            source = 0 if get(key) is not None else self._locate_below(key, unknown)
            if source >= _UNKNOWN and stop_at_gap:
                if source == ABSENT:
                    return column, position
                gap = True
            if not gap:
                column.append(ABSENT if source == _UNKNOWN else source)
        return column, limit

    def _locate_below(self, key: BlockKey, unknown: dict[str, list[BlockKey]]) -> int:
        nowhere = ABSENT
        for idx, store in enumerate(self._settings.stores):
            if not self._gates.readable(idx):
                continue
            belief = self._places.belief(idx, key)
            if belief is Belief.PRESENT:
                return 1 + idx
            if belief is Belief.UNKNOWN:
                unknown.setdefault(store.name, []).append(key)
                nowhere = _UNKNOWN
        return nowhere

    def _cuts(self, sources: UInt8s, start: int) -> Bools:
        """Return which prefix lengths are usable: all blocks that attention needs exist."""
        num = sources.shape[1]
        valid = np.ones(num + 1, np.bool_)
        lengths = np.arange(num + 1)
        for group, row in zip(self._settings.groups, sources, strict=True):
            present = row != ABSENT
            if group.window is None:
                valid[1:] &= np.logical_and.accumulate(present)
                continue
            absent_before = np.concatenate(([0], np.cumsum(~present)))
            block_size = self._settings.block_size
            seen = (start + lengths) * block_size - group.window + 1
            first = np.minimum(np.clip(seen // block_size - start, 0, num), lengths)
            valid &= absent_before[lengths] == absent_before[first]
        return valid

    def _fits(self, sources: UInt8s, keys: Sequence[Sequence[BlockKey]], start: int) -> Bools:
        """Return which prefix lengths one job can load.

        Blocks from stores need at least one slot to land in, beside the slots that other jobs hold
        and those with blocks that this job reads from DRAM and that no store has.
        """
        idle = np.zeros(sources.shape, np.int64)
        for group, position in np.argwhere(sources == 0).tolist():
            entry = self._dram.get(keys[group][start + position])
            idle[group, position] = entry is not None and entry.idle and not entry.backed
        num_read = np.concatenate(([0], np.cumsum(idle.sum(axis=0))))
        below = ((sources != 0) & (sources != ABSENT)).any(axis=0)
        staged = np.concatenate(([False], np.logical_or.accumulate(below)))
        room = self._settings.num_slots - self._dram.num_busy
        return np.asarray(~staged | (num_read < room), dtype=np.bool_)

    # -- commands ---------------------------------------------------------------------

    def start(self, load: LoadRequest, epoch: int, now: float) -> Job:
        """Open the job of a load; its order comes from `orders` once its window is there.

        A block that has vanished since it was matched stays in the job without a source,
        and comes back as MISSING.
        """
        job = self._jobs.open(TransferKind.RELOAD, epoch, load.request_id)
        job.started = now
        job.deadline_seconds = self._settings.reload_deadline
        end = load.start + load.num_blocks
        for idx, group in enumerate(self._settings.groups):
            first = max(load.start, group.first_needed(end, self._settings.block_size))
            keys, block_ids = load.keys[idx], load.block_ids[idx]
            for position in range(first, end):
                if block_ids[position] == NO_BLOCK:
                    continue
                parent = keys[position - 1] if position else None
                job.rows.append(
                    Row(keys[position], block_ids[position], parent=parent, position=position)
                )
        if self._settings.num_layer_ranges > 1 and not load.in_step:
            # Block by block, so that what has come by a deadline is a usable prefix.
            job.rows.sort(key=lambda row: row.position)
        self._pin_sources(job)
        for row in job.rows:
            if row.source:
                row.entry = self._promotion(row.key, row.parent)
                row.lands = row.entry is not None
                if row.entry is not None:
                    row.entry.position = row.position
        self._dram.touch(row.entry for row in reversed(job.rows) if row.entry is not None)
        self._waiting.append(job)
        return job

    def orders(self, now: float, urgent: Container[JobId] = ()) -> list[Transfer]:
        """Return the orders of the waiting jobs that can run now, oldest first.

        Jobs wait for a staging window in the order they came, and for blocks that a job before
        them still has to bring to DRAM. A job whose deadline has passed is sent without a window,
        so that ranks answer it. So is the first one if no job runs that could free a slot: what it
        would have staged comes back as MISSING.

        Args:
            urgent: jobs that the engine's next step reads; they are sent whatever happens, and
                what they cannot stage comes back at once.
        """
        num_running = len(self._jobs) - len(self._waiting)
        sent: list[Job] = []
        kept: deque[Job] = deque()
        coming: set[BlockKey] = set()
        stuck = False
        for job in self._waiting:
            depends = any(row.key in coming for row in job.rows if row.entry and not row.lands)
            stages = any(row.source > 0 and row.entry is None for row in job.rows)
            waits = depends or (stages and stuck) or (stages and not self._stage(job, now))
            stuck |= stages and waits
            if waits and job.job_id not in urgent:
                kept.append(job)
                coming.update(row.key for row in job.rows if row.lands)
            else:
                if waits:
                    _give_up_staging(job)
                sent.append(job)
        if kept and not sent and num_running == 0:  # nobody will let go of a slot
            _give_up_staging(kept[0])
            sent.append(kept.popleft())
        self._waiting = kept
        return [load_order(job, self._settings, now) for job in sent]

    def at_hand(self, match: Match, keys: Sequence[Sequence[BlockKey]]) -> bool:
        """Whether a load of all that was found could run now.

        It could not while another job is still bringing one of the blocks to DRAM, or, if it needs
        slots, while other loads wait for some.
        """
        if self._waiting and ((match.sources != 0) & (match.sources != ABSENT)).any():
            return False
        for group, column in zip(keys, match.sources, strict=True):
            for position in np.flatnonzero(column == 0).tolist():
                entry = self._dram.get(group[match.start + position])
                if entry is None or entry.residence is not Residence.READY:
                    return False
        return True

    def settle(self, job: Job, outcomes: UInt8s, epoch: int) -> tuple[int, int]:
        """Apply the merged outcomes of a RELOAD or PROMOTE job; returns blocks (loaded, failed).

        Args:
            epoch: the present one; what jobs of an earlier one missed says nothing.
        """
        loaded = [0] * (1 + len(self._settings.stores))
        failed = 0
        for row, outcome in zip(job.rows, outcomes.tolist(), strict=True):
            ok = outcome == Outcome.OK
            self._settle_dram(row, ok, outcome)
            if job.epoch == epoch:
                self._settle_store(row, outcome)
            if ok:
                loaded[row.source] += 1
            else:
                failed += 1
                self._counters.add(BLOCKS_FAILED, (Outcome(outcome).name.lower(),))
        names = (DRAM, *(store.name for store in self._settings.stores))
        for name, num_blocks in zip(names, loaded, strict=True):
            if num_blocks and job.kind is TransferKind.RELOAD:
                self._counters.add(BLOCKS_RELOADED, (name,), num_blocks)
        return sum(loaded), failed

    def closed(self, job: Job) -> None:
        """Let go of what a finished RELOAD or PROMOTE job held."""
        for row in job.rows:
            if row.entry is not None:
                self._dram.unpin(row.entry)
            for idx, stored in row.store_entries.items():
                tier = self._stores[idx]
                if tier is not None and stored is not None:
                    tier.unpin(stored)
        self._dram.give_window(job.window)

    # -- internals --------------------------------------------------------------------

    def _stage(self, job: Job, now: float) -> bool:
        """Get a job its window; True once it has one, or its deadline has passed."""
        if not job.window:
            num = sum(row.source > 0 and row.entry is None for row in job.rows)
            job.window = self._dram.take_window(min(num, self._settings.max_window))
        return bool(job.window) or now - job.started >= job.deadline_seconds

    def _pin_sources(self, job: Job) -> None:
        """Pin all that a job reads, before room is made for what it brings."""
        dram = self._dram
        entries = [dram.get(row.key) for row in job.rows]
        stages = bool(self._stores) and any(entry is None for entry in entries)
        for row, entry in zip(job.rows, entries, strict=True):
            # A job that stages needs a slot to land in: what lies below too is read from there
            # rather than that it holds the last slot itself.
            full = stages and dram.num_busy + 1 >= self._settings.num_slots
            if entry is None or (full and entry.backed and entry.idle):
                self._pin_below(row)
            if entry is not None and not row.source:
                row.entry = entry
                dram.pin(entry)

    def _pin_below(self, row: Row) -> None:
        source = self._locate_below(row.key, {})
        if source >= _UNKNOWN:
            return
        row.source = source
        tier = self._stores[source - 1]
        stored = None if tier is None else tier.get(row.key)
        if tier is not None and stored is not None:
            tier.pin(stored)
            tier.touch((stored,))
            row.store_entries[source - 1] = stored

    def _promotion(self, key: BlockKey, parent: BlockKey | None) -> Entry | None:
        """Reserve a DRAM slot for a block from below, leaving half of DRAM to other jobs."""
        if self._dram.num_busy >= self._settings.num_slots // 2 or self._dram.get(key) is not None:
            return None
        entry = self._dram.reserve(key, parent)
        if entry is not None:
            self._dram.pin(entry)
        return entry

    def _settle_dram(self, row: Row, ok: bool, outcome: int) -> None:
        entry = row.entry
        if entry is None:
            return
        if row.lands:
            if ok:
                self._dram.commit(entry)
                self._dram.back(entry)
                self._counters.add(BLOCKS_PROMOTED, ())
            else:
                self._dram.abandon(entry)
        elif not ok and outcome != Outcome.TIMED_OUT and entry.residence is Residence.READY:
            self._dram.doom(entry)

    def _settle_store(self, row: Row, outcome: int) -> None:
        if row.source == 0 or row.given_up:
            return
        idx = row.source - 1
        gone = self._gates.condemned(idx, row.key, outcome)
        tier = self._stores[idx]
        entry = row.store_entries.get(idx)
        if tier is not None and entry is not None:
            if gone:
                tier.doom(entry)
        elif gone:
            self._places.disclaim(idx, row.key)
        else:
            self._places.adopt(idx, row.key, row.parent, row.position)


def _give_up_staging(job: Job) -> None:
    for row in job.rows:
        row.given_up = row.source > 0 and row.entry is None
