"""The cheapest of many sizes that meets a goal, from as few tries as will prove it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtiers.simulate.sizes import Size


class Frontier:
    """What is known of some sizes, if larger tiers never do worse.

    Under that assumption one that fails rules out all that are no larger in either tier, and one
    that meets the goal rules out all that cost as much. What neither rules out is undecided; when
    nothing is, the cheapest that met the goal is the cheapest of all.

    Args:
        costs: of every size that is considered.

    Attributes:
        ranks: the lower, the more likely a size is to meet the goal; only guides the order.
    """

    def __init__(self, costs: Mapping[Size, float], ranks: Mapping[Size, float]) -> None:
        self._costs = costs
        self.ranks = ranks
        self._tried: dict[Size, bool] = {}

    @property
    def best(self) -> Size | None:
        """The cheapest that met the goal; None: none did yet."""
        return min((s for s, met in self._tried.items() if met), key=self._key, default=None)

    @property
    def undecided(self) -> list[Size]:
        """Sizes that may be cheaper and meet the goal too, the cheapest first."""
        best = self.best
        failed = [size for size, met in self._tried.items() if not met]
        found = [
            size
            for size in self._costs
            if size not in self._tried
            and (best is None or self._key(size) < self._key(best))
            and not any(size.within(other) for other in failed)
        ]
        return sorted(found, key=self._key)

    def told(self, size: Size, met: bool) -> None:
        """Note whether a size meets the goal."""
        self._tried[size] = met

    def next(self) -> Size | None:
        """Return what to try next; None: nothing is undecided.

        The cheapest of those whose rank promises success; where none does, one of the largest, the
        one with the best rank: if even that fails, it rules out many.
        """
        undecided = self.undecided
        if not undecided:
            return None
        worst = self._worst_hopeful()
        hopeful = [size for size in undecided if self.ranks[size] <= worst]
        if hopeful:
            return hopeful[0]
        return min(largest(undecided), key=lambda size: (self.ranks[size], -self._costs[size]))

    def num_expected(self) -> int:
        """Return how many more tries it takes, if the ranks are right."""
        supposed, worst, num = self._supposing({}), self._worst_hopeful(), 0
        while (following := supposed.next()) is not None:
            supposed.told(following, self.ranks[following] <= worst)
            num += 1
        return num

    def ahead(self, trying: Size, most: int) -> list[Size]:
        """Return up to `most` sizes that may have to be tried next, the soonest first.

        Args:
            trying: the size that is being tried. Each of the others is the next one if it, or a
                later one, fails or meets the goal.
        """
        found: dict[Size, None] = {}
        level = [(self._supposing({}), trying)]
        while level and len(found) < most:
            after = []
            for frontier, size in level:
                for met in (False, True):
                    then = frontier._supposing({size: met})
                    if (following := then.next()) is not None:
                        found.setdefault(following)
                        after.append((then, following))
            level = after
        return list(found)[:most]

    def _supposing(self, more: Mapping[Size, bool]) -> Frontier:
        """Return what would be known if these had been tried as well."""
        other = Frontier(self._costs, self.ranks)
        other._tried = {**self._tried, **more}
        return other

    def _worst_hopeful(self) -> float:
        """Return the rank up to which sizes are expected to meet the goal."""
        met = [self.ranks[size] for size, it in self._tried.items() if it]
        failed = [self.ranks[size] for size, it in self._tried.items() if not it]
        worst = max(met, default=float("-inf"))
        above = min((rank for rank in failed if rank > worst), default=worst)
        return (worst + above) / 2 if met else float("inf")

    def _key(self, size: Size) -> tuple[float, int, int]:
        return self._costs[size], size.dram_nbytes, size.nvme_nbytes


def largest(sizes: Sequence[Size]) -> list[Size]:
    """Return those that no other one exceeds: the best ones are among them."""
    return [
        size for size in sizes if not any(size != other and size.within(other) for other in sizes)
    ]
