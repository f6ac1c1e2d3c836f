"""Finds how many engines meet a goal that a given number cannot meet with any tiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvtiers.simulate.engine_count import Make
from kvtiers.simulate.estimate import Guess
from kvtiers.simulate.replay_job import ReplayJob
from kvtiers.simulate.replay_pool import ReplayPool
from kvtiers.simulate.replay_result import Replay
from kvtiers.simulate.sizes import Size
from kvtiers.simulate.sizing import EngineTry

_MOST_NUMBERS: Final = 8  # of engines that are guessed, and at most tried
_MOST_BARE: Final = 4  # numbers of engines without tiers that are tried

Largest = Callable[[int], tuple[Size, Guess]]
"""Given a number of engines, returns the largest tiers of each, and what is guessed of them."""


class MoreEngines:
    """Replays more engines, with the largest tiers and with none.

    Args:
        most: engines that there may be. limit_seconds: the p90 TTFT that is to be met.

    Attributes:
        tries: what was tried, one after another.
        complete: whether there was time for all that was wanted.
    """

    def __init__(
        self, pool: ReplayPool, make: Make, largest: Largest, most: int, limit_seconds: float
    ) -> None:
        self._pool = pool
        self._make = make
        self._largest = largest
        self._most = most
        self._limit = limit_seconds
        self.tries: list[EngineTry] = []
        self.complete = True

    def with_tiers(self, first: int) -> int | None:
        """Return how many engines meet the goal with the largest tiers; None: no number did.

        At most eight numbers from `first` on are considered. The search begins with the first one
        that is guessed to be enough, and goes down while they are, or else up until one is.
        """
        step = max(1, first // _MOST_NUMBERS)
        numbers = range(first, min(self._most, first + step * _MOST_NUMBERS) + 1, step)
        enough = (idx for idx, num in enumerate(numbers) if self._hopeful(num))
        at = next(enough, len(numbers) - 1)
        best: int | None = None
        went_up = False
        while 0 <= at < len(numbers):
            likely = [self._make(numbers[at], Size(0, 0))]  # wanted if so many are enough
            if at + 1 < len(numbers) and best is None:
                likely.append(self._make(numbers[at + 1], self._largest(numbers[at + 1])[0]))
            meets = self._meets(numbers[at], self._largest(numbers[at])[0], likely)
            if meets:
                best = numbers[at]
            if meets is None or (meets and went_up) or (not meets and best is not None):
                break
            went_up = not meets
            at += 1 if went_up else -1
        return best

    def without_tiers(self, first: int) -> None:
        """Try numbers of engines without tiers, from `first` on, until they meet the goal."""
        step = max(1, first // _MOST_NUMBERS)
        for num in range(first, min(self._most, first + step * (_MOST_BARE - 1)) + 1, step):
            if self._meets(num, Size(0, 0), []) is not False:
                return

    def _hopeful(self, num: int) -> bool:
        return self._largest(num)[1].ttft_p90 <= self._limit

    def _meets(self, num: int, size: Size, likely: list[ReplayJob]) -> bool | None:
        """Return whether `num` engines meet the goal; None: there is no time left."""
        found = self._pool.result(self._make(num, size), likely)
        if found is None:
            self.complete = False
            return None
        if not isinstance(found, Replay):
            return False
        self.tries.append(EngineTry.of(num, size, found))
        return self.tries[-1].meets(self._limit)
