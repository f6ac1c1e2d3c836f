"""Which limit keeps tiers from doing better, in words."""

from __future__ import annotations

from collections.abc import Sequence

from kvtiers.simulate.goal import Goal, GoalKind
from kvtiers.simulate.replay import Replay
from kvtiers.simulate.sizing import Trial
from kvtiers.simulate.sizing_words import seconds_text


def limit_in_words(
    goal: Goal, trials: Sequence[Trial], chosen: Trial | None, infinite_hit_rate: float
) -> str:
    """Return which limit binds.

    Args:
        trials: of one data type: that without tiers first, then that with the largest.
    """
    if len(trials) < 2:
        return "not known: it was stopped before the largest tiers were replayed"
    ceiling = trials[1].replay
    if chosen is not None:
        return _of_chosen(chosen, ceiling)
    if goal.kind is GoalKind.COST:
        return "the money: it buys not even the smallest tiers considered"
    if trials[1].met:
        return "not known: it was stopped before a size was found"
    return _of_all(ceiling, infinite_hit_rate)


def _of_all(ceiling: Replay, infinite_hit_rate: float) -> str:
    """Return why not even the largest tiers meet the goal."""
    best = f"p90 TTFT {seconds_text(ceiling.ttft.p90)}, hit rate {ceiling.tokens.hit_rate:.1%}"
    if ceiling.tokens.hit_rate >= 0.8 * infinite_hit_rate:
        return (
            f"the trace: with all that is ever used again in DRAM it is {best}. A cache that "
            f"forgets nothing hits {infinite_hit_rate:.1%}; the rest is new and has to be "
            "computed: faster or more devices (--replicas), or slower arrivals (--speed), would "
            "help"
        )
    return (
        f"the links: with all that is ever used again in DRAM it is {best}, though "
        f"{infinite_hit_rate:.1%} were seen before"
    )


def _of_chosen(chosen: Trial, ceiling: Replay) -> str:
    """Return what keeps the chosen size from being better."""
    if not chosen.size.dram_nbytes:
        return "none: the goal is met without tiers"
    found, could = chosen.replay, chosen.guess.hit_rate
    hit_rate = found.tokens.hit_rate
    if could - hit_rate > 0.2 * could:
        dropped = sum(found.dropped.values())
        why = (
            f"; {dropped:,} blocks were not kept: DRAM was full of what NVMe had yet to write"
            if dropped and chosen.size.nvme_nbytes
            else ""
        )
        return (
            f"bandwidth: tiers of this size could hit {could:.1%}, {hit_rate:.1%} were worth "
            f"loading or came in time{why}"
        )
    if hit_rate > 0.95 * ceiling.tokens.hit_rate:
        return "none of the tiers: they hit nearly all that can be hit; only the device is left"
    return "capacity: larger tiers would hit more, and the links would keep up"
