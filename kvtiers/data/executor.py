"""The one object of the copying plane that a worker talks to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NewType

from kvtiers.data.copier import Direction, Marker
from kvtiers.data.load_lane import LoadLane
from kvtiers.data.offload_lane import OffloadLane
from kvtiers.data.portions import PORTIONS, Portions
from kvtiers.data.runs import Run, Unread
from kvtiers.data.transfer_check import check_transfer
from kvtiers.data.workshop import Workshop
from kvtiers.model.errors import ProtocolError, TransferError
from kvtiers.model.messages import Completion, Forget, JobId, Link, Transfer, TransferKind

PIECE_NBYTES: Final = 64 * 2**20  # a load overtakes a gather after at most about 5 ms

_GivenUp = NewType("_GivenUp", frozenset[JobId])


@dataclass(frozen=True, slots=True)
class _Era:
    """From when on orders and names count."""

    epoch: int
    generation: int


class Executor:
    """Runs transfers by itself, step by step: no thread, no clock of its own.

    `submit`, `forget`, `enter`, `fence`, `need`, `give_up` and `poll` may be called from another
    thread than `advance`: they only touch queues. Everything else belongs to the thread
    that advances.

    Within one `advance`: what the engine waits for first (fenced gathers), then loads (those that
    a forward pass needs before others, promotions last), then other gathers, then writes to
    stores.
    """

    def __init__(
        self,
        shop: Workshop,
        *,
        verify_dram: bool = False,
        piece_nbytes: int = PIECE_NBYTES,
        portions: Portions = PORTIONS,
    ) -> None:
        self._shop = shop
        self._loads = LoadLane(shop, piece_nbytes, verify_dram=verify_dram, portions=portions)
        self._offloads = OffloadLane(shop, piece_nbytes, verify_dram=verify_dram)
        self._inbox: deque[Run | Forget | Unread | _Era | _GivenUp] = deque()
        self._outbox: deque[Completion] = deque()
        self._open: set[JobId] = set()
        self._unread: dict[JobId, Run] = {}
        self._unloaded: set[JobId] = set()
        self._fence = Unread()
        self._needed: set[JobId] = set()
        self._first_pending: dict[JobId, int] = {}
        self._era = _Era(0, shop.key_space.generation)
        self._epoch = 0
        self._closed = False

    # -- from any thread --------------------------------------------------------------

    def submit(self, transfer: Transfer, marker: Marker | None) -> None:
        """Queue an order; it starts once the engine's work before `marker` is done.

        Raises:
            TransferError: a column, slot, block or store that does not exist, two rows with
                one target, or a job that is running; nothing is queued.
            ProtocolError: the executor is closed.
        """
        if self._closed:
            raise ProtocolError(f"job {transfer.job_id}: the executor is closed")
        shop = self._shop
        check_transfer(transfer, shop.layout.groups, shop.slab.num_slots, shop.stores.names)
        if transfer.job_id in self._open:
            raise TransferError(f"job {transfer.job_id} is running already")
        run = Run(transfer, marker, shop.clock() + transfer.deadline)
        self._open.add(transfer.job_id)
        if transfer.kind is TransferKind.OFFLOAD:
            self._unread[transfer.job_id] = run
        elif transfer.kind is TransferKind.RELOAD:
            self._unloaded.add(transfer.job_id)
        self._inbox.append(run)

    def forget(self, forget: Forget) -> None:
        """Queue the deletion of keys from a store.

        Raises:
            TransferError: there is no such store, or the key column is torn.
        """
        if forget.store not in self._shop.stores.names:
            raise TransferError(f"no store {forget.store!r} on this rank")
        try:
            forget.block_keys()
        except ValueError as error:
            raise TransferError(str(error)) from error
        self._inbox.append(forget)

    def enter(self, epoch: int, generation: int) -> None:
        """Begin a new epoch: earlier reloads come back STALE, slots are emptied, stores retired.

        Frames have the names of a generation from then on; an epoch before the present one
        changes nothing.
        """
        era = _Era(epoch, generation)
        if epoch >= self._era.epoch and era != self._era:
            self._era = era
            self._inbox.append(era)

    def fence(self, fences: Mapping[JobId, Iterable[int]]) -> Unread:
        """Hurry the reading of engine blocks that are about to be overwritten.

        Args:
            fences: blocks, by the offload that reads them. One that is over has read its own.

        Returns:
            what of it is still to be read, also later.
        """
        runs = [(self._unread.get(job_id), blocks) for job_id, blocks in fences.items()]
        fence = Unread([(run, run.rows_of(blocks)) for run, blocks in runs if run is not None])
        if fence.jobs:
            self._fence = fence
            self._inbox.append(fence)
        return fence

    def unloaded(self, job_ids: Iterable[JobId]) -> set[JobId]:
        """Return which reloads have not been settled."""
        return self._unloaded.intersection(job_ids)

    def need(self, job_ids: Iterable[JobId]) -> None:
        """Hurry reloads that a forward pass waits for, and tell of their KV groups one by one."""
        wanted = set(job_ids)
        self._needed.update(wanted)
        self._needed.difference_update(wanted - self.unloaded(wanted))  # settled meanwhile

    def lacks(self, job_ids: Iterable[JobId], group: int) -> bool:
        """Whether a needed reload has yet to settle a block of the KV groups up to one."""
        return any(self._first_pending.get(job, 0) <= group for job in self.unloaded(job_ids))

    def give_up(self, job_ids: Iterable[JobId]) -> None:
        """Drop what offloads have not begun to read. Copies that run are still to be waited for."""
        self._inbox.append(_GivenUp(frozenset(job_ids)))

    def poll(self) -> list[Completion]:
        """Return the answers since the last call."""
        completions = []
        while self._outbox:
            completions.append(self._outbox.popleft())
        return completions

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running, and every answer can be polled."""
        return not (self._inbox or self._open)

    @property
    def hurried(self) -> bool:
        """Whether an engine step waits for a load, or to overwrite a block."""
        return bool(self._needed or self._fence.jobs)

    # -- from the thread that advances ------------------------------------------------

    def advance(self) -> bool:
        """Do a bounded amount of work; False when there was none to do now."""
        worked = self._accept()
        worked |= self._collect()
        now = self._shop.clock()
        self._loads.expire(now)
        self._offloads.expire(now)
        began = (
            self._offloads.begin_hurried()
            or self._loads.begin(self._needed)
            or self._offloads.begin_gather()
            or self._offloads.begin_write()
        )
        self._collect()
        answered = self._answer()
        came = self._tell_groups()
        return worked or began or answered or came

    def fail_all(self) -> None:
        """Answer FAILED for all that is not settled, after an error that nobody foresaw.

        Running copies are waited for. A slot that a store works on stays with the store: a
        reload is answered now and RELEASED later, a write is answered when the store does.
        """
        self._shop.drain_copies()
        self._loads.fail_all()
        self._offloads.fail_all()
        self._answer()

    def take_links(self) -> tuple[Link, ...]:
        """Return what each link did since the last call."""
        return self._shop.take_links()

    def close(self) -> None:
        """Fail what is left, wait for running copies, release slab, copier and stores; idempotent.

        Nothing else may run meanwhile. The last answers can be polled afterwards.
        """
        if self._closed:
            return
        self._closed = True
        self._accept()
        self.fail_all()
        self._shop.close()

    # -- internals --------------------------------------------------------------------

    def _accept(self) -> bool:
        accepted = bool(self._inbox)
        while self._inbox:
            order = self._inbox[0]
            try:
                self._take(order)
            finally:
                self._inbox.popleft()
        return accepted

    def _take(self, order: Run | Forget | Unread | _Era | _GivenUp) -> None:
        if isinstance(order, Run):
            reads = order.transfer.kind in (TransferKind.RELOAD, TransferKind.PROMOTE)
            (self._loads if reads else self._offloads).accept(order)
        elif isinstance(order, Forget):
            names = [self._shop.key_space.name(key) for key in order.block_keys()]
            self._shop.stores.delete(order.store, names)
        elif isinstance(order, Unread):
            self._offloads.hurry(order)
        elif isinstance(order, frozenset):
            self._offloads.give_up(order)
        else:
            self._enter(order)

    def _enter(self, era: _Era) -> None:
        if era.epoch > self._epoch:
            self._epoch = era.epoch
            self._loads.enter(era.epoch)
            self._offloads.enter(era.epoch)
            self._shop.slots.clear()
            self._shop.stores.retire()
        self._shop.key_space.enter(era.generation)

    def _collect(self) -> bool:
        """Hand what copiers and stores have finished to its lane."""
        collected = False
        for copy, outcome in self._shop.finished_copies():
            lane = self._offloads if copy.direction is Direction.GATHER else self._loads
            lane.copied(copy.run, copy.rows, outcome)
            collected = True
        for storing, outcomes in self._shop.stores.answers():
            if storing.writes:
                idx = storing.run.transfer.stores.index(storing.store)
                self._offloads.written(storing.run, idx, storing.rows, outcomes)
            else:
                self._loads.fetched(storing.run, storing.rows, outcomes)
            collected = True
        return collected

    def _answer(self) -> bool:
        answered = False
        for completion in [*self._loads.take_completions(), *self._offloads.take_completions()]:
            self._outbox.append(completion)
            self._unloaded.discard(completion.job_id)
            self._unread.pop(completion.job_id, None)
            self._needed.discard(completion.job_id)
            self._first_pending.pop(completion.job_id, None)
            if completion.last:
                self._open.discard(completion.job_id)
            answered = True
        return answered

    def _tell_groups(self) -> bool:
        """Note how far needed reloads have come; whether any has come further."""
        before = dict(self._first_pending)
        self._first_pending.update(self._loads.first_pending(self._needed))
        return self._first_pending != before
