"""Writes blocks in use once more to write-through stores that lack them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvtiers.control.jobs import Job, JobTable, Row
from kvtiers.control.places import Places
from kvtiers.control.settings import ControlSettings, StoreSettings
from kvtiers.control.tier import Entry
from kvtiers.model.messages import TransferKind

MAX_BLOCKS: Final = 64  # a step: what was lost comes back with the requests that use it

Route = Callable[[Row, int, StoreSettings, int], None]


class LateWrites:
    """Collects, step by step, what write-through stores lack of the blocks that requests use.

    A store that was off or full when a block was offloaded gets it when the block is used again.
    A shared store evicts by last access, and sees none of the accesses that DRAM serves: a block in
    use is put again now and then, which writes nothing where it is still there, and notes the
    access.

    Args:
        route: reserves room in a store for a row, if it is worth a write; see `OffloadDesk`.
    """

    def __init__(
        self, settings: ControlSettings, places: Places, jobs: JobTable, route: Route
    ) -> None:
        self._through = [(i, s) for i, s in enumerate(settings.stores) if s.write == "through"]
        self._places = places
        self._jobs = jobs
        self._route = route
        self._job: Job | None = None

    def used(self, entry: Entry, epoch: int) -> None:
        """Note that a request uses a block that DRAM has."""
        if not self._through or not entry.idle:
            return
        job = self._job
        if job is not None and (len(job.rows) >= MAX_BLOCKS or job.epoch != epoch):
            return
        row = Row(entry.key, -1, entry, parent=entry.parent_key, position=entry.position)
        for idx, store in self._through:
            if self._places.lacks(idx, entry.key):
                self._route(row, idx, store, entry.position)
        if not row.store_entries:
            return
        if job is None:
            job = self._job = self._jobs.open(TransferKind.DEMOTE, epoch)
            job.keeps = True
        self._places.dram.pin(entry)
        job.rows.append(row)

    def take(self) -> Job | None:
        """Return the job of this step, None when there is nothing to write."""
        job, self._job = self._job, None
        return job
