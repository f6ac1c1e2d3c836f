"""Which limit keeps tiers from doing better, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvtiers.simulate.goal import Goal, GoalKind
from kvtiers.simulate.replay_result import Replay
from kvtiers.simulate.sizing import Proof, Trial
from kvtiers.simulate.sizing_words import no_ceiling, seconds_text

_NO_FASTER: Final = 0.98  # of the p90 TTFT without tiers, above which they are not worth a word


def limit_in_words(
    goal: Goal,
    trials: Sequence[Trial],
    chosen: Trial | None,
    most_hit_rate: float,
    proof: Proof | None,
) -> str:
    """Return which limit binds.

    Args:
        trials: of one data type: that without tiers first, then that with the largest.
        most_hit_rate: that a cache which forgets nothing reaches, in whole blocks.
        proof: of the same data type; None: the search has not begun.
    """
    if len(trials) < 2:
        return no_ceiling(proof)
    ceiling = trials[1]
    if chosen is not None:
        if goal.kind is GoalKind.COST and not chosen.size.dram_nbytes:
            return _of_money(chosen, ceiling)
        return _of_chosen(chosen, ceiling.replay)
    if goal.kind is GoalKind.COST:
        return "the money: it buys not even the smallest tiers considered"
    if ceiling.met:
        return "not known: it was stopped before a size was found"
    limit = goal.limit_seconds(trials[0].replay.ttft.p90)
    return _of_all(ceiling, limit, most_hit_rate)


def _of_all(ceiling: Trial, limit: float | None, most_hit_rate: float) -> str:
    """Return why not even the largest tiers meet the goal; `limit`: in seconds, if it is a time."""
    found = ceiling.replay
    hit_rate = found.tokens.hit_rate
    best = f"p90 TTFT {seconds_text(found.ttft.p90)}, hit rate {hit_rate:.1%}"
    if hit_rate < 0.8 * most_hit_rate:
        return (
            f"the links: with all that is ever used again in DRAM it is {best}, though "
            f"{most_hit_rate:.1%} could be hit"
        )
    most_hit_rate = max(most_hit_rate, hit_rate)  # a warm-up may have been poorer
    new = (
        f"with all that is ever used again in DRAM it is {best}. At most {most_hit_rate:.1%} of "
        f"the prompt tokens can be hit, {1 - most_hit_rate:.1%} are new and have to be computed"
    )
    if limit is None:
        return f"the trace: {new}"
    alone = seconds_text(ceiling.guess.alone_p90)
    if ceiling.guess.alone_p90 > limit:
        return (
            f"computing what is new: {new}, which takes {alone} (p90) even if no request waits for "
            "another. Only a faster engine would do: another device, or more of them (--tp)"
        )
    return (
        f"the queue: {new}. That takes {alone} (p90) if no request waits for another; the rest is "
        "waiting, which more engines (--replicas), faster ones or slower arrivals (--speed) shorten"
    )


def _of_money(bare: Trial, ceiling: Trial) -> str:
    """Return why money is better not spent."""
    before, after = bare.replay.ttft.p90 or 0.0, ceiling.replay.ttft.p90 or 0.0
    if after < _NO_FASTER * before:
        return (
            f"the money: with all that is ever used again in DRAM p90 TTFT is "
            f"{seconds_text(after)}, for {ceiling.cost:,.0f}"
        )
    return "none of the tiers: even those that hold all that is ever used again are no faster"


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
