"""What the last steps offloaded, which may yet turn out to be wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from kvtiers.control.jobs import JobTable, Row
from kvtiers.control.places import Places
from kvtiers.control.presence import Belief
from kvtiers.model.messages import JobId, Transfer, TransferKind

_NUM_STEPS: Final = 3  # the one that failed, and two that were scheduled before the news


class Suspects:
    """Remembers the rows of recent offloads, and condemns them."""

    def __init__(self, places: Places, jobs: JobTable) -> None:
        self._places = places
        self._jobs = jobs
        self._recent: deque[tuple[JobId, ...]] = deque(maxlen=_NUM_STEPS)
        self._rows_of: dict[JobId, list[Row]] = {}

    def remember(self, offloads: Sequence[Transfer]) -> None:
        """Remember what this step offloads, until it can no longer turn out to be wrong."""
        if len(self._recent) == self._recent.maxlen:
            for job_id in self._recent[0]:
                self._rows_of.pop(job_id, None)
        self._recent.append(tuple(transfer.job_id for transfer in offloads))
        for transfer in offloads:
            job = self._jobs.get(transfer.job_id)
            if job is not None:
                self._rows_of[transfer.job_id] = job.rows

    def doom(self) -> None:
        """Serve nothing of what is remembered, and let no store keep it."""
        rows = [row for rows in self._rows_of.values() for row in rows]
        keys = {row.key for row in rows}
        for job in self._jobs:  # those on their way from DRAM to a store are false, too
            if job.kind in (TransferKind.OFFLOAD, TransferKind.DEMOTE):
                running = [row for row in job.rows if row.key in keys and not row.false]
                self._places.false.update(row.key for row in running)
                rows += running
        for row in rows:
            row.false = True
            if row.entry is not None:
                self._places.dram.doom(row.entry)
            self._retract(row)
        self._rows_of.clear()
        self._recent.clear()

    def _retract(self, row: Row) -> None:
        for idx, tier in enumerate(self._places.stores):
            written = idx in row.store_entries
            if tier is None:
                name = self._places.settings[idx].name
                written = written or self._places.presence.of(name, row.key) is Belief.PRESENT
            if written or (tier is not None and tier.get(row.key) is not None):
                self._places.retract(idx, row.key)
