"""Finds tier sizes that meet a goal: many by a quick guess, few by a replay."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from kvtiers.model.errors import CapacityError, ConfigError
from kvtiers.simulate.arrivals import ArrivalPlan
from kvtiers.simulate.estimate import Estimator, Guess
from kvtiers.simulate.goal import Goal, GoalKind, Prices
from kvtiers.simulate.machine import MachinePlan
from kvtiers.simulate.replay import Progress, Replay, ReplayPlan, replay
from kvtiers.simulate.sizes import STORE, Size, candidates, frame_nbytes_per_token, minimal_yaml
from kvtiers.simulate.stack import Curve, StackDistances
from kvtiers.simulate.trace import Trace, infinite_hit_tokens

_MOST_TRIES: Final = 4  # replays of one data type, beside those of no tiers and of all there is


@dataclass(frozen=True, slots=True)
class SizingPlan:
    """What is asked.

    Attributes:
        kv_dtypes: data types of the KV cache to size for; the first is that of the engine now.
        policies: replacement rules to try, as in the configuration.
        max_seconds: of real time: no replay begins after that.
    """

    trace: Trace
    machine: MachinePlan
    goal: Goal
    prices: Prices = field(default_factory=Prices)
    kv_dtypes: tuple[str, ...] = ("bf16",)
    policies: tuple[str, ...] = ("lru",)
    arrivals: ArrivalPlan = field(default_factory=ArrivalPlan)
    warmup: float = 0.0
    max_seconds: float = 600.0

    def __post_init__(self) -> None:
        if not self.max_seconds >= 0:
            raise ConfigError(
                f"no replay begins after {self.max_seconds} seconds; must be at least 0"
            )


@dataclass(frozen=True, slots=True)
class Trial:
    """One size, replayed.

    Attributes:
        role: why it was tried. cost: by the plan's prices. met: whether the goal is.
    """

    role: str
    kv_dtype: str
    policy: str
    size: Size
    cost: float
    guess: Guess
    replay: Replay
    met: bool

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        plain = self.replay.to_plain()
        del plain["timeline"]
        names = ("role", "kv_dtype", "policy", "cost", "met")
        head = {name: getattr(self, name) for name in names}
        return {**head, "size": asdict(self.size), "guess": asdict(self.guess), "replay": plain}


@dataclass(frozen=True, slots=True)
class Sizing:
    """The answer.

    Attributes:
        nbytes_per_token: data type to bytes of a token's frames, which capacities are made of.
        guesses: data type to what was guessed of each size.
        chosen: data type to the cheapest trial that meets the goal; those without one are absent.
        limit: which limit binds, in words. yaml: of the engine's own data type; None: no size met
            the goal.
        complete: whether every replay that was wanted was made.
    """

    plan: SizingPlan
    curve: Curve
    infinite_hit_rate: float
    nbytes_per_token: dict[str, float]
    guesses: dict[str, list[tuple[Size, Guess]]]
    trials: list[Trial]
    chosen: dict[str, Trial]
    limit: str
    yaml: str | None
    complete: bool

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "ok": True,
            "trace": self.plan.trace.name,
            "title": self.plan.machine.title,
            "goal": str(self.plan.goal),
            "prices_per_gb": asdict(self.plan.prices),
            "complete": self.complete,
            "infinite_hit_rate": self.infinite_hit_rate,
            "curve": asdict(self.curve),
            "nbytes_per_token": self.nbytes_per_token,
            "guesses": {
                dtype: [{**asdict(size), **asdict(guess)} for size, guess in found]
                for dtype, found in self.guesses.items()
            },
            "trials": [trial.to_plain() for trial in self.trials],
            "chosen": {dtype: self.trials.index(trial) for dtype, trial in self.chosen.items()},
            "limit": self.limit,
            "yaml": self.yaml,
        }


def size_tiers(plan: SizingPlan, told: Callable[[str], Progress] | None = None) -> Sizing:
    """Find the sizes. A KeyboardInterrupt ends the replays; what was found until then counts.

    Args:
        told: makes what follows the progress of one replay, given what it is.

    Raises:
        CapacityError: the engine would not start. ConfigError: a name is not known.
    """
    return _Search(plan, told or (lambda _what: lambda _ended, _num: None)).run()


class _Search:
    """One search, while it runs."""

    def __init__(self, plan: SizingPlan, told: Callable[[str], Progress]) -> None:
        self._plan = plan
        self._told = told
        self._deadline = time.monotonic() + plan.max_seconds
        self._trials: list[Trial] = []
        self._guesses: dict[str, list[tuple[Size, Guess]]] = {}
        self._nbytes: dict[str, float] = {}
        self._chosen: dict[str, Trial] = {}
        self._complete = True
        self._longest_seconds = 0.0

    def run(self) -> Sizing:
        """Search for each data type; then try the other policies on the first one's size."""
        plan = self._plan
        for dtype in plan.kv_dtypes:  # before anything slow: what would not start is refused
            replace(plan.machine, kv_dtype=dtype).settings(plan.trace)
        for policy in plan.policies:
            _check_policy(policy)
        distances = StackDistances.of(plan.trace)
        try:
            for dtype in plan.kv_dtypes:
                self._search(dtype, distances)
            self._try_policies()
        except KeyboardInterrupt:
            self._complete = False
        first = plan.kv_dtypes[0]
        chosen = self._chosen.get(first)
        size = plan.trace.block_size
        infinite = infinite_hit_tokens(plan.trace.requests, size).rate
        config = None if chosen is None else chosen.size.config(chosen.policy)
        return Sizing(
            plan=plan,
            curve=Curve.of(distances),
            infinite_hit_rate=infinite,
            nbytes_per_token=self._nbytes,
            guesses=self._guesses,
            trials=self._trials,
            chosen=self._chosen,
            limit=self._limit(chosen, infinite),
            yaml=None if config is None else minimal_yaml(config),
            complete=self._complete,
        )

    def _limit(self, chosen: Trial | None, infinite_hit_rate: float) -> str:
        """Return which limit binds, in words."""
        mine = [trial for trial in self._trials if trial.kv_dtype == self._plan.kv_dtypes[0]]
        if len(mine) < 2:
            return "not known: it was stopped before the largest tiers were replayed"
        if chosen is not None:
            return _limit_of_chosen(chosen, mine[1].replay)
        if self._plan.goal.kind is GoalKind.COST:
            return "the money: it buys not even the smallest tiers considered"
        return _limit_of_all(mine[1].replay, infinite_hit_rate)

    # -- one data type ----------------------------------------------------------------

    def _search(self, dtype: str, distances: StackDistances) -> None:
        """Replay no tiers and the largest, then the cheapest that the guess believes in."""
        plan = self._plan
        machine = replace(plan.machine, kv_dtype=dtype)
        per_token = frame_nbytes_per_token(machine)
        self._nbytes[dtype] = per_token
        sizes = candidates(distances.working_set_tokens * per_token)
        some = Size(2**30, 2**30).config("lru")
        assert some is not None, "there is DRAM"
        estimator = Estimator(plan.trace, distances, machine, plan.arrivals, (STORE, some))
        guesses = [
            (size, estimator.guess(size.dram_nbytes / per_token, size.nvme_nbytes / per_token))
            for size in sizes
        ]
        self._guesses[dtype] = guesses
        nothing, most = guesses[0], guesses[-1]
        before = self._try("no tiers", machine, *nothing)
        if before is None:
            return
        ceiling = self._try("all that is reused in DRAM", machine, *most)
        if ceiling is None:
            return
        if plan.goal.kind is GoalKind.COST:
            self._spend(machine, guesses)
        elif ceiling.met and not before.met:
            self._narrow(machine, guesses, before, ceiling)
        met = [t for t in self._trials if t.kv_dtype == dtype and t.met]
        if met:
            best = min(met, key=lambda t: (t.cost, t.replay.ttft.p90 or 0.0))
            if plan.goal.kind is GoalKind.COST:
                best = min(met, key=lambda t: t.replay.ttft.p90 or 0.0)
            self._chosen[dtype] = best

    def _narrow(
        self,
        machine: MachinePlan,
        guesses: list[tuple[Size, Guess]],
        before: Trial,
        ceiling: Trial,
    ) -> None:
        """Replay the cheapest sizes that the guess believes in; then halve what lies between the
        dearest that failed and the cheapest that did."""
        prices = self._plan.prices
        by_cost = sorted(guesses[1:], key=lambda it: _cost(prices, it[0]))
        tried = {before.size, ceiling.size}
        demand, cheapest, dearest_failed = self._demand(before), _cost(prices, ceiling.size), 0.0
        most, num_tries = 2.0 * demand, 0
        while num_tries < _MOST_TRIES and demand <= most:
            hopeful = [
                it
                for it in by_cost
                if it[0] not in tried
                and dearest_failed <= _cost(prices, it[0]) < cheapest
                and self._hopeful(it[1], demand)
            ]
            if not hopeful:
                demand *= 1.15
                continue
            # The cheapest one first; then what halves the range between a failure and a success.
            wanted = hopeful[len(hopeful) // 2 if num_tries else 0]
            trial = self._try("cheapest that may do", machine, *wanted)
            if trial is None:
                return
            num_tries += 1
            tried.add(trial.size)
            if trial.met:
                cheapest = trial.cost
            else:
                dearest_failed = max(dearest_failed, trial.cost)
                demand *= 0.85

    def _demand(self, before: Trial) -> float:
        """Return the guess that would do, as far as one goes by the guess alone."""
        goal = self._plan.goal
        if goal.kind is GoalKind.HIT_RATE:
            return 1.0 / goal.value
        seconds = before.replay.ttft.p90 or 1.0
        limit = goal.limit_seconds(self._trials[0].replay.ttft.p90 or 1.0)
        assert limit is not None, "only goals of time and of hits are narrowed down"
        return before.guess.ttft_p90 * limit / seconds

    def _hopeful(self, guess: Guess, demand: float) -> bool:
        """Whether a guess is as good as demanded; a larger demand asks for less."""
        if self._plan.goal.kind is GoalKind.HIT_RATE:
            return guess.hit_rate * demand >= 1.0
        return guess.ttft_p90 <= demand

    def _spend(self, machine: MachinePlan, guesses: list[tuple[Size, Guess]]) -> None:
        """Replay the sizes within the budget whose guesses are best."""
        budget = self._plan.goal.value
        within = [it for it in guesses[1:] if _cost(self._plan.prices, it[0]) <= budget]
        for size, guess in sorted(within, key=lambda it: it[1].ttft_p90)[:2]:
            if self._try("best for the money", machine, size, guess) is None:
                return

    def _try_policies(self) -> None:
        """Replay the first data type's choice with the other replacement rules."""
        dtype = self._plan.kv_dtypes[0]
        chosen = self._chosen.get(dtype)
        if chosen is None or not chosen.size.dram_nbytes:
            return
        machine = replace(self._plan.machine, kv_dtype=dtype)
        for policy in self._plan.policies[1:]:
            trial = self._try(f"policy {policy}", machine, chosen.size, chosen.guess, policy)
            if trial is None:
                return
            ttft, best = trial.replay.ttft.p90, self._chosen[dtype].replay.ttft.p90
            if trial.met and ttft is not None and best is not None and ttft < best:
                self._chosen[dtype] = trial

    # -- one replay -------------------------------------------------------------------

    def _try(
        self,
        role: str,
        machine: MachinePlan,
        size: Size,
        guess: Guess,
        policy: str | None = None,
    ) -> Trial | None:
        """Replay a size; None where the time is up."""
        plan, left = self._plan, self._deadline - time.monotonic()
        if left <= self._longest_seconds and self._trials:
            self._complete = False
            return None
        rule = policy or plan.policies[0]
        started = time.monotonic()
        try:
            found = replay(
                ReplayPlan(
                    trace=plan.trace,
                    machine=machine,
                    config=size.config(rule),
                    label=f"{size}, {machine.kv_dtype}",
                    arrivals=plan.arrivals,
                    warmup=plan.warmup,
                ),
                self._told(f"{size}, {machine.kv_dtype}"),
            )
        except CapacityError:
            if not size.dram_nbytes:
                raise
            return None  # a tier that does not hold one block
        if not found.complete:
            raise KeyboardInterrupt
        self._longest_seconds = max(self._longest_seconds, time.monotonic() - started)
        bare = next(
            (t.replay.ttft.p90 for t in self._trials if not t.size.dram_nbytes), found.ttft.p90
        )
        cost = _cost(plan.prices, size)
        met = plan.goal.met(found.ttft.p90, found.tokens.hit_rate, bare)
        if plan.goal.kind is GoalKind.COST:
            met = cost <= plan.goal.value
        trial = Trial(role, machine.kv_dtype, rule, size, cost, guess, found, met)
        self._trials.append(trial)
        return trial


def _check_policy(policy: str) -> None:
    try:
        Size(2**30, 0).config(policy)
    except ConfigError as error:
        what = str(error).removeprefix("<inline>: policy.evict: ")
        raise ConfigError(f"replacement rule {what}") from error


def _limit_of_all(ceiling: Replay, infinite_hit_rate: float) -> str:
    """Return why not even the largest tiers meet the goal."""
    best = f"p90 TTFT {_ms(ceiling.ttft.p90)}, hit rate {ceiling.tokens.hit_rate:.1%}"
    if ceiling.tokens.hit_rate >= 0.8 * infinite_hit_rate:
        return (
            f"the trace: with all that is ever used again in DRAM it is {best}. A cache that "
            f"forgets nothing hits {infinite_hit_rate:.1%}; the rest is new and has to be "
            "computed: faster or more devices, or slower arrivals (--speed), would help"
        )
    return (
        f"the links: with all that is ever used again in DRAM it is {best}, though "
        f"{infinite_hit_rate:.1%} were seen before"
    )


def _limit_of_chosen(chosen: Trial, ceiling: Replay) -> str:
    """Return what keeps the chosen size from being better."""
    if not chosen.size.dram_nbytes:
        return "none: the goal is met without tiers"
    hit_rate = chosen.replay.tokens.hit_rate
    if chosen.guess.hit_rate - hit_rate > 0.2 * chosen.guess.hit_rate:
        return (
            f"bandwidth: tiers of this size could hit {chosen.guess.hit_rate:.1%}, "
            f"{hit_rate:.1%} were worth loading or came in time"
        )
    if hit_rate > 0.95 * ceiling.tokens.hit_rate:
        return "none of the tiers: they hit nearly all that can be hit; only the device is left"
    return "capacity: larger tiers would hit more, and the links would keep up"


def _cost(prices: Prices, size: Size) -> float:
    return prices.of(size.dram_nbytes, size.nvme_nbytes)


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:,.0f} ms"
