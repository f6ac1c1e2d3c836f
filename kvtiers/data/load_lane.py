"""Reloads: store -> slot -> HBM, and slot -> HBM."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kvtiers.data.copier import Direction
from kvtiers.data.runs import PENDING, Run
from kvtiers.data.slot_map import SlotState
from kvtiers.data.workshop import Workshop
from kvtiers.model.messages import HBM, NO_SLOT, RELEASED, Completion, JobId
from kvtiers.model.outcome import Outcome

logger = logging.getLogger(__name__)

MAX_FRAMES_IN_STORE: Final = 64  # deep enough for any disk, shallow enough to stop soon


class LoadLane:
    """Runs reloads in the order of their submission, several at once."""

    def __init__(self, shop: Workshop, piece_nbytes: int, *, verify_dram: bool) -> None:
        self._shop = shop
        self._piece_nbytes = piece_nbytes
        self._verify_dram = verify_dram
        self._runs: list[Run] = []
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._runs)

    def accept(self, run: Run) -> None:
        """Take a reload in, and note which slots it will fill."""
        self._runs.append(run)
        for row in np.flatnonzero(run.transfer.sources).tolist():
            if not run.staged(row):
                self._shop.slots.begin(int(run.slots[row]), run.keys[row])

    def enter(self, epoch: int) -> None:
        """Void the reloads of earlier epochs: what they bring is no longer true."""
        self._epoch = epoch

    def begin(self) -> bool:
        """Start a bounded amount of work; False when there is none to start."""
        return any(self._begin(run) for run in self._runs)

    def expire(self, now: float) -> None:
        """Settle what has not begun in time. A copy that runs is waited for, never abandoned."""
        for run in self._runs:
            if run.reported or now < run.deadline_at:
                continue
            late = Outcome.TIMED_OUT
            for row in run.todo:
                self._settle(run, row, late)
            run.todo.clear()
            for row in run.in_flight:
                if run.hbm[row] == PENDING:
                    run.hbm[row] = late

    def copied(self, run: Run, rows: Sequence[int]) -> None:
        """Note that rows have reached HBM."""
        for row in rows:
            self._settle(run, row, Outcome.OK)

    def fetched(self, run: Run, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Take in frames that a store brought, or did not."""
        for row, outcome in zip(rows, outcomes, strict=True):
            run.in_flight.discard(row)
            if run.hbm[row] != PENDING:  # its deadline passed in the store
                self._drop(run, row)
                continue
            found = self._checked(run, row) if outcome is Outcome.OK else outcome
            if found is not Outcome.OK:
                self._settle(run, row, found)
                continue
            if not run.staged(row):
                self._shop.slots.landed(int(run.slots[row]), sealed=True)
            run.ready.append(row)

    def take_completions(self) -> Iterator[Completion]:
        """Yield the answers of runs that are settled, and let finished runs go."""
        for run in list(self._runs):
            settled = run.reported or not (run.hbm == PENDING).any()
            if not settled:
                continue
            free = not run.in_flight
            if not run.reported:
                run.reported = True
                yield self._completion(run, HBM, last=free)
            elif free:
                yield self._completion(run, RELEASED, last=True)
            if free:
                self._runs.remove(run)

    def waiting(self, job_ids: set[JobId]) -> bool:
        """Whether any of the jobs has not been settled."""
        return any(r.transfer.job_id in job_ids and not r.reported for r in self._runs)

    # -- internals --------------------------------------------------------------------

    def _begin(self, run: Run) -> bool:
        if run.epoch < self._epoch:
            return self._void(run)
        began = self._advance_todo(run)
        if run.ready:
            rows, run.ready = run.ready, []
            for row in self._shop.copy(run, rows, Direction.SCATTER):
                self._settle(run, row, Outcome.FAILED)
            began = True
        return began

    def _void(self, run: Run) -> bool:
        rows = run.todo + run.ready
        run.todo, run.ready = [], []
        for row in rows:
            self._settle(run, row, Outcome.STALE)
        return bool(rows)

    def _advance_todo(self, run: Run) -> bool:
        """Bring the next rows to `ready`, or to the stores that hold them."""
        gets: dict[int, list[int]] = {}
        room = self._piece_nbytes
        began = False
        while run.todo and room > 0:
            row = run.todo[-1]
            source = int(run.transfer.sources[row])
            if source == 0:
                state = self._state(run, row)
                if state is SlotState.LANDING:
                    break
                run.todo.pop()
                self._take_from_dram(run, row, state)
            elif not self._take_from_store(run, row, source - 1, gets):
                break
            else:
                run.todo.pop()
            room -= self._shop.formats[run.groups[row]].payload_nbytes
            began = True
        for idx, rows in gets.items():
            self._shop.store(run.transfer.stores[idx], run, rows, writes=False)
        return began

    def _state(self, run: Run, row: int) -> SlotState:
        slot = int(run.transfer.slots[row])
        return SlotState.OTHER if slot == NO_SLOT else self._shop.slots.state(slot, run.keys[row])

    def _take_from_dram(self, run: Run, row: int, state: SlotState) -> None:
        if int(run.transfer.slots[row]) == NO_SLOT:
            self._settle(run, row, Outcome.MISSING)
        elif state is not SlotState.HOLDS:
            self._settle(run, row, Outcome.STALE)
        elif self._verify_dram and self._checked(run, row) is not Outcome.OK:
            self._settle(run, row, Outcome.CORRUPT)
        else:
            run.ready.append(row)

    def _take_from_store(self, run: Run, row: int, idx: int, gets: dict[int, list[int]]) -> bool:
        rows = gets.setdefault(idx, [])
        name = run.transfer.stores[idx]
        if self._shop.in_store(name) + len(rows) >= MAX_FRAMES_IN_STORE:
            return False
        if run.staged(row):
            if not run.free_window:
                return False
            run.slots[row] = run.free_window.pop()
        rows.append(row)
        run.in_flight.add(row)
        return True

    def _checked(self, run: Run, row: int) -> Outcome:
        fault = self._shop.fault(run, row)
        if fault is None:
            return Outcome.OK
        logger.warning("job %d: corrupt frame dropped: %s", run.transfer.job_id, fault)
        source = int(run.transfer.sources[row])
        if source:
            store = self._shop.stores[run.transfer.stores[source - 1]]
            store.delete([self._shop.key_space.name(run.keys[row])])
        return Outcome.CORRUPT

    def _settle(self, run: Run, row: int, outcome: Outcome) -> None:
        """Fix the fate of a row and free its place in the window."""
        run.hbm[row] = outcome
        self._drop(run, row)

    def _drop(self, run: Run, row: int) -> None:
        slot = int(run.slots[row])
        if run.staged(row):
            if slot != NO_SLOT and int(run.transfer.sources[row]):
                run.free_window.append(slot)
                run.slots[row] = NO_SLOT
        elif int(run.transfer.sources[row]) and run.hbm[row] != Outcome.OK:
            self._shop.slots.lost(slot)

    def _completion(self, run: Run, hop: str, *, last: bool) -> Completion:
        stale = run.epoch < self._epoch
        outcomes = np.full_like(run.hbm, Outcome.STALE) if stale else run.hbm.copy()
        transfer = run.transfer
        return Completion(transfer.job_id, run.epoch, self._shop.rank, hop, outcomes, last)
