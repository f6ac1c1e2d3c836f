"""Offloads and demotions: HBM -> slot, and slot -> stores."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

import numpy as np

from kvtiers.data.copier import Direction
from kvtiers.data.portions import MAX_FRAMES_IN_STORE
from kvtiers.data.runs import PENDING, Run, Unread
from kvtiers.data.slot_map import SlotState
from kvtiers.data.workshop import Workshop
from kvtiers.model.messages import DRAM, Completion, JobId, TransferKind, UInt8s
from kvtiers.model.outcome import Outcome

# Under way: enough to keep a device busy between two looks at it, few enough to wait for, since
# what an engine step needs cannot overtake them.
MAX_PIECES: Final = 2


class OffloadLane:
    """Gathers blocks into slots, then hands frames to stores, in order of submission."""

    def __init__(self, shop: Workshop, piece_nbytes: int, *, verify_dram: bool) -> None:
        self._shop = shop
        self._piece_nbytes = piece_nbytes
        self._verify_dram = verify_dram
        self._gathering: list[Run] = []
        self._writing: list[Run] = []
        self._epoch = 0

    def accept(self, run: Run) -> None:
        """Take an offload or a demotion in, and note which slots it will fill."""
        if run.transfer.kind is TransferKind.DEMOTE:
            run.todo.clear()
            run.dram[:] = Outcome.OK
            self._start_writing(run)
            return
        self._gathering.append(run)
        if not self._stale(run):
            for row, key in enumerate(run.keys):
                self._shop.slots.begin(int(run.slots[row]), key)

    def enter(self, epoch: int) -> None:
        """Void what has not begun of earlier epochs."""
        self._epoch = epoch

    def hurry(self, fence: Unread) -> None:
        """Gather some rows before all others: an engine step waits to overwrite their blocks."""
        for run, rows in fence.rows:
            run.hurry(rows.tolist())

    def begin_hurried(self) -> bool:
        """Start one piece of what engine steps wait for; False when all of it began."""
        return any(self._gather(run, run.num_hurried) for run in self._gathering if run.num_hurried)

    def begin_gather(self) -> bool:
        """Start one piece of a gather; False when all began, or enough is under way."""
        if self._shop.nbytes_copying(Direction.GATHER) >= MAX_PIECES * self._piece_nbytes:
            return False
        return any(self._gather(run, len(run.todo)) for run in self._gathering)

    def begin_write(self) -> bool:
        """Start writing some frames; False when every store is busy or has nothing to write."""
        return any(self._write(run, idx) for run in self._writing for idx in run.stores)

    def give_up(self, job_ids: Collection[JobId]) -> None:
        """Drop what the jobs have not begun to read, so that its blocks may be overwritten."""
        for run in self._gathering:
            if run.transfer.job_id in job_ids:
                self._abandon(run, Outcome.TIMED_OUT)

    def expire(self, now: float) -> None:
        """Drop what has not begun in time."""
        for run in self._gathering:
            if now >= run.deadline_at:
                self._abandon(run, Outcome.TIMED_OUT)

    def fail_all(self) -> None:
        """Settle everything as FAILED but what a store is reading; no copy runs."""
        for run in self._gathering:
            run.todo.clear()
            run.num_hurried = 0
            for row in np.flatnonzero(run.dram == PENDING).tolist():
                self._lose(run, row, Outcome.FAILED)
        for run in self._writing:
            for idx, outcomes in run.stores.items():
                run.writes_left[idx].clear()
                held = self._shop.stores.rows_held(run, run.transfer.stores[idx])
                failed = set(np.flatnonzero(outcomes == PENDING).tolist()) - held
                outcomes[list(failed)] = Outcome.FAILED

    def copied(self, run: Run, rows: Sequence[int], outcome: Outcome) -> None:
        """Note that the copy of rows to their slots is over."""
        for row in rows:
            if self._stale(run):
                run.dram[row] = Outcome.STALE
            elif outcome is not Outcome.OK:
                self._lose(run, row, outcome)
            else:
                run.dram[row] = Outcome.OK
                self._shop.slots.landed(int(run.slots[row]), run.keys[row], sealed=False)
                if self._verify_dram:
                    self._shop.seal(run, row)

    def written(
        self, run: Run, store: int, rows: Sequence[int], outcomes: Sequence[Outcome]
    ) -> None:
        """Note the fate of rows that a store was given."""
        for row, outcome in zip(rows, outcomes, strict=True):
            run.stores[store][row] = outcome

    def take_completions(self) -> Iterator[Completion]:
        """Yield the answers of hops that are settled, and let finished runs go."""
        for run in list(self._gathering):
            if not (run.dram == PENDING).any():
                self._gathering.remove(run)
                yield self._completion(run, DRAM, run.dram, last=not self._start_writing(run))
        for run in list(self._writing):
            for idx, outcomes in list(run.stores.items()):
                if not (outcomes == PENDING).any():
                    del run.stores[idx]
                    last = not run.stores
                    yield self._completion(run, run.transfer.stores[idx], outcomes, last=last)
            if not run.stores:
                self._writing.remove(run)

    # -- internals --------------------------------------------------------------------

    def _stale(self, run: Run) -> bool:
        return run.epoch < self._epoch

    def _holds(self, run: Run, row: int) -> bool:
        return self._shop.slots.state(int(run.slots[row]), run.keys[row]) is SlotState.HOLDS

    def _gather(self, run: Run, most: int) -> bool:
        if self._stale(run):
            self._abandon(run, Outcome.STALE)
        rows: list[int] = []
        room = self._piece_nbytes
        while run.todo and room > 0 and len(rows) < most:
            rows.append(run.todo.pop())
            room -= self._shop.formats[run.groups[rows[-1]]].payload_nbytes
        run.num_hurried = max(0, run.num_hurried - len(rows))
        if not rows:
            return False
        for row in self._shop.copy(run, rows, Direction.GATHER):
            self._lose(run, row, Outcome.FAILED)
        return True

    def _abandon(self, run: Run, outcome: Outcome) -> None:
        for row in run.todo:
            self._lose(run, row, outcome)
        run.todo.clear()
        run.num_hurried = 0

    def _lose(self, run: Run, row: int, outcome: Outcome) -> None:
        run.dram[row] = outcome
        if not self._stale(run):
            self._shop.slots.lost(int(run.slots[row]), run.keys[row])

    def _start_writing(self, run: Run) -> bool:
        """Queue the store hops of a run; False when no block has a target."""
        for idx in range(len(run.transfer.stores)):
            wanted = (run.transfer.targets >> idx) & 1 == 1
            if wanted.any():
                outcomes = np.full(len(run.keys), Outcome.OK, np.uint8)  # rows without target
                outcomes[wanted] = np.where(
                    run.dram[wanted] == Outcome.OK, PENDING, run.dram[wanted]
                )
                run.stores[idx] = outcomes
                run.writes_left[idx] = np.flatnonzero(outcomes == PENDING).tolist()
        if run.stores:
            self._writing.append(run)
        return bool(run.stores)

    def _write(self, run: Run, idx: int) -> bool:
        left = run.writes_left[idx]
        name = run.transfer.stores[idx]
        if left and (self._stale(run) or self._shop.clock() >= run.deadline_at):
            run.stores[idx][left] = Outcome.STALE if self._stale(run) else Outcome.TIMED_OUT
            left.clear()
            return True
        room = max(0, MAX_FRAMES_IN_STORE - self._shop.stores.num_frames(name, writes=True))
        rows, run.writes_left[idx] = left[:room], left[room:]
        if not rows:
            return False
        held = [row for row in rows if self._holds(run, row)]
        run.stores[idx][[row for row in rows if row not in held]] = Outcome.STALE
        for row in held:
            self._shop.seal(run, row)
        if held:
            self._shop.store(name, run, held, writes=True)
        return True

    def _completion(self, run: Run, hop: str, outcomes: UInt8s, *, last: bool) -> Completion:
        job_id = run.transfer.job_id
        return Completion(job_id, run.epoch, self._shop.rank, hop, outcomes.copy(), last)
