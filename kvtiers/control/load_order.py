"""The order that a job of loads becomes."""

from __future__ import annotations

import numpy as np

from kvtiers.control.jobs import Job
from kvtiers.control.settings import ControlSettings
from kvtiers.model.keys import pack_keys
from kvtiers.model.messages import NO_SLOT, Transfer, int64s


def load_order(job: Job, settings: ControlSettings, now: float) -> Transfer:
    """Return the order of a RELOAD or PROMOTE job; its deadline counts from the job's start."""
    job.ordered = now
    left = max(job.started + job.deadline_seconds - now, 0.0)
    return Transfer(
        job_id=job.job_id,
        epoch=job.epoch,
        kind=job.kind,
        keys=pack_keys(row.key for row in job.rows),
        block_ids=int64s([row.block_id for row in job.rows]),
        slots=int64s([NO_SLOT if row.entry is None else row.entry.slot for row in job.rows]),
        sources=np.array([0 if row.given_up else row.source for row in job.rows], np.uint8),
        targets=np.zeros(len(job.rows), np.uint8),
        stores=tuple(store.name for store in settings.stores),
        window=int64s(job.window),
        deadline=left,
        request_id=job.request_id,
    )
