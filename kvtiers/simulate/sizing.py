"""The question of how large tiers must be to meet a goal, and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtiers.cost.capacity import KVPool
from kvtiers.model.errors import ConfigError
from kvtiers.simulate.arrivals import ArrivalPlan
from kvtiers.simulate.estimate import Guess
from kvtiers.simulate.goal import Goal, Prices
from kvtiers.simulate.machine import MachinePlan
from kvtiers.simulate.policy_curves import PolicyCurve
from kvtiers.simulate.replay_result import Replay
from kvtiers.simulate.sizes import Size
from kvtiers.simulate.stack import Curve
from kvtiers.simulate.trace import Trace


@dataclass(frozen=True, slots=True)
class SizingPlan:
    """What `kvtiers size` is asked.

    Attributes:
        kv_dtypes: data types of the KV cache to size for; the first is that of the engine now.
        policies: replacement rules to try, as in the configuration; the search uses the first.
        num_engines: that share the trace; None: the fewest that keep up with it without tiers.
        max_seconds: of real time: no replay begins after that.
        num_jobs: replays at a time, each in a process of its own; 1: in this one.
    """

    trace: Trace
    machine: MachinePlan
    goal: Goal
    prices: Prices = field(default_factory=Prices)
    kv_dtypes: tuple[str, ...] = ("bf16",)
    policies: tuple[str, ...] = ("lru",)
    arrivals: ArrivalPlan = field(default_factory=ArrivalPlan)
    warmup: float = 0.0
    num_engines: int | None = 1
    max_seconds: float = 1200.0
    num_jobs: int = 1

    def __post_init__(self) -> None:
        if self.num_jobs < 1:
            raise ConfigError(f"{self.num_jobs} replays at a time; must be at least 1")
        if not self.max_seconds >= 0:
            raise ConfigError(
                f"no replay begins after {self.max_seconds} seconds; must be at least 0"
            )
        for policy in self.policies:
            try:
                Size(2**30, 0).config(policy)
            except ConfigError as error:
                what = str(error).removeprefix("<inline>: policy.evict: ")
                raise ConfigError(f"replacement rule {what}") from error


@dataclass(frozen=True, slots=True)
class Trial:
    """One size, replayed.

    Attributes:
        role: why it was tried. cost: of all engines, by the plan's prices.
        met: whether it meets the goal.
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
class Proof:
    """Why no other size of one data type is the answer.

    Attributes:
        num_sizes: that were considered. num_replayed: of them.
        num_dearer: not replayed, for they cost as much as the answer, or more.
        num_smaller: not replayed, for they are no larger in either tier than one that failed.
        num_too_small: of all, that were found not to hold one block.
        undecided: neither; the cheapest first. Empty unless time was up.
    """

    num_sizes: int
    num_replayed: int
    num_dearer: int
    num_smaller: int
    num_too_small: int
    undecided: tuple[tuple[Size, float], ...]


@dataclass(frozen=True, slots=True)
class EngineTry:
    """A number of engines, one of which was replayed: whether they keep up.

    Attributes:
        size: of the tiers of each. load: see `Replay.load`.
        wait_p90: seconds from arrival to admission. ttft_p90: in seconds; None: none was served.
    """

    num_engines: int
    size: Size
    keeps_up: bool
    load: float
    wait_p90: float | None
    ttft_p90: float | None

    @classmethod
    def of(cls, num_engines: int, size: Size, found: Replay, *, paced: bool = False) -> EngineTry:
        """Return what a replay says; `paced`: the loop is closed, and engines keep up."""
        keeps_up = paced or found.keeps_up
        return cls(num_engines, size, keeps_up, found.load, found.wait.p90, found.ttft.p90)

    def meets(self, limit_seconds: float | None) -> bool:
        """Whether the p90 TTFT is within a limit, if there is one."""
        within = self.ttft_p90 is not None and limit_seconds is not None
        return within and self.ttft_p90 <= limit_seconds  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Sizing:
    """The answer; sizes are those of one engine.

    Attributes:
        share: of the trace, that of the engine which is replayed.
        engines: numbers of engines that were tried, one after another.
        pools: data type to an engine's KV pool.
        nbytes_per_token: data type to bytes of a token's frames, which capacities are made of.
        guesses: data type to what was guessed of each size.
        chosen: data type to the cheapest trial that meets the goal; those without one are absent.
        nearest: data type to the cheapest trial that brings most of what tiers can bring, where
            no size meets the goal, and tiers bring something.
        proofs: data type to why it is that one.
        limit: which limit binds, in words.
        yaml: of the engine's own data type, chosen or nearest; None: neither, or no tiers needed.
        decided: whether it is known that the goal is met, or that no size meets it.
        complete: whether every replay that was wanted was made. interrupted: if not, by the user.
        larger: numbers of engines that were tried because no size meets the goal with this many.
        more: the answer for the number that meets it, and for the data types that need it; None:
            it was not asked for, or none does.
    """

    plan: SizingPlan
    num_engines: int
    share: Trace
    engines: Sequence[EngineTry]
    pools: dict[str, KVPool]
    curve: Curve
    policy_curves: Sequence[PolicyCurve]
    infinite_hit_rate: float
    nbytes_per_token: dict[str, float]
    guesses: dict[str, list[tuple[Size, Guess]]]
    trials: Sequence[Trial]
    chosen: dict[str, Trial]
    nearest: dict[str, Trial]
    proofs: dict[str, Proof]
    limit: str
    yaml: str | None
    decided: bool
    complete: bool
    interrupted: bool
    larger: Sequence[EngineTry] = ()
    more: Sizing | None = None

    @property
    def met(self) -> bool:
        """Whether there is an answer that meets the goal, for the engine's own data type; where
        there is none, `final.decided` says whether there can be one."""
        return self.final.plan.kv_dtypes[0] in self.final.chosen

    @property
    def final(self) -> Sizing:
        """This answer, or that for more engines where only they meet the goal."""
        return self if self.more is None else self.more

    @property
    def limit_seconds(self) -> float | None:
        """The p90 TTFT that the goal allows; None: it is no time, or not known."""
        bare = self.bare(self.plan.kv_dtypes[0])
        return self.plan.goal.limit_seconds(None if bare is None else bare.replay.ttft.p90)

    def answer(self, kv_dtype: str) -> Trial | None:
        """Return the trial that was chosen, or else comes nearest; None: there is none."""
        return self.chosen.get(kv_dtype) or self.nearest.get(kv_dtype)

    def bare(self, kv_dtype: str) -> Trial | None:
        """Return the trial without tiers; None: it was not made."""
        mine = (t for t in self.trials if t.kv_dtype == kv_dtype and not t.size.dram_nbytes)
        return next(mine, None)

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "ok": True,
            "trace": self.plan.trace.name,
            "title": self.plan.machine.title,
            "goal": str(self.plan.goal),
            "prices_per_gb": asdict(self.plan.prices),
            "complete": self.complete,
            "interrupted": self.interrupted,
            "block_size": self.share.block_size,
            "num_engines": self.num_engines,
            "num_requests": {"trace": len(self.plan.trace.requests), "share": self.num_requests},
            "engines": [asdict(it) for it in self.engines],
            "pools": {
                dtype: {"nbytes": pool.nbytes, "num_tokens": pool.num_tokens}
                for dtype, pool in self.pools.items()
            },
            "infinite_hit_rate": self.infinite_hit_rate,
            "curve": asdict(self.curve),
            "policy_curves": [asdict(it) for it in self.policy_curves],
            "nbytes_per_token": self.nbytes_per_token,
            "guesses": {
                dtype: [{**asdict(size), **asdict(guess)} for size, guess in found]
                for dtype, found in self.guesses.items()
            },
            "trials": [trial.to_plain() for trial in self.trials],
            "goal_met": self.met if self.final.decided else None,
            "chosen": {d: list(self.trials).index(trial) for d, trial in self.chosen.items()},
            "nearest": {d: list(self.trials).index(trial) for d, trial in self.nearest.items()},
            "proofs": {dtype: asdict(proof) for dtype, proof in self.proofs.items()},
            "limit": self.limit,
            "yaml": self.yaml,
            "larger": [asdict(it) for it in self.larger],
            "more": None if self.more is None else self.more.to_plain(),
        }

    @property
    def num_requests(self) -> int:
        """Requests of the share."""
        return len(self.share.requests)
