"""The jobs of a sizing: a replay of tiers of one size, or one replacement rule played alone."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from kvtiers.model.errors import CapacityError
from kvtiers.simulate.arrivals import ArrivalPlan
from kvtiers.simulate.machine import MachinePlan
from kvtiers.simulate.policy_curves import PolicyCurve, policy_curve
from kvtiers.simulate.replay import Progress, ReplayPlan, replay
from kvtiers.simulate.replay_result import Replay
from kvtiers.simulate.share import Shares, servable
from kvtiers.simulate.sizes import Size


@dataclass(frozen=True, slots=True)
class TooSmall:
    """What a replay is answered with if a tier of the size does not hold one block."""

    why: str


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """Tiers of one size, replayed on the busiest of some engines that share the trace."""

    num_engines: int
    machine: MachinePlan
    size: Size
    policy: str
    arrivals: ArrivalPlan
    warmup: float

    @property
    def what(self) -> str:
        """In words."""
        many = f"{self.num_engines} engines, " if self.num_engines > 1 else ""
        return f"{many}{self.size}, {self.machine.kv_dtype}"

    @property
    def kind(self) -> Hashable:
        """Jobs of one kind take about equally long."""
        return self.num_engines, bool(self.size.dram_nbytes)

    def run(self, shares: Shares, progress: Progress) -> Replay | TooSmall:
        """Replay the busiest engine's share.

        Raises:
            CapacityError: the engine would not start. KeyboardInterrupt: it was ended early.
        """
        plan = ReplayPlan(
            trace=shares.of(self.num_engines),
            machine=self.machine,
            config=self.size.config(self.policy),
            label=self.what,
            arrivals=self.arrivals,
            warmup=self.warmup,
        )
        try:
            found = replay(plan, progress)
        except CapacityError as error:
            if not self.size.dram_nbytes:
                raise
            return TooSmall(str(error))
        if not found.complete:
            raise KeyboardInterrupt
        return found

    def __hash__(self) -> int:
        return hash((self.num_engines, self.machine.kv_dtype, self.size, self.policy))


@dataclass(frozen=True, slots=True)
class PolicyJob:
    """One replacement rule, played at some capacities without an engine.

    Attributes:
        longest: tokens of a request that an engine serves.
    """

    num_engines: int
    longest: int
    policy: str
    tokens: tuple[float, ...]

    @property
    def what(self) -> str:
        """In words."""
        return f"rule {self.policy}, {len(self.tokens)} sizes, no engine"

    @property
    def kind(self) -> Hashable:
        """Jobs of one kind take about equally long."""
        return "policy", self.num_engines

    def run(self, shares: Shares, progress: Progress) -> PolicyCurve:
        """Play the rule on the busiest engine's share."""
        share = servable(shares.of(self.num_engines), self.longest)
        return policy_curve(share, self.policy, self.tokens, progress)
