"""Finds tier sizes that meet a goal: which ones, by bounds; whether they do, by a replay."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from kvtiers.cost.capacity import KVPool
from kvtiers.simulate.dtype_search import DtypeSearch
from kvtiers.simulate.engine_count import settle_engines, try_fewer_engines
from kvtiers.simulate.estimate import Estimator, Guess
from kvtiers.simulate.machine import MachinePlan
from kvtiers.simulate.policy_curves import PolicyCurve
from kvtiers.simulate.replay import Replay
from kvtiers.simulate.replay_job import PolicyJob, ReplayJob
from kvtiers.simulate.replay_pool import ReplayPool, Told
from kvtiers.simulate.share import Shares
from kvtiers.simulate.sizes import STORE, Size, candidates, frame_nbytes_per_token, minimal_yaml
from kvtiers.simulate.sizing import EngineTry, Sizing, SizingPlan, Trial
from kvtiers.simulate.sizing_limit import limit_in_words
from kvtiers.simulate.stack import Curve, StackDistances
from kvtiers.simulate.trace import infinite_hit_tokens

_NUM_PLAYED: Final = 5  # capacities at which replacement rules are compared
_CLEARLY_MORE: Final = 1.02  # hits, for which another replacement rule is worth a replay


def size_tiers(plan: SizingPlan, told: Told | None = None) -> Sizing:
    """Find the sizes. A KeyboardInterrupt ends the replays; what was found until then counts.

    Args:
        told: makes what follows the progress of one replay, given what it is.

    Raises:
        CapacityError: the engine would not start. ConfigError: a name is not known.
        WorkerError: a process that replayed died.
    """
    return _Run(plan, told or (lambda _what: lambda _ended, _num: None)).run()


class _Run:
    """One search, while it runs."""

    def __init__(self, plan: SizingPlan, told: Told) -> None:
        self._plan = plan
        self._shares = Shares(plan.trace)
        deadline = time.monotonic() + plan.max_seconds
        self._pool = ReplayPool(self._shares, plan.num_jobs, deadline, told)
        self._num_engines = plan.num_engines or 1
        self._engines: list[EngineTry] = []
        self._distances: dict[int, StackDistances] = {}
        self._searches: list[DtypeSearch] = []
        self._guesses: dict[str, list[tuple[Size, Guess]]] = {}
        self._pools: dict[str, KVPool] = {}
        self._nbytes: dict[str, float] = {}
        self._curves: list[PolicyCurve] = []
        self._complete = True
        self._interrupted = False

    def run(self) -> Sizing:
        """Settle on the engines, search for each data type; then try the other policies."""
        plan = self._plan
        for dtype in plan.kv_dtypes:  # before anything slow: what would not start is refused
            machine = self._machine(dtype)
            machine.settings(plan.trace)
            self._pools[dtype] = machine.memory().pool
            self._nbytes[dtype] = frame_nbytes_per_token(machine)
        try:
            if plan.num_engines is None:
                self._num_engines = settle_engines(plan, self._pool, self._job, self._engines)
            self._prepare()
            if plan.num_engines is None:
                self._try_fewer_engines()
            self._search()
            self._try_policies()
        except KeyboardInterrupt:
            self._complete, self._interrupted = False, True
        finally:
            self._pool.close()
        return self._answer()

    def _answer(self) -> Sizing:
        plan, first = self._plan, self._plan.kv_dtypes[0]
        chosen: dict[str, Trial] = {}
        nearest: dict[str, Trial] = {}
        for search in self._searches:
            best, met = search.chosen()
            if best is not None:
                (chosen if met else nearest)[search.kv_dtype] = best
        share = self._shares.of(self._num_engines)
        infinite = infinite_hit_tokens(share.requests, share.block_size).rate
        answer = chosen.get(first) or nearest.get(first)
        config = None if answer is None else answer.size.config(answer.policy)
        mine = self._searches[0].trials if self._searches else []
        return Sizing(
            plan=plan,
            num_engines=self._num_engines,
            share=share,
            engines=self._engines,
            pools=self._pools,
            curve=Curve.of(self._distances_of(self._num_engines), self._pools[first].num_tokens),
            policy_curves=self._curves,
            infinite_hit_rate=infinite,
            nbytes_per_token=self._nbytes,
            guesses=self._guesses,
            trials=[trial for search in self._searches for trial in search.trials],
            chosen=chosen,
            nearest=nearest,
            proofs={search.kv_dtype: search.proof() for search in self._searches},
            limit=limit_in_words(plan.goal, mine, chosen.get(first), infinite),
            yaml=None if config is None else minimal_yaml(config),
            complete=self._complete,
            interrupted=self._interrupted,
        )

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
        return replace(self._plan.machine, kv_dtype=dtype)

    def _distances_of(self, num_engines: int) -> StackDistances:
        if num_engines not in self._distances:
            self._distances[num_engines] = StackDistances.of(self._shares.of(num_engines))
        return self._distances[num_engines]

    # -- how many engines -------------------------------------------------------------

    def _try_fewer_engines(self) -> None:
        """Replay one engine fewer with all that is reused in DRAM: do tiers spare an engine?"""
        num = self._num_engines
        if num == 1 or not self._engines[-1].keeps_up:
            return
        working_set = self._distances_of(num - 1).working_set_tokens
        every = candidates(working_set * self._nbytes[self._plan.kv_dtypes[0]])[-1]
        likely = [self._job(num, size, s.kv_dtype) for s in self._searches for size in s.ends]
        self._complete &= try_fewer_engines(
            self._pool, self._job(num - 1, every), likely, self._engines
        )

    # -- sizes ------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Guess for every size that is considered, and make the searches ready."""
        plan, distances = self._plan, self._distances_of(self._num_engines)
        earlier = None
        for dtype in plan.kv_dtypes:
            guesses = self._guess_all(self._machine(dtype), distances)
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

    def _guess_all(
        self, machine: MachinePlan, distances: StackDistances
    ) -> list[tuple[Size, Guess]]:
        """Guess for every size that is considered: none first, the largest last."""
        per_token = self._nbytes[machine.kv_dtype]
        some = Size(2**30, 2**30).config("lru")
        assert some is not None, "there is DRAM"
        share = self._shares.of(self._num_engines)
        estimator = Estimator(share, distances, machine, self._plan.arrivals, (STORE, some))
        return [
            (size, estimator.guess(size.dram_nbytes / per_token, size.nvme_nbytes / per_token))
            for size in candidates(distances.working_set_tokens * per_token)
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
        jobs = [PolicyJob(num, policy, tuple(tokens)) for policy in plan.policies]
        for job in jobs:
            curve = self._pool.result(job, jobs)
            if curve is None:
                self._complete = False
                return
            self._curves.append(curve)
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
