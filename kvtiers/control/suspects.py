"""What the last steps offloaded, which may yet turn out to be false."""

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
        """Keep what this step offloads, until it can no longer turn out to be false."""
        if len(self._recent) == self._recent.maxlen:
            for job_id in self._recent[0]:
                self._rows_of.pop(job_id, None)
        self._recent.append(tuple(transfer.job_id for transfer in offloads))
        for transfer in offloads:
            job = self._jobs.get(transfer.job_id)
            if job is not None:
                self._rows_of[transfer.job_id] = job.rows

    def doom(self) -> None:
        """Serve none of it, and let no store keep it."""
        rows = {row.key: row for rows in self._rows_of.values() for row in rows}
        for row in rows.values():
            if row.entry is not None:
                self._places.dram.doom(row.entry)
            self._withdraw(row)
        for job in self._jobs:  # what is still on its way to a store is withdrawn as it arrives
            if job.kind in (TransferKind.OFFLOAD, TransferKind.DEMOTE):
                self._places.may_be_false(row for row in job.rows if row.key in rows)
        self._rows_of.clear()
        self._recent.clear()

    def _withdraw(self, row: Row) -> None:
        """Drop a row's block from all stores: a demotion may have taken it down since."""
        for idx, tier in enumerate(self._places.stores):
            if tier is None:
                belief = self._places.belief(idx, row.key)
                if idx in row.store_entries or belief is Belief.PRESENT:
                    self._places.withdraw(idx, row.key)
            elif (stored := tier.get(row.key)) is not None:
                tier.doom(stored)
