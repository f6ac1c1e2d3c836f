"""The answer of a sizing in a few lines, data type beside data type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvtiers.simulate.goal import GoalKind
from kvtiers.simulate.sizing import EngineTry, Sizing, Trial
from kvtiers.simulate.sizing_words import details, no_ceiling, seconds_text

_WITHOUT: Final = "the goal is met without tiers"
_NEARLY_ALL: Final = 0.98  # of the hits of the largest tiers, beyond which these are of no use


def headline(sizing: Sizing) -> list[str]:
    """Return what was asked, the answer for each data type, what binds, and what would do."""
    plan = sizing.plan
    engines = "one engine serves"
    if sizing.num_engines > 1:
        engines = f"{sizing.num_engines} engines share"
    num = len(plan.trace.requests)
    requests = "one request" if num == 1 else f"{num:,} requests"
    said = [
        f"{plan.machine.title}: {engines} the {requests} of {plan.trace.name}.",
        f"Goal: {_goal(sizing)}.",
    ]
    said += [f"{dtype}: {_answer(sizing, dtype, sizing)}" for dtype in plan.kv_dtypes]
    said.append(f"What binds: {sizing.limit}.")
    if sizing.more is not None:
        return [*said, *_more(sizing, sizing.more)]
    return [*said, *_what_would_do(sizing)]


def _more(sizing: Sizing, more: Sizing) -> Iterator[str]:
    """Yield the answer with more engines."""
    num, limit = more.num_engines, seconds_text(sizing.limit_seconds)
    for dtype in more.plan.kv_dtypes:
        yield f"{num} engines, {dtype}: {_answer(more, dtype, sizing)}"
    yield f"What binds {num} engines: {more.limit}."
    for at, it in enumerate(more.larger, 1):
        p90 = f"p90 TTFT {seconds_text(it.ttft_p90)}"
        if it.meets(sizing.limit_seconds):
            yield f"Without tiers {_number_of(it)} meet {limit}: {p90}."
        elif at == len(more.larger):
            yield f"Without tiers not even {_number_of(it)} meet {limit}: {p90}."


def _what_would_do(sizing: Sizing) -> Iterator[str]:
    """Yield how many engines meet the goal with large tiers, where it was tried."""
    if not sizing.larger or sizing.limit_seconds is None:
        return
    met = [it for it in sizing.larger if it.meets(sizing.limit_seconds)]
    if met:
        fewest = min(met, key=lambda it: it.num_engines)
        yield (
            f"With all that is reused in DRAM {_number_of(fewest)} meet it: p90 TTFT "
            f"{seconds_text(fewest.ttft_p90)}. To size for them: --replicas {fewest.num_engines} "
            f"--goal ttft-p90={sizing.limit_seconds:.3g}s"
        )
    else:
        most = sizing.larger[-1]
        yield (
            f"With all that is reused in DRAM not even {_number_of(most)} meet it: p90 TTFT "
            f"{seconds_text(most.ttft_p90)}."
        )


def _number_of(tried: EngineTry) -> str:
    return f"{tried.num_engines} engines"


def sentences(sizing: Sizing) -> list[str]:
    """Return the answer, and what it rests on, in words."""
    return [*headline(sizing), *details(sizing)]


def _goal(sizing: Sizing) -> str:
    goal, bare = sizing.plan.goal, sizing.bare(sizing.plan.kv_dtypes[0])
    if not goal.relative or bare is None:
        return str(goal)
    limit = seconds_text(goal.limit_seconds(bare.replay.ttft.p90))
    return f"{goal}, that is {limit} of {seconds_text(bare.replay.ttft.p90)}"


def _answer(sizing: Sizing, dtype: str, base: Sizing) -> str:
    """Return what one data type needs; `base`: what p90 TTFT is compared with."""
    answer, by_money = sizing.answer(dtype), sizing.plan.goal.kind is GoalKind.COST
    if answer is None:
        return _no_answer(sizing, dtype)
    proof = sizing.proofs[dtype]
    open_question = (
        f" (an upper bound: {len(proof.undecided)} cheaper sizes are undecided)"
        if proof.undecided and not by_money
        else ""
    )
    if not answer.size.dram_nbytes:
        what = "nothing for that money is faster than no tiers" if by_money else _WITHOUT
        return f"{what}, {_reached(sizing, answer, base)}."
    each = " for each engine" if sizing.num_engines > 1 else ""
    rule = "" if answer.policy == sizing.plan.policies[0] else f" with the rule {answer.policy}"
    needed = f"{answer.size}{each}{rule}{open_question}, {_reached(sizing, answer, base)}."
    if dtype in sizing.chosen:
        kind = "best found" if by_money else "cheapest found"
        return f"{kind}: {needed}"
    return (
        "no size meets the goal. The cheapest that brings nine tenths of what tiers can bring: "
        + needed
    )


def _no_answer(sizing: Sizing, dtype: str) -> str:
    mine = [trial for trial in sizing.trials if trial.kv_dtype == dtype]
    if len(mine) < 2:
        return f"{no_ceiling(sizing.proofs.get(dtype))}."
    bare, ceiling = (trial.replay for trial in mine[:2])
    if bare.tokens.hit_rate >= _NEARLY_ALL * ceiling.tokens.hit_rate:
        return (
            f"tiers bring nothing here: HBM alone hits {bare.tokens.hit_rate:.1%}, the largest "
            f"tiers {ceiling.tokens.hit_rate:.1%}; p90 TTFT stays {seconds_text(bare.ttft.p90)}."
        )
    now, best = seconds_text(bare.ttft.p90), seconds_text(ceiling.ttft.p90)
    return f"no size meets the goal: the largest tiers change p90 TTFT from {now} to {best}."


def _reached(sizing: Sizing, answer: Trial, base: Sizing) -> str:
    """Return what a size brings, and what it costs."""
    found, own = answer.replay, sizing.bare(answer.kv_dtype)
    if own is None or own is answer:
        text = f"p90 TTFT {seconds_text(found.ttft.p90)}"
    else:
        text = f"p90 TTFT {seconds_text(own.replay.ttft.p90)} -> {seconds_text(found.ttft.p90)}"
    first = base.bare(base.plan.kv_dtypes[0])
    if first is not None and first is not answer and first.replay.ttft.p90 and found.ttft.p90:
        times = found.ttft.p90 / first.replay.ttft.p90
        of = "" if first is own else f" that of {first.kv_dtype} without tiers"
        if base is not sizing:
            many = "one engine" if base.num_engines == 1 else f"{base.num_engines} engines"
            of = f" that of {many} without tiers"
        text += f" ({times:.2f} times{of})"
    if own is not None and own is not answer:
        text += f", hit rate {own.replay.tokens.hit_rate:.1%} -> {found.tokens.hit_rate:.1%}"
        text += f", price {answer.cost:,.0f}"
        if sizing.num_engines > 1:
            text += f" for {sizing.num_engines} engines"
    return text
