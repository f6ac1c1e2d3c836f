"""Probes whether a store that failed can be read again, with a frame that nobody waits for."""

from __future__ import annotations

from kvtiers.control.gates import Gates
from kvtiers.control.jobs import Job, JobTable, Row
from kvtiers.control.load_order import load_order
from kvtiers.control.places import Places
from kvtiers.control.presence import Belief
from kvtiers.control.settings import ControlSettings
from kvtiers.control.tier import Residence
from kvtiers.model.messages import JobId, Transfer, TransferKind


class ProbeDesk:
    """Orders probes: a frame goes through one staging slot, is verified and dropped."""

    def __init__(self, settings: ControlSettings, places: Places, jobs: JobTable) -> None:
        self._settings = settings
        self._places = places
        self._gates: Gates = places.gates
        self._jobs = jobs
        self._running: dict[int, JobId] = {}

    def orders(self, epoch: int, now: float) -> list[Transfer]:
        """Return the probes that are due; none for a store whose last probe is still running."""
        due = [
            idx
            for idx in range(len(self._settings.stores))
            if self._gates.wants_read_probe(idx)
            and (idx not in self._running or self._jobs.get(self._running[idx]) is None)
        ]
        probes = [self._probe(idx, epoch, now) for idx in due]
        return [load_order(job, self._settings, now) for job in probes if job is not None]

    def _probe(self, idx: int, epoch: int, now: float) -> Job | None:
        """Open a probe's job; None if there is no slot for it, or no frame to probe with."""
        window = self._places.dram.take_window(1)
        if not window:
            return None
        row = self._row(idx)
        if row is None:
            self._places.dram.give_window(window)
            self._gates.trust(idx)
            return None
        job = self._jobs.open(TransferKind.PROMOTE, epoch)
        job.started = now
        job.deadline_seconds = self._settings.reload_deadline
        job.probes = True
        job.window = window
        job.rows.append(row)
        self._running[idx] = job.job_id
        self._gates.read_probe(idx)
        return job

    def _row(self, idx: int) -> Row | None:
        """Return the frame to probe with, pinned: one used lately, else any; None: none known."""
        places = self._places
        tier = places.stores[idx]
        while (row := self._gates.take_known(idx)) is not None:
            if tier is None or places.belief(idx, row.key) is Belief.PRESENT:
                return self._pinned(row, idx)
        ready = (e for e in tier.entries() if e.residence is Residence.READY) if tier else ()
        entry = next(iter(ready), None)
        return None if entry is None else self._pinned(Row(entry.key, -1, source=1 + idx), idx)

    def _pinned(self, row: Row, idx: int) -> Row:
        tier = self._places.stores[idx]
        entry = None if tier is None else tier.get(row.key)
        if tier is not None and entry is not None:
            tier.pin(entry)
            row.store_entries[idx] = entry
        return row
