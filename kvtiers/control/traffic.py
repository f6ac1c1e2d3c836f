"""Which bytes a job puts on which links."""

from __future__ import annotations

from kvtiers.control.jobs import Job
from kvtiers.control.settings import ControlSettings
from kvtiers.cost.links import read_link, reload_link
from kvtiers.model.messages import TransferKind


def row_nbytes(settings: ControlSettings) -> int:
    """Return the bytes of one block of one KV group, the groups taken as equal."""
    return settings.block_nbytes // len(settings.groups)


def read_nbytes(job: Job, settings: ControlSettings) -> dict[str, int]:
    """Return the bytes that a RELOAD or PROMOTE job queues on each link."""
    nbytes: dict[str, int] = {}
    if job.kind is TransferKind.RELOAD:
        nbytes[reload_link()] = row_nbytes(settings) * len(job.rows)
    for row in job.rows:
        if row.source:
            link = read_link(settings.stores[row.source - 1].name)
            nbytes[link] = nbytes.get(link, 0) + row_nbytes(settings)
    return nbytes
