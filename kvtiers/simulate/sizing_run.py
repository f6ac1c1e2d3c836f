"""Finds the cheapest tier sizes that meet a goal, by as few replays as will prove it."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Final

from kvtiers.cost.capacity import KVPool
from kvtiers.simulate.dtype_search import DtypeSearch
from kvtiers.simulate.engine_count import paced, settle_engines, try_fewer_engines
from kvtiers.simulate.estimate import Estimator, Guess
from kvtiers.simulate.forecast import Expected, Forecast
from kvtiers.simulate.goal import Goal, GoalKind
from kvtiers.simulate.machine import MachinePlan
from kvtiers.simulate.more_engines import MoreEngines
from kvtiers.simulate.policy_curves import PolicyCurve
from kvtiers.simulate.replay_job import PolicyJob, ReplayJob
from kvtiers.simulate.replay_pool import ReplayPool, Told
from kvtiers.simulate.replay_result import Replay
from kvtiers.simulate.share import Shares, servable
from kvtiers.simulate.sizes import STORE, Size, candidates, frame_nbytes_per_token, minimal_yaml
from kvtiers.simulate.sizing import EngineTry, Sizing, SizingPlan, Trial
from kvtiers.simulate.sizing_limit import limit_in_words
from kvtiers.simulate.stack import Curve, StackDistances
from kvtiers.simulate.trace import Trace, infinite_hit_tokens

_NUM_PLAYED: Final = 5  # capacities at which replacement rules are compared
_CLEARLY_MORE: Final = 1.02  # hits, for which another replacement rule is worth a replay


def size_tiers(
    plan: SizingPlan, told: Told | None = None, expected: Expected | None = None
) -> Sizing:
    """Find the sizes. A KeyboardInterrupt ends the replays; what was found until then counts.

    Args:
        told: see `Told`. expected: see `Expected`.

    Raises:
        CapacityError: the engine would not start. ConfigError: a name is not known.
        WorkerError: a process that replayed died.
    """
    shares = Shares(plan.trace, _longest(plan))
    deadline = time.monotonic() + plan.max_seconds
    told = told or (lambda _what: lambda _ended, _num: None)
    pool = ReplayPool(shares, plan.num_jobs, deadline, told)
    forecast = Forecast(pool, shares, expected or (lambda _done, _num, _seconds: None))
    try:
        run = _Run(plan, shares, pool, forecast)
        found = run.run()
        if run.num_enough is None or plan.num_engines is not None or found.interrupted:
            return found
        more = run.for_more().run(compare=True)
        if not more.chosen:
            return replace(found, decided=False, complete=False, interrupted=more.interrupted)
        return replace(found, more=more)
    finally:
        pool.close()


def _longest(plan: SizingPlan) -> int:
    """Return the tokens of the longest request that engines of all data types serve.

    Raises:
        CapacityError: an engine would not start. ConfigError: every request is longer.
    """
    machines = [replace(plan.machine, kv_dtype=dtype) for dtype in plan.kv_dtypes]
    longest = min(machine.settings(plan.trace).max_model_len for machine in machines)
    servable(plan.trace, longest)
    return longest


class _Run:
    """One search, while it runs.

    Attributes:
        num_enough: engines that meet the goal where those that were sized for do not; None: those
            do, or no number was found.
    """

    def __init__(
        self, plan: SizingPlan, shares: Shares, pool: ReplayPool, forecast: Forecast
    ) -> None:
        self._plan = plan
        self._shares = shares
        assert shares.longest is not None, "it is known what engines serve"
        self._longest = shares.longest
        self._pool = pool
        self._forecast = forecast
        self._num_engines = plan.num_engines or 1
        self._engines: list[EngineTry] = []
        self._distances: dict[int, StackDistances] = {}
        self._searches: list[DtypeSearch] = []
        self._guesses: dict[str, list[tuple[Size, Guess]]] = {}
        self._pools: dict[str, KVPool] = {}
        self._nbytes: dict[str, float] = {}
        self._curves: list[PolicyCurve] = []
        self._larger: list[EngineTry] = []
        self.num_enough: int | None = None
        self._decided = plan.num_engines is not None  # else more of them may meet it
        self._complete = True
        self._interrupted = False

    def run(self, *, compare: bool = False) -> Sizing:
        """Settle on the number of engines, search for each data type, then try other policies.

        Args:
            compare: try how many engines meet the goal without tiers, instead of with more tiers.
        """
        plan = self._plan
        for dtype in plan.kv_dtypes:
            machine = self._machine(dtype)
            self._pools[dtype] = machine.memory().pool
            self._nbytes[dtype] = frame_nbytes_per_token(machine)
        try:
            if plan.num_engines is None:
                self._num_engines = settle_engines(
                    plan, self._pool, self._job, self._engines, self._tell
                )
            self._prepare()
            self._tell()
            if plan.num_engines is None:
                self._try_fewer_engines()
            self._search()
            if compare:
                self._try_without_tiers()
            else:
                self._try_more_engines()
            if self.num_enough is None or plan.num_engines is not None:
                self._try_policies()
        except KeyboardInterrupt:
            self._complete, self._interrupted = False, True
        return self._answer()

    def for_more(self) -> _Run:
        """Return the search with `num_enough` engines, for the data types that need them."""
        assert self.num_enough is not None, "it is known"
        limit = self._limit_seconds()
        assert limit is not None, "the goal is a time"
        needy = [it.kv_dtype for it in self._searches if not it.chosen()[1]]
        plan = replace(
            self._plan,
            num_engines=self.num_enough,
            goal=Goal(GoalKind.TTFT, limit),
            kv_dtypes=tuple(needy),
        )
        return _Run(plan, self._shares, self._pool, self._forecast)

    def _answer(self) -> Sizing:
        plan, first = self._plan, self._plan.kv_dtypes[0]
        chosen: dict[str, Trial] = {}
        nearest: dict[str, Trial] = {}
        for search in self._searches:
            best, met = search.chosen()
            if best is not None:
                (chosen if met else nearest)[search.kv_dtype] = best
        share = self._share_of(self._num_engines)
        infinite = infinite_hit_tokens(share.requests, share.block_size).rate
        answer = chosen.get(first) or nearest.get(first)
        config = None if answer is None else answer.size.config(answer.policy)
        mine = self._searches[0].trials if self._searches else []
        curve = Curve.of(self._distances_of(self._num_engines), self._pools[first].num_tokens)
        proofs = {search.kv_dtype: search.proof() for search in self._searches}
        return Sizing(
            plan=plan,
            num_engines=self._num_engines,
            share=share,
            engines=self._engines,
            pools=self._pools,
            curve=curve,
            policy_curves=self._curves,
            infinite_hit_rate=infinite,
            nbytes_per_token=self._nbytes,
            guesses=self._guesses,
            trials=[trial for search in self._searches for trial in search.trials],
            chosen=chosen,
            nearest=nearest,
            proofs=proofs,
            limit=limit_in_words(
                plan.goal, mine, chosen.get(first), curve.rates[-1], proofs.get(first)
            ),
            yaml=None if config is None else minimal_yaml(config),
            decided=first in chosen or (self._decided and self._ends_known()),
            complete=self._complete,
            interrupted=self._interrupted,
            larger=self._larger,
        )

    def _ends_known(self) -> bool:
        """Whether no tiers and the largest were replayed, for the engine's own data type."""
        return bool(self._searches) and self._searches[0].ends_known

    # -- what is to be played ---------------------------------------------------------

    def _job(
        self, num_engines: int, size: Size, dtype: str | None = None, policy: str | None = None
    ) -> ReplayJob:
        plan = self._plan
        return ReplayJob(
            num_engines,
            self._machine(dtype or plan.kv_dtypes[0]),
            size,
            policy or plan.policies[0],
            plan.arrivals,
            plan.warmup,
        )

    def _machine(self, dtype: str) -> MachinePlan:
        """Return the engine with a data type; its longest request is that of all data types."""
        return replace(self._plan.machine, kv_dtype=dtype, max_model_len=self._longest)

    def _share_of(self, num_engines: int) -> Trace:
        """Return what the busiest of `num_engines` engines serves."""
        return servable(self._shares.of(num_engines), self._longest)

    def _distances_of(self, num_engines: int) -> StackDistances:
        if num_engines not in self._distances:
            self._distances[num_engines] = StackDistances.of(self._share_of(num_engines))
        return self._distances[num_engines]

    # -- how many engines -------------------------------------------------------------

    def _try_fewer_engines(self) -> None:
        """Replay one engine fewer with all that is reused in DRAM: do tiers spare an engine?"""
        num = self._num_engines
        if num == 1 or not any(it.keeps_up and it.num_engines == num for it in self._engines):
            return
        every = self._largest(num - 1)[0]
        likely = [self._job(num, size, s.kv_dtype) for s in self._searches for size in s.ends]
        self._complete &= try_fewer_engines(
            self._pool, self._job(num - 1, every), likely, self._engines
        )

    def _try_more_engines(self) -> None:
        """Where no size meets a time with these engines: how many more do?"""
        if not self._needs_more():
            self._decided |= self._searches[0].wanted is None
            return
        more = self._more_engines()
        self.num_enough = more.with_tiers(self._num_engines + 1)
        self._decided |= more.complete
        self._note(more)

    def _try_without_tiers(self) -> None:
        """Where tiers meet a time with these engines: how many do without?"""
        best, met = self._searches[0].chosen()
        if best is None or not met or not best.size.dram_nbytes:
            return
        more = self._more_engines()
        more.without_tiers(self._num_engines + 1)
        self._note(more)

    def _needs_more(self) -> bool:
        """Whether more engines may meet the goal, and nothing else that was tried does."""
        search, limit = self._searches[0], self._limit_seconds()
        if search.wanted is not None or search.chosen()[1] or limit is None or paced(self._plan):
            return False
        return self._guesses[search.kv_dtype][-1][1].alone_p90 <= limit

    def _more_engines(self) -> MoreEngines:
        limit = self._limit_seconds()
        assert limit is not None, "the goal is a time"
        most = len(self._plan.trace.requests)
        return MoreEngines(self._pool, self._job, self._largest, most, limit)

    def _note(self, more: MoreEngines) -> None:
        self._larger += more.tries
        self._complete &= more.complete

    def _largest(self, num_engines: int) -> tuple[Size, Guess]:
        """Return the largest tiers of `num_engines` engines each, and the guess for them."""
        machine = self._machine(self._plan.kv_dtypes[0])
        return self._guess_all(machine, num_engines, only_last=True)[0]

    def _limit_seconds(self) -> float | None:
        """Return the p90 TTFT that the goal allows; None: it is no time, or not known yet."""
        trials = self._searches[0].trials
        return self._plan.goal.limit_seconds(trials[0].replay.ttft.p90 if trials else None)

    def _tell(self) -> None:
        """Tell what is expected."""
        plan, num = self._plan, self._num_engines
        if not self._searches and self._engines:
            last = self._engines[-1]
            num = last.num_engines if last.keeps_up else math.ceil(last.num_engines * last.load)
        left = [search.num_expected for search in self._searches]
        rules = len(plan.policies) - len(self._curves) if len(plan.policies) > 1 else 0
        self._forecast.tell(num, left, rules, more=self._expects_more())

    def _expects_more(self) -> bool:
        """Whether it is likely that more engines will have to be sized for."""
        plan = self._plan
        if plan.num_engines is not None or paced(plan) or not self._searches:
            return False
        if self._searches[0].ends_known:
            return self._needs_more()
        guesses = self._guesses[plan.kv_dtypes[0]]
        limit = plan.goal.limit_seconds(guesses[0][1].ttft_p90)
        return limit is not None and guesses[-1][1].ttft_p90 > limit

    # -- sizes ------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Guess for every size that is considered, and make the searches ready."""
        plan = self._plan
        earlier = None
        for dtype in plan.kv_dtypes:
            guesses = self._guess_all(self._machine(dtype), self._num_engines)
            costs = {size: self._cost(size) for size, _ in guesses}
            self._guesses[dtype] = guesses
            search = DtypeSearch(plan, dtype, guesses, costs, earlier)
            self._searches.append(search)
            earlier = earlier or search

    def _search(self) -> None:
        """Search for all data types at once, each in its own order."""
        num = self._num_engines
        while True:
            wanted = {
                self._job(num, search.wanted, search.kv_dtype): search
                for search in self._searches
                if search.wanted is not None and search.may_go_on
            }
            if not wanted:
                return
            likely = [self._job(num, it, s.kv_dtype) for s in self._searches for it in s.ahead]
            done = self._pool.first(list(wanted), likely)
            if done is None:
                self._complete = False
                return
            assert isinstance(done, ReplayJob), "nothing else was wanted"
            wanted[done].told(self._pool[done])
            self._tell()

    def _guess_all(
        self, machine: MachinePlan, num_engines: int, *, only_last: bool = False
    ) -> list[tuple[Size, Guess]]:
        """Guess for every size that is considered: none first, the largest last."""
        per_token, share = self._nbytes[machine.kv_dtype], self._share_of(num_engines)
        distances = self._distances_of(num_engines)
        some = Size(2**30, 2**30).config("lru")
        assert some is not None, "there is DRAM"
        estimator = Estimator(share, distances, machine, self._plan.arrivals, (STORE, some))
        sizes = candidates(distances.working_set_tokens * per_token, share.block_size * per_token)
        return [
            (size, estimator.guess(size.dram_nbytes / per_token, size.nvme_nbytes / per_token))
            for size in sizes[-1 if only_last else 0 :]
        ]

    def _cost(self, size: Size) -> float:
        """Return what a size costs, for all engines."""
        return self._num_engines * self._plan.prices.of(size.dram_nbytes, size.nvme_nbytes)

    # -- policies ---------------------------------------------------------------------

    def _try_policies(self) -> None:
        """Play every replacement rule on the trace; replay the best one on the first data type's
        choice, if it hits clearly more than the search's own."""
        plan, search, num = self._plan, self._searches[0], self._num_engines
        if len(plan.policies) < 2:
            return
        distances = self._distances_of(num)
        chosen, _ = search.chosen()
        most = max(distances.working_set_tokens, distances.block_size)
        tokens = [most / 4**number for number in range(_NUM_PLAYED - 1, -1, -1)]
        at = None
        if chosen is not None and chosen.size.dram_nbytes:
            nbytes = chosen.size.dram_nbytes + chosen.size.nvme_nbytes
            at = min(most, nbytes / self._nbytes[search.kv_dtype])
            tokens = sorted({*tokens, at})
        jobs = [PolicyJob(num, self._longest, policy, tuple(tokens)) for policy in plan.policies]
        for job in jobs:
            curve = self._pool.result(job, jobs)
            if curve is None:
                self._complete = False
                return
            self._curves.append(curve)
            self._tell()
        if chosen is None or at is None:
            return
        hits = {curve.policy: curve.rates[tokens.index(at)] for curve in self._curves}
        best = max(hits, key=hits.__getitem__)
        if hits[best] <= _CLEARLY_MORE * hits[plan.policies[0]]:
            return
        found = self._pool.result(self._job(num, chosen.size, search.kv_dtype, best))
        if found is None:
            self._complete = False
        elif isinstance(found, Replay):
            search.add(f"policy {best}", best, chosen.size, found)
