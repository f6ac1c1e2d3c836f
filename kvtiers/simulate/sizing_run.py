"""Finds tier sizes that meet a goal: which ones, by bounds; whether they do, by a replay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvtiers.cost.capacity import KVPool
from kvtiers.model.errors import CapacityError
from kvtiers.simulate.estimate import Estimator, Guess
from kvtiers.simulate.frontier import Frontier, largest
from kvtiers.simulate.goal import Goal, GoalKind
from kvtiers.simulate.machine import MachinePlan
from kvtiers.simulate.policy_curves import PolicyCurve, policy_curves
from kvtiers.simulate.replay import Progress, Replay, ReplayPlan, replay
from kvtiers.simulate.share import busiest_share
from kvtiers.simulate.sizes import STORE, Size, candidates, frame_nbytes_per_token, minimal_yaml
from kvtiers.simulate.sizing import EngineTry, Proof, Sizing, SizingPlan, Trial
from kvtiers.simulate.sizing_limit import limit_in_words
from kvtiers.simulate.stack import Curve, StackDistances
from kvtiers.simulate.trace import infinite_hit_tokens

_MOST_ENGINES: Final = 1024
_MOST_NUMBERS: Final = 8  # of engines that are tried
_NUM_PLAYED: Final = 5  # capacities at which replacement rules are compared
_CLEARLY_MORE: Final = 1.02  # hits, for which another replacement rule is worth a replay

_NEARLY: Final = 0.9  # of what tiers can bring, where that is less than the goal
_WORTHWHILE: Final = 0.02  # of what is without tiers, below which they are not worth a search
_CEILING: Final = "all that is reused in DRAM"

Told = Callable[[str], Progress]


def size_tiers(plan: SizingPlan, told: Told | None = None) -> Sizing:
    """Find the sizes. A KeyboardInterrupt ends the replays; what was found until then counts.

    Args:
        told: makes what follows the progress of one replay, given what it is.

    Raises:
        CapacityError: the engine would not start. ConfigError: a name is not known.
    """
    return _Run(plan, told or (lambda _what: lambda _ended, _num: None)).run()


class _Run:
    """One search, while it runs."""

    def __init__(self, plan: SizingPlan, told: Told) -> None:
        self._plan = plan
        self._told = told
        self._deadline = time.monotonic() + plan.max_seconds
        self._longest_seconds = 0.0
        self._num_engines = plan.num_engines or 1
        self._share = busiest_share(plan.trace, self._num_engines)
        self._engines: list[EngineTry] = []
        self._alone: Replay | None = None  # the engines that were settled on, without tiers
        self._trials: list[Trial] = []
        self._guesses: dict[str, list[tuple[Size, Guess]]] = {}
        self._pools: dict[str, KVPool] = {}
        self._nbytes: dict[str, float] = {}
        self._chosen: dict[str, Trial] = {}
        self._nearest: dict[str, Trial] = {}
        self._nearly: Goal | None = None  # what takes the place of a goal that no size meets
        self._proofs: dict[str, Proof] = {}
        self._curves: list[PolicyCurve] = []
        self._complete = True
        self._interrupted = False

    def run(self) -> Sizing:
        """Settle on the engines, search for each data type; then try the other policies."""
        plan = self._plan
        for dtype in plan.kv_dtypes:  # before anything slow: what would not start is refused
            machine = replace(plan.machine, kv_dtype=dtype)
            machine.settings(plan.trace)
            self._pools[dtype] = machine.memory().pool
            self._nbytes[dtype] = frame_nbytes_per_token(machine)
        distances: StackDistances | None = None
        try:
            if plan.num_engines is None:
                self._settle_engines()
                self._try_fewer_engines()
            distances = StackDistances.of(self._share)
            for dtype in plan.kv_dtypes:
                self._search(dtype, distances)
            self._try_policies(distances)
        except KeyboardInterrupt:
            self._complete, self._interrupted = False, True
        return self._answer(distances or StackDistances.of(self._share))

    def _answer(self, distances: StackDistances) -> Sizing:
        plan, first = self._plan, self._plan.kv_dtypes[0]
        chosen = self._chosen.get(first)
        infinite = infinite_hit_tokens(self._share.requests, self._share.block_size).rate
        answer = chosen or self._nearest.get(first)
        config = None if answer is None else answer.size.config(answer.policy)
        mine = [trial for trial in self._trials if trial.kv_dtype == first]
        return Sizing(
            plan=plan,
            num_engines=self._num_engines,
            share=self._share,
            engines=self._engines,
            pools=self._pools,
            curve=Curve.of(distances, self._pools[first].num_tokens),
            policy_curves=self._curves,
            infinite_hit_rate=infinite,
            nbytes_per_token=self._nbytes,
            guesses=self._guesses,
            trials=self._trials,
            chosen=self._chosen,
            nearest=self._nearest,
            proofs=self._proofs,
            limit=limit_in_words(plan.goal, mine, chosen, infinite),
            yaml=None if config is None else minimal_yaml(config),
            complete=self._complete,
            interrupted=self._interrupted,
        )

    # -- how many engines -------------------------------------------------------------

    def _settle_engines(self) -> None:
        """Replay more and more engines without tiers, until they keep up.

        One engine that falls behind is never idle, so that its load says how many are needed at
        least.
        """
        plan, num = self._plan, 1
        most = min(_MOST_ENGINES, len(plan.trace.requests))
        while True:
            self._num_engines, self._share = num, busiest_share(plan.trace, num)
            self._alone, self._longest_seconds = None, 0.0
            if self._engines and self._time_is_up():
                return
            found = self._replay(plan.machine, Size(0, 0), plan.policies[0])
            self._alone = found
            keeps_up = found.keeps_up or plan.arrivals.concurrency is not None
            self._engines.append(EngineTry(num, Size(0, 0), keeps_up, found.load, found.ttft.p90))
            if keeps_up or num == most or len(self._engines) == _MOST_NUMBERS:
                return
            num = min(most, max(num + 1, math.ceil(0.9 * num * found.load)))

    def _try_fewer_engines(self) -> None:
        """Replay one engine fewer with all that is reused in DRAM: do tiers spare an engine?"""
        plan, (num, share) = self._plan, (self._num_engines, self._share)
        if num == 1 or not self._engines[-1].keeps_up or self._time_is_up():
            return
        self._num_engines, self._share = num - 1, busiest_share(plan.trace, num - 1)
        try:
            working_set = StackDistances.of(self._share).working_set_tokens
            every = candidates(working_set * self._nbytes[plan.kv_dtypes[0]])[-1]
            found = self._replay(plan.machine, every, plan.policies[0])
            rest = found.keeps_up, found.load, found.ttft.p90
            self._engines.append(EngineTry(num - 1, every, *rest))
        finally:
            self._num_engines, self._share = num, share
            self._longest_seconds = 0.0

    # -- one data type ----------------------------------------------------------------

    def _search(self, dtype: str, distances: StackDistances) -> None:
        """Replay no tiers and the largest; then those that the bounds leave undecided."""
        plan = self._plan
        machine = replace(plan.machine, kv_dtype=dtype)
        guesses = self._guess_all(machine, distances)
        self._guesses[dtype] = guesses
        of = dict(guesses)
        costs = {size: self._cost(size) for size in of}

        by_hits = plan.goal.kind is GoalKind.HIT_RATE
        frontier = Frontier(costs, {s: -g.hit_rate if by_hits else g.ttft_p90 for s, g in guesses})
        within = largest([size for size, cost in costs.items() if cost <= plan.goal.value])
        within.sort(key=lambda size: of[size].ttft_p90)
        undecided: list[Size] = []
        before, self._nearly = self._nearly, None

        def meets(size: Size) -> bool | None:
            return self._try("undecided until then", machine, size, of[size])

        try:
            nothing, ceiling = guesses[0], guesses[-1]
            for role, (size, guess) in (("no tiers", nothing), (_CEILING, ceiling)):
                undecided = list(costs)
                met = self._try(role, machine, size, guess)
                if met is None:
                    return
                frontier.told(size, met)
            if plan.goal.kind is GoalKind.COST:
                undecided = [size for size in within if size not in {nothing[0], ceiling[0]}]
                while undecided and meets(undecided[0]) is not None:
                    del undecided[0]
                return
            # What lies between both is decided by replays.
            undecided = []
            if frontier.best is None:  # not even the ceiling does
                self._settle_for_less(dtype, before)
                frontier = Frontier(costs, frontier.ranks)
                for trial in self._trials:
                    if trial.kv_dtype == dtype:
                        frontier.told(trial.size, self._will_do(trial))
            if frontier.best is not None:
                try:
                    frontier.search(meets)
                finally:
                    undecided = frontier.undecided
        finally:
            self._choose(dtype, costs, undecided)

    def _guess_all(
        self, machine: MachinePlan, distances: StackDistances
    ) -> list[tuple[Size, Guess]]:
        """Guess for every size that is considered: none first, the largest last."""
        per_token = self._nbytes[machine.kv_dtype]
        some = Size(2**30, 2**30).config("lru")
        assert some is not None, "there is DRAM"
        estimator = Estimator(self._share, distances, machine, self._plan.arrivals, (STORE, some))
        return [
            (size, estimator.guess(size.dram_nbytes / per_token, size.nvme_nbytes / per_token))
            for size in candidates(distances.working_set_tokens * per_token)
        ]

    def _settle_for_less(self, dtype: str, earlier: Goal | None) -> None:
        """Set a goal that can be met: most of what the largest tiers bring.

        Args:
            earlier: of the data type before; the same one, if it can be, lets both be compared.
        """
        bare, ceiling = (t.replay for t in self._trials if t.kv_dtype == dtype)
        if earlier is not None and self._reaches(earlier, ceiling):
            self._nearly = earlier
            return
        if self._plan.goal.kind is GoalKind.HIT_RATE:
            before, after = bare.tokens.hit_rate, ceiling.tokens.hit_rate
            gained = after - before > _WORTHWHILE * after
        else:
            before, after = bare.ttft.p90 or 0.0, ceiling.ttft.p90 or 0.0
            gained = before - after > _WORTHWHILE * before
        value = before + _NEARLY * (after - before)
        self._nearly = Goal(self._plan.goal.kind, value) if gained else None

    def _will_do(self, trial: Trial) -> bool:
        """Whether a trial meets the goal, or what took its place."""
        return trial.met or (self._nearly is not None and self._reaches(self._nearly, trial.replay))

    def _reaches(self, goal: Goal, found: Replay) -> bool:
        return goal.met(found.ttft.p90, found.tokens.hit_rate, None)

    def _choose(self, dtype: str, costs: dict[Size, float], undecided: list[Size]) -> None:
        """Choose among what met the goal, or else comes close; note why."""
        by_money = self._plan.goal.kind is GoalKind.COST
        mine = [trial for trial in self._trials if trial.kv_dtype == dtype]
        met = [trial for trial in mine if trial.met]
        close = met or [trial for trial in mine if self._will_do(trial)]
        bound = math.inf
        if close:
            best = min(close, key=lambda t: (0.0 if by_money else t.cost, _ttft_p90(t)))
            (self._chosen if met else self._nearest)[dtype] = best
            bound = best.cost
        if by_money:
            bound = self._plan.goal.value
        tried = {trial.size for trial in mine}
        undecided = sorted(set(undecided) - tried, key=costs.__getitem__)
        left = set(costs) - tried - set(undecided)
        dearer = sum(costs[size] >= bound for size in left)
        self._proofs[dtype] = Proof(
            len(costs),
            len(mine),
            dearer,
            len(left) - dearer,
            tuple((size, costs[size]) for size in undecided),
        )

    # -- policies ---------------------------------------------------------------------

    def _try_policies(self, distances: StackDistances) -> None:
        """Play every replacement rule on the trace; replay those that hit clearly more than the
        search's own, on the first data type's choice."""
        plan, dtype = self._plan, self._plan.kv_dtypes[0]
        chosen = self._chosen.get(dtype) or self._nearest.get(dtype)
        if len(plan.policies) < 2:
            return
        most = max(distances.working_set_tokens, distances.block_size)
        tokens = [most / 4**number for number in range(_NUM_PLAYED - 1, -1, -1)]
        if chosen is not None and chosen.size.dram_nbytes:
            size = (chosen.size.dram_nbytes + chosen.size.nvme_nbytes) / self._nbytes[dtype]
            tokens = sorted({*tokens, min(most, size)})
        told = self._told("replacement rules, without an engine")
        self._curves = policy_curves(self._share, plan.policies, tokens, self._deadline, told)
        self._complete &= len(self._curves) == len(plan.policies)
        if chosen is None or not chosen.size.dram_nbytes:
            return
        at = tokens.index(min(most, size))
        hits = {curve.policy: curve.rates[at] for curve in self._curves}
        machine = replace(plan.machine, kv_dtype=dtype)
        for policy in sorted(hits, key=hits.__getitem__, reverse=True):
            if hits[policy] <= _CLEARLY_MORE * hits[plan.policies[0]]:
                return
            done = self._try(f"policy {policy}", machine, chosen.size, chosen.guess, policy)
            if done is None:
                return
            trial, met = self._trials[-1], self._trials[-1].met
            if trial.policy == policy and _ttft_p90(trial) < _ttft_p90(chosen):
                if met:
                    self._chosen[dtype] = trial
                elif dtype in self._nearest:
                    self._nearest[dtype] = trial
            return  # the best one is enough

    # -- one replay -------------------------------------------------------------------

    def _try(
        self,
        role: str,
        machine: MachinePlan,
        size: Size,
        guess: Guess,
        policy: str | None = None,
    ) -> bool | None:
        """Replay a size; returns whether it will do, None where the time is up."""
        plan, found, rule = self._plan, self._alone, policy or self._plan.policies[0]
        if found is None or size.dram_nbytes or machine.kv_dtype != plan.kv_dtypes[0]:
            if self._trials and self._time_is_up():
                return None
            try:
                found = self._replay(machine, size, rule)
            except CapacityError:
                if not size.dram_nbytes:
                    raise
                return False  # a tier that does not hold one block
        bare = self._trials[0].replay.ttft.p90 if self._trials else found.ttft.p90
        cost = self._cost(size)
        met = plan.goal.met(found.ttft.p90, found.tokens.hit_rate, bare)
        if plan.goal.kind is GoalKind.COST:
            met = cost <= plan.goal.value
        trial = Trial(role, machine.kv_dtype, rule, size, cost, guess, found, met)
        self._trials.append(trial)
        return self._will_do(trial)

    def _time_is_up(self) -> bool:
        """Whether there is no time for another replay; notes it."""
        if self._deadline - time.monotonic() > self._longest_seconds:
            return False
        self._complete = False
        return True

    def _replay(self, machine: MachinePlan, size: Size, policy: str) -> Replay:
        plan, started = self._plan, time.monotonic()
        many = f"{self._num_engines} engines, " if self._num_engines > 1 else ""
        what = f"{many}{size}, {machine.kv_dtype}"
        found = replay(
            ReplayPlan(
                trace=self._share,
                machine=machine,
                config=size.config(policy),
                label=what,
                arrivals=plan.arrivals,
                warmup=plan.warmup,
            ),
            self._told(what),
        )
        if not found.complete:
            raise KeyboardInterrupt
        self._longest_seconds = max(self._longest_seconds, time.monotonic() - started)
        return found

    def _cost(self, size: Size) -> float:
        """Return what a size costs, for all engines."""
        return self._num_engines * self._plan.prices.of(size.dram_nbytes, size.nvme_nbytes)


def _ttft_p90(trial: Trial) -> float:
    found = trial.replay.ttft.p90
    return math.inf if found is None else found
