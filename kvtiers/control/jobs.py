"""Running transfers: what each holds, and what the ranks have answered so far."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvtiers.control.tier import Entry
from kvtiers.model.errors import ProtocolError
from kvtiers.model.keys import BlockKey, Rank
from kvtiers.model.messages import Completion, JobId, TransferKind, UInt8s


@dataclass(slots=True)
class Row:
    """One block of a job.

    Attributes:
        entry: the DRAM entry that the job reads or fills; None when it goes through the window.
        store_entries: by store index: read (RELOAD, PROMOTE) or filled (OFFLOAD, DEMOTE).
        source: RELOAD, PROMOTE: 0 for DRAM, else 1 + store index.
        lands: whether the entry is being filled by this job, not read.
        parent: the block before it, None for the first. position: in its prefix, from 0.
        given_up: whether the row is ordered without its source, for want of a slot to stage it, so
            that it comes back MISSING.
        false: whether what it writes was computed on top of a load that failed.
    """

    key: BlockKey
    block_id: int
    entry: Entry | None = None
    store_entries: dict[int, Entry | None] = field(default_factory=dict)
    source: int = 0
    lands: bool = False
    parent: BlockKey | None = None
    given_up: bool = False
    position: int = 0
    false: bool = False


@dataclass(frozen=True, slots=True)
class Watch:
    """The state of links and engine when a reload began.

    Attributes:
        moved_seconds: link name to the seconds that it had been busy until then, over all ranks.
        device_seconds: for which the device had work. computes: whether the engine ran steps.
    """

    moved_seconds: Mapping[str, float]
    device_seconds: float
    computes: bool


@dataclass(slots=True)
class Job:
    """A transfer that every rank was given.

    Attributes:
        window: staging slots it holds. request_id: whom a RELOAD is for.
        started, ordered: when the job was opened, and when the ranks were told.
        deadline_seconds: after `started`, when what has not come is given up.
        predicted_seconds: that a RELOAD was planned to take.
        watch: what the reload met when it began, to learn how long it waits to be noticed once it
            is done; None where that is not to be learnt.
        probes: whether it is to show that a store answers again.
        keeps: DEMOTE: whether the blocks stay in DRAM.
        merged: hop to the worst outcome of each row so far, over the ranks that answered.
        answered: hop to the ranks that have answered it. finished: ranks that hold nothing of it.
    """

    job_id: JobId
    kind: TransferKind
    epoch: int
    rows: list[Row] = field(default_factory=list)
    window: list[int] = field(default_factory=list)
    request_id: str = ""
    started: float = 0.0
    ordered: float = 0.0
    deadline_seconds: float = math.inf
    predicted_seconds: float = 0.0
    watch: Watch | None = None
    probes: bool = False
    keeps: bool = False
    merged: dict[str, UInt8s] = field(default_factory=dict)
    answered: dict[str, set[Rank]] = field(default_factory=dict)
    finished: set[Rank] = field(default_factory=set)

    @property
    def lacked_slots(self) -> bool:
        """Whether a load waited for slots until little time was left, or never got any."""
        late = self.ordered - self.started > self.deadline_seconds / 2
        return late or (
            not self.window and any(row.source and row.entry is None for row in self.rows)
        )


class JobTable:
    """Jobs by id. A hop is settled when every rank has answered it."""

    def __init__(self, ranks: tuple[Rank, ...]) -> None:
        self._ranks = frozenset(ranks)
        self._jobs: dict[JobId, Job] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def num_ranks(self) -> int:
        """Ranks, each of which answers every job."""
        return len(self._ranks)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def open(self, kind: TransferKind, epoch: int, request_id: str = "") -> Job:
        """Start a job with a new id."""
        job = Job(JobId(next(self._ids)), kind, epoch, request_id=request_id)
        self._jobs[job.job_id] = job
        return job

    def get(self, job_id: JobId) -> Job | None:
        """Return a running job."""
        return self._jobs.get(job_id)

    def answer(self, completion: Completion) -> tuple[Job, UInt8s | None, bool]:
        """Take in one rank's answer to one hop.

        Returns:
            the job; the merged outcomes once all ranks have answered this hop, else None;
            whether all ranks are done with the job, which is then closed.

        Raises:
            ProtocolError: no such job or rank, a second answer, or a wrong number of rows.
        """
        job = self._jobs.get(completion.job_id)
        if job is None:
            raise ProtocolError(f"completion of job {completion.job_id}, which is not running")
        if completion.rank not in self._ranks:
            raise ProtocolError(f"job {job.job_id}: answer of unknown rank {completion.rank}")
        if len(completion.outcomes) != len(job.rows):
            raise ProtocolError(
                f"job {job.job_id}: {len(completion.outcomes)} outcomes for {len(job.rows)} blocks"
            )
        answered = job.answered.setdefault(completion.hop, set())
        if completion.rank in answered:
            raise ProtocolError(
                f"job {job.job_id}: {completion.rank} answered {completion.hop} twice"
            )
        answered.add(completion.rank)
        worst = job.merged.get(completion.hop)
        merged = completion.outcomes if worst is None else np.maximum(worst, completion.outcomes)
        job.merged[completion.hop] = merged
        if completion.last:
            job.finished.add(completion.rank)
        done = job.finished == self._ranks
        if done:
            del self._jobs[job.job_id]
        return job, merged if answered == self._ranks else None, done
