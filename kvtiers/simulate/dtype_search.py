"""The search for the cheapest tiers of one KV data type, one replay at a time."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Final

from kvtiers.simulate.estimate import Guess
from kvtiers.simulate.frontier import Frontier, largest
from kvtiers.simulate.goal import Goal, GoalKind
from kvtiers.simulate.replay_job import TooSmall
from kvtiers.simulate.replay_result import Replay
from kvtiers.simulate.sizes import Size
from kvtiers.simulate.sizing import Proof, SizingPlan, Trial

_NEARLY: Final = 0.9  # share of what tiers can bring that is searched for, if none meets the goal
_WORTHWHILE: Final = 0.02  # relative gain of the largest tiers that makes a search worthwhile
_MOST_AHEAD: Final = 4  # sizes that are named before it is known whether they are wanted
_USUAL: Final = 5  # replays between no tiers and the largest, for all that is known before
_NO_TIERS: Final = "no tiers"
_CEILING: Final = "all that is reused in DRAM"
_BETWEEN: Final = "undecided until then"

_Steps = Generator[tuple[str, Size], Replay | TooSmall, None]


class DtypeSearch:
    """One search: no tiers and the largest ones first, then the sizes that these leave undecided.

    The caller replays `wanted`, and tells the search with `told`, until `wanted` is None.

    Args:
        guesses: of every size that is considered: no tiers first, the largest last.
        costs: of each. earlier: the search for the plan's first data type; None if this is it.

    Attributes:
        trials: what was replayed. wanted: the size to replay next; None: the search is over.
        nearly: the goal that is searched for instead of one that no size meets; else None.
        too_small: sizes of which a tier does not hold one block.
        ends_known: whether no tiers and the largest were replayed.
    """

    def __init__(
        self,
        plan: SizingPlan,
        kv_dtype: str,
        guesses: Sequence[tuple[Size, Guess]],
        costs: dict[Size, float],
        earlier: DtypeSearch | None,
    ) -> None:
        self.kv_dtype = kv_dtype
        self.trials: list[Trial] = []
        self.nearly: Goal | None = None
        self.too_small: dict[Size, TooSmall] = {}
        self.ends_known = False
        self._plan = plan
        self._guesses = dict(guesses)
        self._costs = costs
        self._earlier = earlier
        self._frontier: Frontier | None = None
        self._undecided = list(costs)
        self._steps = self._search()
        self.wanted: Size | None
        _, self.wanted = next(self._steps)

    @property
    def may_go_on(self) -> bool:
        """Whether the next size may be replayed: goals are relative to the earlier search."""
        return self.wanted is not None and (self._earlier is None or self._earlier.ends_known)

    @property
    def ahead(self) -> list[Size]:
        """Sizes that may be wanted soon, the most likely first."""
        if self.wanted is None:
            return []
        if self._frontier is None:
            return [self.wanted, self.ends[1]]
        return [self.wanted, *self._frontier.ahead(self.wanted, _MOST_AHEAD)]

    @property
    def ends(self) -> tuple[Size, Size]:
        """No tiers, and the largest."""
        sizes = list(self._guesses)
        return sizes[0], sizes[-1]

    @property
    def num_expected(self) -> int:
        """How many more replays the search is likely to take, as far as is known."""
        if self.wanted is None:
            return 0
        if self._frontier is None:
            return sum(size not in self._noted for size in self.ends) + _USUAL
        return self._frontier.num_expected()

    def told(self, found: Replay | TooSmall) -> None:
        """Take in the replay of the wanted size."""
        try:
            _, self.wanted = self._steps.send(found)
        except StopIteration:
            self.wanted = None

    def chosen(self) -> tuple[Trial | None, bool]:
        """Return the cheapest trial that meets the goal, or else `nearly`; and whether it meets it.

        For a goal of cost it is the one with the least p90 TTFT.
        """
        by_money = self._plan.goal.kind is GoalKind.COST
        met = [trial for trial in self.trials if trial.met]
        close = met or [trial for trial in self.trials if self._will_do(trial)]
        best = min(close, key=lambda t: (0.0 if by_money else t.cost, _ttft_p90(t)), default=None)
        return best, bool(met)

    def proof(self) -> Proof:
        """Return why no other size is the answer."""
        best, _ = self.chosen()
        bound = math.inf if best is None else best.cost
        if self._plan.goal.kind is GoalKind.COST:
            bound = self._plan.goal.value
        tried = self._noted
        undecided = self._undecided if self._frontier is None else self._frontier.undecided
        undecided = sorted(set(undecided) - tried, key=self._costs.__getitem__)
        left = set(self._costs) - tried - set(undecided)
        dearer = sum(self._costs[size] >= bound for size in left)
        return Proof(
            len(self._costs),
            len(tried),
            dearer,
            len(left) - dearer,
            len(self.too_small),
            tuple((size, self._costs[size]) for size in undecided),
        )

    @property
    def _noted(self) -> set[Size]:
        return {trial.size for trial in self.trials} | self.too_small.keys()

    # -- the steps --------------------------------------------------------------------

    def _search(self) -> _Steps:
        for role, size in zip((_NO_TIERS, _CEILING), self.ends, strict=True):
            self._note(role, size, (yield role, size))
        if self._plan.goal.kind is GoalKind.COST:
            self.ends_known = True
            yield from self._spend()
            return
        frontier = self._frontier_of_trials()
        if frontier.best is None:  # not even the ceiling does
            self._settle_for_less()
            frontier = self._frontier_of_trials()
        self.ends_known, self._undecided = True, []
        if frontier.best is None:
            return
        self._frontier = frontier
        while (following := frontier.next()) is not None:
            found = yield _BETWEEN, following
            frontier.told(following, self._note(_BETWEEN, following, found))

    def _spend(self) -> _Steps:
        """Replay the largest sizes that the money buys."""
        within = largest([s for s, cost in self._costs.items() if cost <= self._plan.goal.value])
        within.sort(key=lambda size: self._guesses[size].ttft_p90)
        self._undecided = [size for size in within if size not in self.ends]
        while self._undecided:
            size = self._undecided[0]
            self._note(_BETWEEN, size, (yield _BETWEEN, size))
            self._undecided.remove(size)

    def _note(self, role: str, size: Size, found: Replay | TooSmall) -> bool:
        """Take in a replay; returns whether the size will do."""
        if isinstance(found, TooSmall):
            self.too_small[size] = found
            return False
        return self._will_do(self.add(role, self._plan.policies[0], size, found))

    def add(self, role: str, policy: str, size: Size, found: Replay) -> Trial:
        """Return the trial that a replay makes, and keep it."""
        plan, cost = self._plan, self._costs[size]
        first = (self._earlier or self).trials
        bare = first[0].replay.ttft.p90 if first else found.ttft.p90
        met = plan.goal.met(found.ttft.p90, found.tokens.hit_rate, bare)
        if plan.goal.kind is GoalKind.COST:
            met = cost <= plan.goal.value
        guess = self._guesses[size]
        trial = Trial(role, self.kv_dtype, policy, size, cost, guess, found, met)
        self.trials.append(trial)
        return trial

    def _frontier_of_trials(self) -> Frontier:
        by_hits = self._plan.goal.kind is GoalKind.HIT_RATE
        ranks = {s: -g.hit_rate if by_hits else g.ttft_p90 for s, g in self._guesses.items()}
        frontier = Frontier(self._costs, ranks)
        for trial in self.trials:
            frontier.told(trial.size, self._will_do(trial))
        for size in self.too_small:
            frontier.told(size, met=False)
        return frontier

    def _settle_for_less(self) -> None:
        """Set a goal that can be met: most of what the largest tiers bring.

        That of the earlier search is taken if it can be met, so that both can be compared.
        """
        if self.ends[1] in self.too_small:
            return
        bare, ceiling = (trial.replay for trial in self.trials[:2])
        earlier = None if self._earlier is None else self._earlier.nearly
        if earlier is not None and _reaches(earlier, ceiling):
            self.nearly = earlier
            return
        if self._plan.goal.kind is GoalKind.HIT_RATE:
            before, after = bare.tokens.hit_rate, ceiling.tokens.hit_rate
            gained = after - before > _WORTHWHILE * after
        else:
            before, after = bare.ttft.p90 or 0.0, ceiling.ttft.p90 or 0.0
            gained = before - after > _WORTHWHILE * before
        value = before + _NEARLY * (after - before)
        self.nearly = Goal(self._plan.goal.kind, value) if gained else None

    def _will_do(self, trial: Trial) -> bool:
        """Whether a trial meets the goal, or what took its place."""
        return trial.met or (self.nearly is not None and _reaches(self.nearly, trial.replay))


def _reaches(goal: Goal, found: Replay) -> bool:
    return goal.met(found.ttft.p90, found.tokens.hit_rate, None)


def _ttft_p90(trial: Trial) -> float:
    """Return the p90 TTFT; infinite where nothing was answered."""
    found = trial.replay.ttft.p90
    return math.inf if found is None else found
