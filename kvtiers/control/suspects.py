"""What the last steps offloaded, which may yet turn out to be false."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from kvtiers.control.jobs import JobTable, Row
from kvtiers.control.places import Places
from kvtiers.model.messages import JobId, Transfer

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
        """Serve none of it."""
        for rows in self._rows_of.values():
            for row in rows:
                if row.entry is not None:
                    self._places.dram.doom(row.entry)
                for idx, stored in row.store_entries.items():
                    tier = self._places.stores[idx]
                    if tier is None:  # what is still on its way there is withdrawn as it arrives
                        self._places.withdraw(idx, row.key)
                    elif stored is not None:
                        tier.doom(stored)
        self._rows_of.clear()
        self._recent.clear()
