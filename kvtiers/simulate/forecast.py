"""Forecasts how many replays a sizing will take, and how long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvtiers.simulate.replay_job import PolicyJob, ReplayJob
from kvtiers.simulate.replay_pool import ReplayPool
from kvtiers.simulate.share import Shares

# Times as long as a replay without tiers, per request: 12,031 requests of the conversation trace
# on three H100s took 7 s without tiers and 16 to 21 s with them, a rule at six sizes 2 to 6 s (one
# core of a 2-core VM, November 2026).
_WITH_TIERS: Final = 2.6
_RULE: Final = 0.5
_USUAL: Final = 7  # replays with tiers for a data type

Expected = Callable[[int, int, float | None], None]
"""Called with how many jobs are done, how many there will be, and seconds left (None: unknown)."""


class Forecast:
    """Forecasts anew whenever a job has ended.

    Args:
        pool: which runs the jobs. told: is called with each forecast.
    """

    def __init__(self, pool: ReplayPool, shares: Shares, told: Expected) -> None:
        self._pool = pool
        self._shares = shares
        self._told = told

    def tell(
        self, num_engines: int, num_left: Sequence[int], num_rules: int, *, more: bool
    ) -> None:
        """Make a forecast, and tell it.

        Args:
            num_left: replays with tiers that each search has left; empty: none has begun.
            num_rules: replacement rules that are still to be played without an engine.
            more: whether more engines will probably have to be sized for, too.
        """
        num_requests = len(self._shares.trace.requests) / num_engines
        num = sum(num_left) if num_left else 2 * _USUAL
        left = num_requests * (num * _WITH_TIERS + num_rules * _RULE)
        if more:
            num_more = _USUAL * max(1, len(num_left))
            left += num_requests * num_engines / (num_engines + 1) * num_more * _WITH_TIERS
            num += num_more
        spent = self._pool.spent
        done = sum(self._weight(job) for job in spent)
        seconds = sum(spent.values()) / done * left / self._pool.num_jobs if done else None
        self._told(len(spent), len(spent) + num + num_rules, seconds)

    def _weight(self, job: object) -> float:
        """Return about how long a job takes, in requests without tiers."""
        if isinstance(job, PolicyJob):
            return _RULE * len(self._shares.of(job.num_engines).requests)
        assert isinstance(job, ReplayJob), "nothing else is played"
        tiers = _WITH_TIERS if job.size.dram_nbytes else 1.0
        return tiers * len(self._shares.of(job.num_engines).requests)
