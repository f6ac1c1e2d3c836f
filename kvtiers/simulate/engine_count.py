"""How many engines serve a trace: the fewest that keep up with it without tiers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from kvtiers.simulate.replay_job import ReplayJob
from kvtiers.simulate.replay_pool import ReplayPool
from kvtiers.simulate.replay_result import Replay
from kvtiers.simulate.sizes import Size
from kvtiers.simulate.sizing import EngineTry, SizingPlan

_MOST_ENGINES: Final = 1024
_MOST_NUMBERS: Final = 8  # of engines that are tried

Make = Callable[[int, Size], ReplayJob]
"""Given a number of engines and the size of each one's tiers, makes the job that replays them."""


def settle_engines(
    plan: SizingPlan,
    pool: ReplayPool,
    make: Make,
    tries: list[EngineTry],
    told: Callable[[], None],
) -> int:
    """Replay more and more engines without tiers until they keep up; returns how many do.

    An engine that falls behind is never idle, so that its load says how many are needed at least.
    Where the number grew by more than one, the numbers between are searched too.

    Args:
        tries: gets what was tried, one after another. told: called after each.
    """
    num, most, nothing = 1, min(_MOST_ENGINES, len(plan.trace.requests)), Size(0, 0)
    behind, enough = 0, most + 1
    while True:
        # Whether one engine more is needed is not known yet; an idle core may find out.
        likely = [make(num + 1, nothing)] if num + 1 < enough and not paced(plan) else []
        found = pool.result(make(num, nothing), likely)
        if found is None:
            return num if enough > most else enough
        assert isinstance(found, Replay), "there is no tier that could be too small"
        tries.append(EngineTry.of(num, nothing, found, paced=paced(plan)))
        told()
        if tries[-1].keeps_up:
            enough = num
        else:
            behind = num
        if enough - behind <= 1 or num == most or len(tries) == _MOST_NUMBERS:
            return num if enough > most else enough
        if enough <= most:
            num = (behind + enough) // 2
        else:
            at_least = math.ceil(0.9 * num * found.load)
            num = min(most, max(at_least, num + max(1, num // 2)))


def try_fewer_engines(
    pool: ReplayPool, job: ReplayJob, likely: Sequence[ReplayJob], tries: list[EngineTry]
) -> bool:
    """Replay one engine fewer with large tiers: do they spare an engine?

    Returns:
        whether there was time for it.
    """
    found = pool.result(job, likely)
    if isinstance(found, Replay):
        tries.append(EngineTry.of(job.num_engines, job.size, found))
    return found is not None


def paced(plan: SizingPlan) -> bool:
    """Whether the loop is closed, so that requests come no faster than they are served."""
    return plan.arrivals.concurrency is not None
