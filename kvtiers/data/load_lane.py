"""Loads: store -> slot -> HBM, slot -> HBM, and promotions, store -> slot."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Sequence
from typing import Final

import numpy as np

from kvtiers.data.copier import Direction
from kvtiers.data.portions import MAX_FRAMES_IN_STORE, Portions
from kvtiers.data.runs import PENDING, Progress, Run
from kvtiers.data.slot_map import SlotState
from kvtiers.data.workshop import Workshop
from kvtiers.model.messages import DRAM, HBM, NO_SLOT, RELEASED, Completion, Int64s, JobId
from kvtiers.model.outcome import Outcome

logger = logging.getLogger(__name__)

MAX_FRAMES_PROMOTED: Final = 16  # of those, for what nobody waits for yet
_NO_GROUP: Final = 2**62  # beyond any that is asked for


class LoadLane:
    """Runs loads in the order of their submission, several at once.

    What a forward pass waits for comes first, promotions come last.
    """

    def __init__(
        self, shop: Workshop, piece_nbytes: int, *, verify_dram: bool, portions: Portions
    ) -> None:
        self._shop = shop
        self._piece_nbytes = piece_nbytes
        self._portions = portions
        self._verify_dram = verify_dram
        self._runs: list[Run] = []
        self._epoch = 0

    def accept(self, run: Run) -> None:
        """Take a load in, and note which slots it will fill."""
        self._runs.append(run)
        if self._stale(run):
            return
        for slot in run.free_window:
            self._shop.slots.vacate(slot)
        for row in np.flatnonzero(run.transfer.sources).tolist():
            if not run.staged(row):
                self._shop.slots.begin(int(run.slots[row]), run.keys[row])

    def enter(self, epoch: int) -> None:
        """Void the loads of earlier epochs: what they bring is no longer true."""
        self._epoch = epoch

    def begin(self, needed: Container[JobId] = ()) -> bool:
        """Start a bounded amount of work; False when there is none to start.

        Args:
            needed: what a forward pass waits for.
        """
        in_order = sorted(
            self._runs, key=lambda run: (run.promotes, run.transfer.job_id not in needed)
        )
        return any(self._begin(run) for run in in_order)

    def expire(self, now: float) -> None:
        """Settle what has not begun in time. A copy that runs is waited for, never abandoned."""
        for run in self._runs:
            if not run.reported and now >= run.deadline_at:
                self._stop(run, Outcome.TIMED_OUT)

    def fail_all(self) -> None:
        """Settle everything as FAILED; no copy runs. What a store is bringing is not waited for."""
        for run in self._runs:
            run.in_flight &= self._shop.stores.rows_held(run)
            self._stop(run, Outcome.FAILED)
            for row in np.flatnonzero(run.hbm == PENDING).tolist():
                self._settle(run, row, Outcome.FAILED)

    def copied(self, run: Run, rows: Sequence[int], outcome: Outcome) -> None:
        """Note that the copy of rows to HBM is over."""
        for row in rows:
            self._settle(run, row, outcome)

    def fetched(self, run: Run, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Take in frames that a store brought, or did not."""
        for row, outcome in zip(rows, outcomes, strict=True):
            run.in_flight.discard(row)
            if run.hbm[row] != PENDING:  # settled while it was in the store
                self._drop(run, row)
                continue
            found = outcome
            if self._stale(run):
                found = Outcome.STALE
            elif outcome in (Outcome.OK, Outcome.CORRUPT):
                found = self._checked(run, row, outcome)
            if found is not Outcome.OK:
                self._settle(run, row, found)
                continue
            if not run.staged(row):
                self._shop.slots.landed(int(run.slots[row]), run.keys[row], sealed=True)
            if run.promotes:
                self._settle(run, row, Outcome.OK)
            else:
                run.ready.append(row)

    def progress(self, needed: Container[JobId]) -> Iterator[tuple[JobId, Progress]]:
        """Yield how far loads have come that are not settled."""
        for run in self._runs:
            if run.transfer.job_id in needed and not run.reported:
                waiting = run.hbm == PENDING
                pending = _first(run.groups[waiting])
                copies = self._shop.copies_of(run)
                for copy in copies:
                    waiting[list(copy.rows)] = False
                queued = tuple((int(run.groups[c.rows[0]]), c.ticket) for c in copies)
                unqueued = _first(run.groups[waiting])
                yield run.transfer.job_id, Progress(pending, unqueued, queued)

    def take_completions(self) -> Iterator[Completion]:
        """Yield the answers of runs that are settled, and let finished runs go."""
        for run in list(self._runs):
            settled = run.reported or not (run.hbm == PENDING).any()
            if not settled:
                continue
            free = not run.in_flight
            if not run.reported:
                run.reported = True
                yield self._completion(run, DRAM if run.promotes else HBM, last=free)
            elif free:
                yield self._completion(run, RELEASED, last=True)
            if free:
                self._runs.remove(run)

    # -- internals --------------------------------------------------------------------

    def _stale(self, run: Run) -> bool:
        return run.epoch < self._epoch

    def _begin(self, run: Run) -> bool:
        if self._stale(run):
            return self._stop(run, Outcome.STALE)
        began = self._advance_todo(run)
        if run.ready:
            rows, run.ready = run.ready, []
            for row in self._shop.copy(run, rows, Direction.SCATTER):
                self._settle(run, row, Outcome.FAILED)
            began = True
        return began

    def _stop(self, run: Run, outcome: Outcome) -> bool:
        """Settle all rows but those that the copier holds; whether there were any."""
        rows = run.todo + run.ready
        run.todo, run.ready = [], []
        for row in rows:
            self._settle(run, row, outcome)
        pending = [row for row in run.in_flight if run.hbm[row] == PENDING]
        run.hbm[pending] = outcome  # their slots belong to a store until it answers
        return bool(rows or pending)

    def _advance_todo(self, run: Run) -> bool:
        """Bring the next rows to `ready`, or to the stores that hold them."""
        gets: dict[tuple[int, int], list[int]] = {}
        asked: dict[int, int] = {}
        room = self._piece_nbytes
        began = False
        while run.todo and room > 0:
            row = run.todo[-1]
            if run.lands(row):
                idx = int(run.transfer.sources[row]) - 1
                if not self._take_from_store(run, row, idx, asked, gets):
                    break
                run.todo.pop()
            else:
                state = self._state(run, row)
                if state is SlotState.LANDING:
                    break
                run.todo.pop()
                self._take_from_dram(run, row, state)
            room -= self._shop.formats[run.groups[row]].payload_nbytes
            began = True
        for (idx, _), rows in gets.items():
            self._get(run, idx, rows)
        return began

    def _get(self, run: Run, idx: int, rows: Sequence[int]) -> None:
        """Ask a store for rows, a portion at a time: what has come is copied beside the rest."""
        window = len(run.transfer.window) if any(run.staged(row) for row in rows) else None
        frame_nbytes = max(self._shop.formats[run.groups[row]].frame_nbytes for row in rows)
        num = self._portions.num_frames(frame_nbytes, window)
        for first in range(0, len(rows), num):
            part = rows[first : first + num]
            self._shop.store(run.transfer.stores[idx], run, part, writes=False)

    def _state(self, run: Run, row: int) -> SlotState:
        slot = int(run.transfer.slots[row])
        return SlotState.OTHER if slot == NO_SLOT else self._shop.slots.state(slot, run.keys[row])

    def _take_from_dram(self, run: Run, row: int, state: SlotState) -> None:
        slot = int(run.transfer.slots[row])
        if slot == NO_SLOT:
            self._settle(run, row, Outcome.MISSING)
        elif state is not SlotState.HOLDS:
            self._settle(run, row, Outcome.STALE)
        elif self._verify_dram and self._checked(run, row, Outcome.OK) is not Outcome.OK:
            self._shop.slots.vacate(slot)
            self._settle(run, row, Outcome.CORRUPT)
        else:
            run.ready.append(row)

    def _take_from_store(
        self,
        run: Run,
        row: int,
        idx: int,
        asked: dict[int, int],
        gets: dict[tuple[int, int], list[int]],
    ) -> bool:
        """Note what to ask a store for; `asked` counts its frames, those under way included."""
        if idx not in asked:
            name = run.transfer.stores[idx]
            asked[idx] = self._shop.stores.num_frames(name, writes=False)
        if run.promotes and self._num_promoting() >= MAX_FRAMES_PROMOTED:
            return False
        if asked[idx] >= MAX_FRAMES_IN_STORE and not run.promotes:
            return False
        if run.staged(row):
            if not run.free_window:
                return False
            run.slots[row] = run.free_window.pop()
        # Frames that are asked for together come together: not those of the next range of layers.
        part = int(run.groups[row]) if run.by_group else 0
        gets.setdefault((idx, part), []).append(row)
        asked[idx] += 1
        run.in_flight.add(row)
        return True

    def _num_promoting(self) -> int:
        return sum(len(run.in_flight) for run in self._runs if run.promotes)

    def _checked(self, run: Run, row: int, outcome: Outcome) -> Outcome:
        """Verify a frame that arrived; drop it from the store that brought it when corrupt."""
        fault = self._shop.fault(run, row) if outcome is Outcome.OK else "its size is wrong"
        if fault is None:
            return Outcome.OK
        logger.warning("job %d: corrupt frame dropped: %s", run.transfer.job_id, fault)
        if run.lands(row):
            name = run.transfer.stores[int(run.transfer.sources[row]) - 1]
            self._shop.stores.delete(name, [self._shop.key_space.name(run.keys[row])])
        return Outcome.CORRUPT

    def _settle(self, run: Run, row: int, outcome: Outcome) -> None:
        """Fix the fate of a row and free its place in the window."""
        run.hbm[row] = outcome
        self._drop(run, row)

    def _drop(self, run: Run, row: int) -> None:
        """Let go of a row's slot; one of its own keeps a frame that is complete."""
        if not run.lands(row):
            return
        slot = int(run.slots[row])
        if not run.staged(row):
            if not self._stale(run):
                self._shop.slots.lost(slot, run.keys[row])
        elif slot != NO_SLOT:
            run.free_window.append(slot)
            run.slots[row] = NO_SLOT

    def _completion(self, run: Run, hop: str, *, last: bool) -> Completion:
        outcomes = np.full_like(run.hbm, Outcome.STALE) if self._stale(run) else run.hbm.copy()
        transfer = run.transfer
        return Completion(transfer.job_id, run.epoch, self._shop.rank, hop, outcomes, last)


def _first(groups: Int64s) -> int:
    return int(groups.min()) if len(groups) else _NO_GROUP
