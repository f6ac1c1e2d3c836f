"""What control tells an engine's scheduler side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kvtiers.control.jobs import Job
from kvtiers.control.match import Match
from kvtiers.control.settings import ControlSettings
from kvtiers.cost.planner import ReloadPlan
from kvtiers.model.messages import DRAM, UInt8s
from kvtiers.model.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Answer:
    """What control tells an engine that asks how much of a request it can reload.

    Attributes:
        num_blocks: leading blocks to reload beyond the local ones; None means "ask again".
        plan: the comparison behind it; None where there was nothing to compare.
        match: what was found.
    """

    num_blocks: int | None
    plan: ReloadPlan | None
    match: Match


@dataclass(slots=True)
class Asked:
    """What was answered to a request, kept so that the answer does not flip.

    Attributes:
        version: of tiers, presence and gates at that time. standings: of the links.
        limit: the first block that was not asked for.
        since: when the request was first asked about.
        patience: seconds from then on that it may wait for stores to say what they hold; None
            while no store had to be waited for.
    """

    version: tuple[int, ...]
    limit: int
    answer: Answer
    since: float
    standings: tuple[int, ...]
    patience: float | None = None


@dataclass(frozen=True, slots=True)
class LoadDone:
    """A reload that every rank has answered.

    Attributes:
        seconds: since the engine had made room for it.
        num_loaded, num_failed: blocks; of an engine with several KV groups of its own, blocks of
            each group.
        kept: blocks before the first failed one, by tier name; none of several KV groups, whose
            engine keeps nothing of a load that failed.
    """

    request_id: str
    num_loaded: int
    num_failed: int
    seconds: float
    kept: Mapping[str, int] = field(default_factory=dict)


def load_done(
    job: Job, outcomes: UInt8s, counts: tuple[int, int], settings: ControlSettings, seconds: float
) -> LoadDone:
    """Return the result of a reload.

    Args:
        counts: frames that came, and that did not. seconds: since it began.
    """
    num_loaded, num_failed = counts
    failed = {job.rows[idx].position for idx in np.flatnonzero(outcomes != Outcome.OK).tolist()}
    if settings.num_layer_ranges > 1:  # a block has several frames; the engine knows blocks
        num_failed = len(failed)
        num_loaded = len({row.position for row in job.rows}) - num_failed
    kept: dict[str, int] = {}
    if failed and len(settings.groups) == settings.num_layer_ranges:
        kept = _kept_blocks(job, min(failed), settings)
    return LoadDone(job.request_id, num_loaded, num_failed, seconds, kept)


def _kept_blocks(job: Job, end: int, settings: ControlSettings) -> dict[str, int]:
    """Return how many of the blocks before one came from each tier."""
    names = (DRAM, *(store.name for store in settings.stores))
    sources: dict[int, int] = {}
    for row in job.rows:
        if row.position < end:
            sources[row.position] = max(row.source, sources.get(row.position, 0))
    return dict(Counter(names[source] for source in sources.values()))
