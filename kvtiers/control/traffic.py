"""Keeps count of the bytes that jobs have queued on each link."""

from __future__ import annotations

from collections.abc import Mapping

from kvtiers.control.jobs import Job
from kvtiers.control.settings import ControlSettings
from kvtiers.cost.links import Links, offload_link, read_link, reload_link
from kvtiers.model.messages import TransferKind


class Traffic:
    """Adds ordered bytes to the links' queues, and takes answered ones off."""

    def __init__(self, settings: ControlSettings, links: Links) -> None:
        self._settings = settings
        self._links = links

    def ordered(self, job: Job) -> None:
        """Add the bytes of a job that is ordered."""
        for link, nbytes in self._nbytes(job).items():
            self._links.submitted(link, nbytes)

    def answered(self, job: Job) -> None:
        """Take off the bytes of a job that is answered, whether they came or not."""
        for link, nbytes in self._nbytes(job).items():
            self._links.done(link, nbytes)

    def _nbytes(self, job: Job) -> Mapping[str, int]:
        row_nbytes = self._settings.block_nbytes // len(self._settings.groups)
        if job.kind is TransferKind.OFFLOAD:
            return {offload_link(): row_nbytes * len(job.rows)}
        nbytes: dict[str, int] = {}
        if job.kind is TransferKind.RELOAD:
            nbytes[reload_link()] = row_nbytes * len(job.rows)
        for row in job.rows:
            if row.source:
                link = read_link(self._settings.stores[row.source - 1].name)
                nbytes[link] = nbytes.get(link, 0) + row_nbytes
        return nbytes
