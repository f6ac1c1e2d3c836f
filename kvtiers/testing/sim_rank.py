"""A rank of the copying plane without bytes: slots and blocks that know whose content they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvtiers.model.keys import BlockKey, Rank
from kvtiers.model.messages import (
    DRAM,
    HBM,
    NO_SLOT,
    RELEASED,
    Completion,
    JobId,
    StepOrders,
    Transfer,
    TransferKind,
)
from kvtiers.model.outcome import Outcome

_READS = (TransferKind.RELOAD, TransferKind.PROMOTE)
Faults = Mapping[int, Outcome]  # row to what becomes of it instead of OK
Name = tuple[int, Rank, BlockKey]


class SimStore:
    """Frames by generation, rank and key; one object is one medium, private or shared.

    Args:
        inherited: frames of an earlier life, which leave as room is needed until they are used.
    """

    def __init__(self, capacity_frames: int | None = None, inherited: Iterable[Name] = ()) -> None:
        self.capacity_frames = capacity_frames
        self.inherited = dict.fromkeys(inherited)
        self.frames: set[Name] = set(self.inherited)
        self.written: set[Name] = set(self.inherited)  # at any time
        self.num_writes = 0
        self.broken = False  # neither reads nor writes work

    def put(self, name: Name) -> Outcome:
        """Keep a frame."""
        if self.broken:
            return Outcome.FAILED
        self.inherited.pop(name, None)
        if name in self.frames:
            return Outcome.OK
        full = self.capacity_frames is not None and len(self.frames) >= self.capacity_frames
        if full and not self.inherited:
            return Outcome.FULL
        if full:
            oldest = next(iter(self.inherited))
            del self.inherited[oldest]
            self.frames.discard(oldest)
        self.frames.add(name)
        self.written.add(name)
        self.num_writes += 1
        return Outcome.OK

    def get(self, name: Name) -> Outcome:
        """Find a frame, which counts as used."""
        self.inherited.pop(name, None)
        if self.broken:
            return Outcome.FAILED
        return Outcome.OK if name in self.frames else Outcome.MISSING

    def discard(self, name: Name) -> None:
        """Drop a frame."""
        self.inherited.pop(name, None)
        self.frames.discard(name)


@dataclass(slots=True)
class SimJob:
    """An order under way: the hops that have not been answered, in their order.

    Attributes:
        gathered: rows of an offload that were read ahead of the others, for a fence.
    """

    transfer: Transfer
    hops: list[str]
    keys: list[BlockKey] = field(init=False)
    dram: list[Outcome] = field(init=False)
    gathered: dict[int, Outcome] = field(default_factory=dict)
    reads: set[int] = field(init=False)
    writes: set[int] = field(init=False)

    def __post_init__(self) -> None:
        transfer = self.transfer
        self.keys = transfer.block_keys()
        self.dram = [Outcome.OK] * len(self.keys)
        slots, sources = transfer.slots.tolist(), transfer.sources.tolist()
        lands = [transfer.kind is TransferKind.OFFLOAD or source > 0 for source in sources]
        used = [(slot, to) for slot, to in zip(slots, lands, strict=True) if slot != NO_SLOT]
        self.reads = {slot for slot, to in used if not to}
        self.writes = {slot for slot, to in used if to} | set(transfer.window.tolist())


class SimRank:
    """Takes orders, and answers each hop when it is told to, as well or badly as it is told.

    It asserts what a real rank would suffer from: a slot that two jobs write or one writes
    while another reads, a block that is read after it was overwritten.

    Args:
        stores: private to this rank, or shared with others.
    """

    def __init__(self, rank: Rank, num_slots: int, stores: Mapping[str, SimStore]) -> None:
        self.rank = rank
        self.slots: list[BlockKey | None] = [None] * num_slots
        self.blocks: dict[int, BlockKey | None] = {}
        self.stores = stores
        self.jobs: dict[JobId, SimJob] = {}
        self.epoch = 0

    # -- orders -----------------------------------------------------------------------

    def take(self, orders: StepOrders) -> list[Completion]:
        """Take a step's orders in, and read what is fenced, no row more.

        Returns:
            the answers of offloads that are read by that to the last row.
        """
        if orders.epoch > self.epoch:
            self.epoch = orders.epoch
            for store in self.stores.values():
                if store.capacity_frames is not None:
                    for name in [f for f in store.frames if f[1] == self.rank]:
                        store.discard(name)
        for forget in orders.forgets:
            for key in forget.block_keys():
                self.stores[forget.store].discard((self.epoch, self.rank, key))
        for transfer in (*orders.before, *orders.after):
            self._accept(transfer)
        for job_id in orders.sync_loads:
            assert job_id in self.jobs, f"job {job_id} is needed in this step and not ordered"
        read = [i for i, blocks in orders.fences.items() if self._read(i, set(blocks.tolist()))]
        return [self.answer(job_id) for job_id in read]

    def _read(self, job_id: JobId, blocks: set[int]) -> bool:
        """Read some blocks of an offload now; whether that was all it had to read."""
        job = self.jobs.get(job_id)
        if job is None or job.hops[0] != DRAM:
            return False
        for row, block_id in enumerate(job.transfer.block_ids.tolist()):
            if block_id in blocks and row not in job.gathered:
                job.gathered[row] = self._do(job, DRAM, row, None)
        return len(job.gathered) == len(job.keys)

    def _accept(self, transfer: Transfer) -> None:
        job = SimJob(transfer, _hops(transfer))
        assert not job.reads & job.writes, "a job reads a slot that it fills"
        for other in self.jobs.values():
            assert not job.writes & (other.writes | other.reads), "a slot has two owners"
            for row, slot in enumerate(transfer.slots.tolist()):
                if slot in other.writes & job.reads:
                    assert job.keys[row] in other.keys, "reads what another job overwrites"
        assert transfer.job_id not in self.jobs
        self.jobs[transfer.job_id] = job

    # -- answers ----------------------------------------------------------------------

    def answerable(self) -> list[JobId]:
        """Return the jobs that can answer their next hop: their sources are not on the way."""
        return [job_id for job_id, job in self.jobs.items() if not self._waits(job_id, job)]

    def _waits(self, job_id: JobId, job: SimJob) -> bool:
        if job.transfer.kind not in _READS or job.transfer.epoch < self.epoch:
            return False
        others = (other for i, other in self.jobs.items() if i != job_id)
        return any(other.hops[0] in (DRAM, HBM) and other.writes & job.reads for other in others)

    def answer(self, job_id: JobId, faults: Faults | None = None, late: bool = False) -> Completion:
        """Do the next hop of a job, and say what became of it.

        Args:
            faults: rows that fail. late: a load: give all rows up first, and the slots later.
        """
        job, faults = self.jobs[job_id], faults or {}
        hop = job.hops.pop(0)
        outcomes = [self._do(job, hop, row, faults.get(row)) for row in range(len(job.keys))]
        if late and hop != RELEASED and job.transfer.kind in _READS:
            outcomes = [Outcome.TIMED_OUT] * len(job.keys)
            job.hops.append(RELEASED)
        if hop == DRAM:
            job.dram = outcomes
        last = not job.hops
        if last:
            del self.jobs[job_id]
        column = np.array(outcomes, np.uint8)
        return Completion(job_id, job.transfer.epoch, self.rank, hop, column, last)

    def _do(self, job: SimJob, hop: str, row: int, fault: Outcome | None) -> Outcome:
        if hop == RELEASED:
            return Outcome.TIMED_OUT
        if job.transfer.epoch < self.epoch:
            return Outcome.STALE
        if hop == HBM:
            return self._reload(job, row, fault)
        if job.transfer.kind is TransferKind.PROMOTE:
            return self._promote(job, row, fault)
        if hop == DRAM:
            return job.gathered[row] if row in job.gathered else self._gather(job, row, fault)
        return self._write(job, hop, row, fault)

    def _gather(self, job: SimJob, row: int, fault: Outcome | None) -> Outcome:
        if fault is not None:
            return fault
        found = self.blocks.get(int(job.transfer.block_ids[row]))
        assert found == job.keys[row], "a block was overwritten before it was read"
        self.slots[int(job.transfer.slots[row])] = found
        return Outcome.OK

    def _write(self, job: SimJob, store: str, row: int, fault: Outcome | None) -> Outcome:
        if not int(job.transfer.targets[row]) >> job.transfer.stores.index(store) & 1:
            return Outcome.OK
        if job.dram[row] is not Outcome.OK:
            return job.dram[row]
        if fault is not None:
            return fault
        if self.slots[int(job.transfer.slots[row])] != job.keys[row]:
            return Outcome.STALE
        return self.stores[store].put((self.epoch, self.rank, job.keys[row]))

    def _promote(self, job: SimJob, row: int, fault: Outcome | None) -> Outcome:
        transfer, key = job.transfer, job.keys[row]
        slot = int(transfer.slots[row])
        outcome = self._find(transfer, key, slot, int(transfer.sources[row]))
        if outcome is Outcome.OK and fault is not None:
            outcome = fault
        if outcome is Outcome.OK and slot != NO_SLOT:
            self.slots[slot] = key
        return outcome

    def _reload(self, job: SimJob, row: int, fault: Outcome | None) -> Outcome:
        transfer, key = job.transfer, job.keys[row]
        slot, source = int(transfer.slots[row]), int(transfer.sources[row])
        outcome = self._find(transfer, key, slot, source)
        if outcome is Outcome.OK and fault is not None:
            outcome = fault
        if outcome is Outcome.OK:
            if source and slot != NO_SLOT:
                self.slots[slot] = key
            self.blocks[int(transfer.block_ids[row])] = key
        return outcome

    def _find(self, transfer: Transfer, key: BlockKey, slot: int, source: int) -> Outcome:
        if source == 0 and slot == NO_SLOT:
            return Outcome.MISSING
        if source == 0:
            return Outcome.OK if self.slots[slot] == key else Outcome.STALE
        if slot == NO_SLOT and not len(transfer.window):
            return Outcome.TIMED_OUT
        return self.stores[transfer.stores[source - 1]].get((self.epoch, self.rank, key))

    # -- the engine -------------------------------------------------------------------

    def compute(self, block_ids: Iterable[int], keys: Iterable[BlockKey]) -> None:
        """Fill engine blocks: what the step's forward pass does."""
        self.blocks.update(zip(block_ids, keys, strict=True))


def _hops(transfer: Transfer) -> list[str]:
    if transfer.kind is TransferKind.RELOAD:
        return [HBM]
    hops = [DRAM] if transfer.kind in (TransferKind.OFFLOAD, TransferKind.PROMOTE) else []
    for idx, name in enumerate(transfer.stores):
        if (transfer.targets >> idx & 1).any():
            hops.append(name)
    return hops
