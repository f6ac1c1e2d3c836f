"""The one object of the copying plane that a worker talks to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import numpy as np

from kvtiers.data.copier import Direction, Marker
from kvtiers.data.load_lane import LoadLane
from kvtiers.data.offload_lane import OffloadLane
from kvtiers.data.runs import Run
from kvtiers.data.workshop import Workshop
from kvtiers.model.errors import TransferError
from kvtiers.model.messages import (
    NO_SLOT,
    Completion,
    Forget,
    JobId,
    Link,
    Transfer,
    TransferKind,
    int64s,
)

PIECE_NBYTES: Final = 64 * 2**20  # a load overtakes a gather after at most about 5 ms


class Executor:
    """Runs transfers by itself, step by step: no thread, no clock of its own.

    `submit`, `fence` and `poll` may be called from another thread than `advance`: they
    only touch queues. Everything else belongs to the thread that advances.

    Within one `advance`: what the engine waits for first (fenced gathers), then loads,
    then other gathers, then writes to stores.
    """

    def __init__(
        self, shop: Workshop, *, verify_dram: bool = False, piece_nbytes: int = PIECE_NBYTES
    ) -> None:
        self.shop = shop
        self._loads = LoadLane(shop, piece_nbytes, verify_dram=verify_dram)
        self._offloads = OffloadLane(shop, piece_nbytes, verify_dram=verify_dram)
        self._inbox: deque[Run | Forget | int] = deque()
        self._outbox: deque[Completion] = deque()
        self._unread: set[JobId] = set()
        self._unloaded: set[JobId] = set()
        self._fenced: set[JobId] = set()
        self._dropped: set[JobId] = set()
        self._epoch = 0

    # -- from any thread --------------------------------------------------------------

    def submit(self, transfer: Transfer, marker: Marker | None) -> None:
        """Queue an order; it starts once the engine's work before `marker` is done.

        Raises:
            TransferError: a column, slot, block or store that does not exist; nothing is queued.
        """
        self._check(transfer)
        run = Run(transfer, marker, self.shop.clock() + transfer.deadline)
        if transfer.kind is TransferKind.OFFLOAD:
            self._unread.add(transfer.job_id)
        elif transfer.kind is TransferKind.RELOAD:
            self._unloaded.add(transfer.job_id)
        self._inbox.append(run)

    def forget(self, forget: Forget) -> None:
        """Queue the deletion of keys from a store."""
        self._inbox.append(forget)

    def enter(self, epoch: int) -> None:
        """Begin a new epoch: earlier reloads come back STALE, and private stores are emptied."""
        if epoch > self._epoch:
            self._epoch = epoch
            self._inbox.append(epoch)

    def fence(self, job_ids: Iterable[JobId]) -> set[JobId]:
        """Hurry offloads whose blocks are about to be overwritten; returns those still to read."""
        self._fenced.update(job_ids)
        return self.unread(job_ids)

    def unread(self, job_ids: Iterable[JobId]) -> set[JobId]:
        """Return which offloads have yet to read HBM."""
        return self._unread.intersection(job_ids)

    def unloaded(self, job_ids: Iterable[JobId]) -> set[JobId]:
        """Return which reloads have not been settled."""
        return self._unloaded.intersection(job_ids)

    def give_up(self, job_ids: Iterable[JobId]) -> None:
        """Drop what offloads have not begun to read. Copies that run are still to be waited for."""
        self._dropped.update(job_ids)

    def poll(self) -> list[Completion]:
        """Return the answers since the last call."""
        completions = []
        while self._outbox:
            completions.append(self._outbox.popleft())
        return completions

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running; answers may still wait to be polled."""
        return not (self._inbox or len(self._loads) or len(self._offloads))

    # -- from the thread that advances ------------------------------------------------

    def advance(self) -> bool:
        """Do a bounded amount of work; False when there was none to do now."""
        worked = self._accept()
        if self._dropped:
            dropped, self._dropped = self._dropped, set()
            self._offloads.give_up(dropped)
        worked |= self._collect()
        now = self.shop.clock()
        self._loads.expire(now)
        self._offloads.expire(now)
        began = (
            (self._offloads.unread(self._fenced) and self._offloads.begin_gather(self._fenced))
            or self._loads.begin()
            or self._offloads.begin_gather(self._fenced)
            or self._offloads.begin_write()
        )
        self._collect()
        answered = self._answer()
        return worked or began or answered

    def take_links(self) -> tuple[Link, ...]:
        """Return what each link did since the last call."""
        return self.shop.take_links()

    def close(self) -> None:
        """Wait for running copies, then release slab, copier and stores."""
        self.shop.close()

    # -- internals --------------------------------------------------------------------

    def _accept(self) -> bool:
        accepted = bool(self._inbox)
        while self._inbox:
            order = self._inbox.popleft()
            if isinstance(order, Run):
                lane = self._loads if order.transfer.kind is TransferKind.RELOAD else self._offloads
                lane.accept(order)
            elif isinstance(order, Forget):
                self._delete(order)
            else:
                self._enter(order)
        return accepted

    def _enter(self, epoch: int) -> None:
        self._loads.enter(epoch)
        self._offloads.enter(epoch)
        self.shop.key_space.enter(epoch)
        for store in self.shop.stores.values():
            store.clear()

    def _delete(self, order: Forget) -> None:
        names = [self.shop.key_space.name(key) for key in order.block_keys()]
        self.shop.stores[order.store].delete(names)

    def _collect(self) -> bool:
        """Hand what copiers and stores have finished to its lane."""
        collected = False
        for copy in self.shop.finished_copies():
            lane = self._offloads if copy.direction is Direction.GATHER else self._loads
            lane.copied(copy.run, copy.rows)
            collected = True
        for name, storing, answer in self.shop.store_answers():
            if storing.writes:
                idx = storing.run.transfer.stores.index(name)
                self._offloads.written(storing.run, idx, storing.rows, answer.outcomes)
            else:
                self._loads.fetched(storing.run, storing.rows, answer.outcomes)
            collected = True
        return collected

    def _answer(self) -> bool:
        answered = False
        for completion in [*self._loads.take_completions(), *self._offloads.take_completions()]:
            self._outbox.append(completion)
            self._unloaded.discard(completion.job_id)
            self._unread.discard(completion.job_id)
            self._fenced.discard(completion.job_id)
            answered = True
        return answered

    def _check(self, transfer: Transfer) -> None:
        num = transfer.num_blocks
        for name in ("block_ids", "slots", "sources", "targets"):
            if len(getattr(transfer, name)) != num:
                raise TransferError(
                    f"job {transfer.job_id}: column {name} has "
                    f"{len(getattr(transfer, name))} rows, the keys have {num}"
                )
        slots = np.concatenate((transfer.slots, transfer.window))
        self._check_range(transfer, "slot", slots, NO_SLOT, self.shop.slab.num_slots)
        if transfer.kind is not TransferKind.DEMOTE:
            groups = [group.num_blocks for group in self.shop.layout.groups]
            self._check_range(transfer, "block", transfer.block_ids, 0, max(groups))
        if transfer.kind is not TransferKind.RELOAD and (transfer.slots == NO_SLOT).any():
            raise TransferError(f"job {transfer.job_id}: a block to offload has no slot")
        if num and int(transfer.sources.max()) > len(transfer.stores):
            raise TransferError(f"job {transfer.job_id}: source {int(transfer.sources.max())}")
        for name in transfer.stores:
            if name not in self.shop.stores:
                raise TransferError(f"job {transfer.job_id}: no store {name!r} on this rank")

    @staticmethod
    def _check_range(transfer: Transfer, what: str, ids: object, low: int, high: int) -> None:
        column = int64s(ids)
        bad = np.flatnonzero((column < low) | (column >= high))
        if len(bad):
            row = int(bad[0])
            raise TransferError(
                f"job {transfer.job_id}, row {row}: {what} {int(column[row])} is not in "
                f"{low}..{high - 1}"
            )
