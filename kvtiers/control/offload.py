"""Moving blocks down: what to offload, into which slots, and what became of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import numpy as np

from kvtiers.control.admission import Admission, make_admission
from kvtiers.control.fences import Fences
from kvtiers.control.jobs import Job, JobTable, Row
from kvtiers.control.late_writes import MAX_BLOCKS, LateWrites
from kvtiers.control.places import Places
from kvtiers.control.reuse import ReuseChances
from kvtiers.control.settings import ControlSettings, StoreSettings
from kvtiers.control.tier import Entry, Residence
from kvtiers.cost.endurance import WriteBudget
from kvtiers.cost.model import CostModel
from kvtiers.model.errors import ProtocolError
from kvtiers.model.keys import BlockKey, pack_keys
from kvtiers.model.messages import DRAM, NO_SLOT, Transfer, TransferKind, UInt8s, int64s
from kvtiers.model.outcome import Outcome
from kvtiers.observe.metrics import (
    BLOCKS_DEMOTED,
    BLOCKS_FAILED,
    BLOCKS_OFFLOADED,
    OFFLOADS_DROPPED,
    Counters,
)

_OK: Final = int(Outcome.OK)
_MOST_ORDERS: Final = 8  # of what is demoted in one step
_LEAST_AT_ONCE: Final = 4  # blocks of one of them


class OffloadDesk:
    """Collects the offloads of a step into one job, and settles jobs as ranks answer.

    A block is copied once however many requests share it. A block is refused if there is no room
    for it, or if the blocks before it are nowhere; the caller may offer it again.
    """

    def __init__(
        self,
        settings: ControlSettings,
        places: Places,
        jobs: JobTable,
        fences: Fences,
        counters: Counters,
        cost: CostModel,
    ) -> None:
        self._settings = settings
        self._places = places
        self._dram = places.dram
        self._stores = places.stores
        self._presence = places.presence
        self._gates = places.gates
        self._jobs = jobs
        self._fences = fences
        self._counters = counters
        self._chances = ReuseChances()
        self._notes_reuse = any(store.admit == "cost" for store in settings.stores)
        self._admissions: list[Admission] = [
            make_admission(settings, idx, cost, self._chances)
            for idx in range(len(settings.stores))
        ]
        self._budgets = [
            None if s.write_budget_nbytes is None else WriteBudget(s.write_budget_nbytes, 0.0)
            for s in settings.stores
        ]
        self._now = 0.0
        self._open: Job | None = None
        self._demoting: set[BlockKey] = set()
        self._late = LateWrites(settings, places, jobs, self._route)
        self._through = [(i, s) for i, s in enumerate(settings.stores) if s.write == "through"]
        self._holding = False
        self._held: deque[BlockKey] = deque()

    # -- offload ----------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Let time pass."""
        self._now = now
        for admission in self._admissions:
            admission.tick(now)

    def asked_for(self, keys: Iterable[BlockKey]) -> None:
        """Note that blocks are reloaded: they may be asked for again."""
        if self._notes_reuse:
            self._chances.seen(keys)

    def offer(
        self, key: BlockKey, parent: BlockKey | None, position: int, block_id: int, epoch: int
    ) -> bool:
        """Take a full block into the step's job; False when it is refused.

        Args:
            position: of the block in its prefix, counted from 0.
            parent: the block before it, which must be in DRAM or a store: otherwise no lookup
                could ever reach this one. None where it needs none.
        """
        dram = self._dram
        held = dram.get(key)
        if held is not None:
            self._late.used(held, epoch)
            return True
        if parent is not None and dram.get(parent) is None and not self._places.held_below(parent):
            return False
        if dram.num_free == 0 and self._places.stored(key):
            return True  # a store has it: not worth evicting another block for
        entry = dram.reserve(key, parent)
        if entry is None:
            return False
        if self._open is not None and self._open.epoch != epoch:
            raise ProtocolError(
                f"job {self._open.job_id} of epoch {self._open.epoch} is not sealed"
            )
        if self._open is None:
            self._open = self._jobs.open(TransferKind.OFFLOAD, epoch)
        job = self._open
        entry.position = position
        if self._notes_reuse and not self._places.stored(key):  # else it was asked for just now
            self._chances.seen((key,))
        row = Row(key, block_id, entry, lands=True, parent=parent)
        if self._holding and self._through:
            self._held.append(key)
        else:
            for idx, store in self._through:
                self._route(row, idx, store, position)
        dram.pin(entry)
        job.rows.append(row)
        self._fences.reading(block_id, job.job_id)
        return True

    def seal(self) -> Transfer | None:
        """Close the step's job and return its order, None when nothing was taken."""
        job, self._open = self._open, None
        if job is None:
            return None
        return self._order(job)

    def settle(self, job: Job, hop: str, outcomes: UInt8s, epoch: int) -> None:
        """Apply the merged outcomes of one hop of an OFFLOAD or DEMOTE job.

        Args:
            epoch: the present one; what jobs of an earlier one wrote is not believed.
        """
        if hop == DRAM:
            self._landed(job, outcomes)
            return
        idx = self._store_idx(hop)
        for row, outcome in zip(job.rows, outcomes.tolist(), strict=True):
            if idx in row.store_entries:
                self._settle_write(row, idx, Outcome(outcome), believed=job.epoch == epoch)

    def closed(self, job: Job) -> None:
        """Let go of what a finished OFFLOAD or DEMOTE job held."""
        for row in job.rows:
            if row.entry is not None:
                self._dram.unpin(row.entry)
            if row.false:
                self._places.no_longer_false(row.key)
        if job.kind is TransferKind.DEMOTE and not job.keeps:
            self._demoting.difference_update(row.key for row in job.rows)
            self._drain_to_low_watermark(job)

    @property
    def holds_back(self) -> bool:
        """Whether blocks wait in DRAM until the load that they rest on is known to be good."""
        return bool(self._held)

    def hold_back(self) -> None:
        """From now on, let nothing go to stores: it may have been computed on a failing load."""
        self._holding = True

    def release(self, epoch: int) -> None:
        """Let blocks go to stores again, also those that were held back, up to 64 each step.

        Those that turned out to be wrong have left DRAM meanwhile.
        """
        self._holding = False
        for _ in range(min(len(self._held), MAX_BLOCKS)):
            key = self._held.popleft()
            entry = self._dram.get(key)
            if entry is None:
                continue
            if entry.idle:
                self._late.used(entry, epoch)
            else:  # it has yet to arrive in DRAM
                self._held.append(key)

    def late_writes(self) -> Transfer | None:
        """Return the order to write blocks in use to stores that lack them; None without any."""
        job = self._late.take()
        return None if job is None else self._order(job)

    # -- demote -----------------------------------------------------------------------

    def demotes(self, epoch: int) -> list[Transfer]:
        """Write the next victims to write-back stores once DRAM is above its high watermark.

        A victim takes the blocks before it along, tail first, as far as room is needed. Blocks
        that need no write leave at once, or after their children.

        Returns:
            the orders. There are several, since slots come back with each: those who come meanwhile
            find room before all is written. None if there is nothing to write, or no write-back
            store is in use: then DRAM drops what it must.
        """
        slots = self._settings.num_slots
        used = slots - self._dram.num_free - len(self._demoting)  # as soon as those have left
        if self._holding or used <= self._settings.high_watermark * slots:
            return []
        stores, most_writes = self._settings.stores, self._gates.most_writes
        back = [i for i, s in enumerate(stores) if s.write == "back" and most_writes(i)]
        if not back:
            return []
        excess = used - int(self._settings.low_watermark * slots)
        excess = min(excess, max(map(most_writes, back)))  # one, where it is a probe
        at_once = max(_LEAST_AT_ONCE, -(-excess // _MOST_ORDERS))
        jobs: list[Job] = []
        while excess > 0:
            victim = self._dram.next_victim()
            if victim is None:
                break
            while victim is not None and excess > 0:
                row = Row(victim.key, -1, victim, parent=victim.parent_key)
                for idx in back:
                    self._route(row, idx, stores[idx], victim.position)
                excess -= 1
                if not row.store_entries and victim.evictable:
                    self._dram.evict(victim)
                    break
                if not jobs or (row.store_entries and len(jobs[-1].rows) >= at_once):
                    jobs.append(self._jobs.open(TransferKind.DEMOTE, epoch))
                self._dram.pin(victim)
                self._demoting.add(victim.key)
                jobs[-1].rows.append(row)
                victim = self._next_in_chain(victim)
        return [self._order(job) for job in jobs]

    def _next_in_chain(self, entry: Entry) -> Entry | None:
        """Return the parent of a block that is being demoted, if it leaves next."""
        parent = None if entry.parent_key is None else self._dram.get(entry.parent_key)
        if parent is None or not parent.idle:
            return None
        return parent if all(key in self._demoting for key in parent.children()) else None

    # -- internals --------------------------------------------------------------------

    def _route(self, row: Row, idx: int, store: StoreSettings, position: int) -> None:
        """Reserve room in a store for a row, if the store lacks it and it is worth a write."""
        tier, admission = self._stores[idx], self._admissions[idx]
        # A frame of an earlier life is put again: that writes nothing, and makes it ours.
        shared = tier is None and self._presence.fresh(store.name, row.key)
        held = shared or (tier is not None and tier.get(row.key) is not None)
        if held or row.key in self._places.false:
            return
        if not self._gates.most_writes(idx):
            self._counters.add(OFFLOADS_DROPPED, (f"off_{store.name}",))
            return
        worth = admission.worth(row.key, position)
        admission.offered(row.key)
        if not worth:
            self._counters.add(OFFLOADS_DROPPED, ("not_admitted",))
            return
        budget = self._budgets[idx]
        if budget is not None and budget.affordable_nbytes(self._now) < store.frame_nbytes:
            self._counters.add(OFFLOADS_DROPPED, (f"over_budget_{store.name}",))
            return
        entry = None if tier is None else tier.reserve(row.key, row.parent)
        if entry is None and tier is not None:
            self._counters.add(OFFLOADS_DROPPED, (f"no_room_{store.name}",))
            return
        if entry is not None:
            entry.position = position
        if budget is not None:
            budget.spend(store.frame_nbytes, self._now)
        row.store_entries[idx] = entry
        self._gates.writing(idx, row)

    def _settle_write(self, row: Row, idx: int, outcome: Outcome, *, believed: bool) -> None:
        """Apply the fate of one write to a store."""
        name, tier = self._settings.stores[idx].name, self._stores[idx]
        entry = row.store_entries[idx]
        # A rank refused the block, or the engine took its tokens back: what was written is wrong.
        false = row.false or (row.entry is not None and row.entry.doomed)
        if outcome is Outcome.OK:
            self._counters.add(BLOCKS_DEMOTED, (name,))
        else:
            self._counters.add(BLOCKS_FAILED, (outcome.name.lower(),))
        if outcome is Outcome.OK and believed and row.entry is not None:
            self._dram.back(row.entry)
        if tier is not None and entry is not None:
            tier.commit(entry) if outcome is Outcome.OK else tier.abandon(entry)
        elif outcome is Outcome.OK and believed and not false:
            self._presence.wrote(name, row.key)
        if false and believed:  # some rank may have written it after it was told to drop it
            self._places.retract(idx, row.key)

    def _landed(self, job: Job, outcomes: UInt8s) -> None:
        """Make blocks READY in DRAM, or give their reservations up."""
        num_landed = 0
        for row, outcome in zip(job.rows, outcomes.tolist(), strict=True):
            if row.entry is None:
                raise ProtocolError(f"job {job.job_id}: an offloaded block without a slot")
            if outcome == _OK:
                self._dram.commit(row.entry)
                if self._stores and self._places.stored(row.key):
                    self._dram.back(row.entry)
                num_landed += 1
            else:
                self._dram.abandon(row.entry)
                self._counters.add(BLOCKS_FAILED, (Outcome(outcome).name.lower(),))
        if num_landed:
            self._counters.add(BLOCKS_OFFLOADED, (DRAM,), num_landed)
        self._fences.read([row.block_id for row in job.rows], job.job_id)

    def _drain_to_low_watermark(self, job: Job) -> None:
        """Evict what a demotion has written, until DRAM is at its low watermark."""
        low = int(self._settings.low_watermark * self._settings.num_slots)
        for row in job.rows:
            if self._settings.num_slots - self._dram.num_free <= low:
                return
            if row.entry is not None and row.entry.evictable and self._written(row):
                self._dram.evict(row.entry)

    @staticmethod
    def _written(row: Row) -> bool:
        entries = row.store_entries.values()
        return not entries or any(
            e is None or (e.residence is Residence.READY and not e.doomed) for e in entries
        )

    def _store_idx(self, name: str) -> int:
        for idx, store in enumerate(self._settings.stores):
            if store.name == name:
                return idx
        raise ProtocolError(f"no store {name!r}")

    def _order(self, job: Job) -> Transfer:
        targets = [
            sum(1 << idx for idx in row.store_entries) if row.store_entries else 0
            for row in job.rows
        ]
        return Transfer(
            job_id=job.job_id,
            epoch=job.epoch,
            kind=job.kind,
            keys=pack_keys(row.key for row in job.rows),
            block_ids=int64s([row.block_id for row in job.rows]),
            slots=int64s([_slot(row.entry) for row in job.rows]),
            sources=np.zeros(len(job.rows), np.uint8),
            targets=np.array(targets, np.uint8),
            stores=tuple(s.name for s in self._settings.stores),
            window=int64s([]),
            deadline=self._settings.offload_deadline,
        )


def _slot(entry: Entry | None) -> int:
    return NO_SLOT if entry is None else entry.slot
