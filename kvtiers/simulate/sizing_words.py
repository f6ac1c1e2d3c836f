"""A sizing in words and in rows of tables, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final

from kvtiers.model.units import format_size
from kvtiers.simulate.goal import GoalKind
from kvtiers.simulate.replay_result import Replay
from kvtiers.simulate.report import LONGEST, short_day, short_prompts
from kvtiers.simulate.sizing import EngineTry, Proof, Sizing, Trial

_SPEED: Final = ("TTFT p50", "TTFT p90", "output tokens/s", "ITL p90")
HEADER: Final = (
    "engines",
    "KV",
    "tiers",
    "policy",
    "price",
    *_SPEED,
    "hit rate",
    "NVMe writes a day",
    "goal",
)
_GIB: Final = 2**30
_MOST_ROWS: Final = 10


def trial_rows(sizing: Sizing) -> list[tuple[str, ...]]:
    """Return one row a replay, as `HEADER` says."""
    rows = [_row(trial, sizing) for trial in sizing.trials]
    return rows if sizing.more is None else [*rows, *trial_rows(sizing.more)]


def details(sizing: Sizing) -> list[str]:
    """Return who serves the trace, the knee, and why the answer is the cheapest, in words."""
    said = [*_engines(sizing), *_left_out(sizing), *_short(sizing), *_knee(sizing.final)]
    for it in (sizing, sizing.more):
        if it is not None:
            said += [*_proofs(it), *_surprises(it), *_cut_short(it)]
    return said


def no_ceiling(proof: Proof | None) -> str:
    """Return why the largest tiers of a data type were not replayed."""
    if proof is not None and proof.num_too_small:
        return "no tiers of the sizes that were considered hold one block of the trace"
    return "not known: it was stopped before the largest tiers were replayed"


def _cut_short(sizing: Sizing) -> Iterator[str]:
    if sizing.complete:
        return
    why = "It was interrupted" if sizing.interrupted else "The time was up (--max-seconds)"
    decided = len(sizing.proofs) == len(sizing.plan.kv_dtypes) and not any(
        proof.undecided for proof in sizing.proofs.values()
    )
    what = "the rest" if sizing.larger else "the replacement rules"
    yield f"{why} before {what if decided else 'all sizes'} were compared: others may be better."


def dtype_rows(sizing: Sizing) -> list[tuple[str, ...]]:
    """Return what the data types of the KV cache change, side by side, behind a header."""
    dtypes = [d for d in sizing.plan.kv_dtypes if d in sizing.pools]

    def of(name: str, show: Callable[[str], str | None]) -> tuple[str, ...]:
        return (name, *(show(dtype) or "-" for dtype in dtypes))

    def bare(show: Callable[[Trial], str]) -> Callable[[str], str | None]:
        return lambda dtype: None if (found := sizing.bare(dtype)) is None else show(found)

    def chosen(show: Callable[[Trial], str]) -> Callable[[str], str | None]:
        return lambda dtype: None if (it := sizing.answer(dtype)) is None else show(it)

    def nbytes(num_tokens: float) -> Callable[[str], str]:
        return lambda dtype: size_text(num_tokens * sizing.nbytes_per_token[dtype])

    def undecided(dtype: str) -> str:
        return str(len(sizing.proofs[dtype].undecided)) if dtype in sizing.proofs else "all"

    per_token, num = sizing.nbytes_per_token, sizing.num_engines
    rows = [
        ("KV cache in", *dtypes),
        of("bytes a token of a tier", lambda d: f"{per_token[d]:,.0f}"),
        of("KV pool in HBM, tokens", lambda d: f"{sizing.pools[d].num_tokens:,}"),
        of("all that is ever used again", nbytes(sizing.curve.working_set_tokens)),
        of("knee of the hit curve", nbytes(sizing.curve.knee_tokens)),
        of("p90 TTFT without tiers", bare(lambda t: seconds_text(t.replay.ttft.p90))),
        of("output tokens/s without tiers", bare(lambda t: _count(t.replay))),
        of("hit rate without tiers", bare(lambda t: f"{t.replay.tokens.hit_rate:.1%}")),
    ]
    if sizing.plan.goal.kind is not GoalKind.COST:
        rows.append(of("the goal", lambda d: _met(sizing, d)))
    if any(proof.undecided for proof in sizing.proofs.values()):
        rows.append(of("cheaper sizes, undecided", undecided))
    if not any(map(sizing.answer, dtypes)):
        return rows
    rows.append(of("needed", chosen(lambda t: str(t.size))))
    if num > 1:
        rows[-1] = of("needed by each engine", chosen(lambda t: str(t.size)))
        rows.append(of(f"needed by all {num} engines", chosen(lambda t: _all(t, sizing))))
    return [
        *rows,
        of("price" if num == 1 else "price of that", chosen(lambda t: f"{t.cost:,.0f}")),
        of("p90 TTFT with that", chosen(lambda t: seconds_text(t.replay.ttft.p90))),
        of("output tokens/s with that", chosen(lambda t: _count(t.replay))),
        of("hit rate with that", chosen(lambda t: f"{t.replay.tokens.hit_rate:.1%}")),
    ]


def _met(sizing: Sizing, dtype: str) -> str:
    """Return whether a data type meets the goal, as far as is known."""
    if dtype in sizing.chosen:
        return "met"
    ends = [it for it in sizing.trials if it.kv_dtype == dtype][:2]
    proof = sizing.proofs.get(dtype)
    known = len(ends) == 2 or (proof is not None and proof.num_too_small)
    return "not met" if known else "not known"


def curve_rows(sizing: Sizing) -> list[tuple[str, ...]]:
    """Return what one LRU tier of each size hits and what its doubling adds, behind a header."""
    dtypes, curve = sizing.plan.kv_dtypes, sizing.curve
    header = ["one tier, LRU"]
    for dtype in dtypes:
        header += [f"{dtype}: hits", "doubling adds"]
    most = max(curve.working_set_tokens, 1) * max(sizing.nbytes_per_token.values())
    sizes = [_GIB]
    while sizes[-1] < most:
        sizes.append(sizes[-1] * 2)
    rows = [tuple(header)]
    for size, double in pairwise([*sizes[-_MOST_ROWS:], sizes[-1] * 2]):
        row = [format_size(size)]
        for dtype in dtypes:
            now, then = (
                _rate(sizing, nbytes / sizing.nbytes_per_token[dtype]) for nbytes in (size, double)
            )
            row += [f"{now:.1%}", f"{100 * (then - now):+.1f} points"]
        rows.append(tuple(row))
    return rows


def _engines(sizing: Sizing) -> Iterator[str]:
    """Yield who serves the trace."""
    bare = [it for it in sizing.engines if not it.size.dram_nbytes]
    for before in sorted(bare, key=lambda it: it.num_engines):
        if not before.keeps_up:
            yield _behind(before)
    num, tried = sizing.num_engines, {it.num_engines: it.keeps_up for it in bare}
    if num > 1:
        kept = ""
        if tried.get(num):
            few = tried.get(num - 1) is False
            kept = f", {'the fewest that' if few else 'which'} keep up without tiers"
        elif num not in tried and tried:
            kept = ", which may keep up: it was stopped before that was tried"
        yield (
            f"Sized for {num} engines that share the trace{kept}; that with the most prompt tokens "
            f"is replayed: {sizing.num_requests:,} of {len(sizing.plan.trace.requests):,} "
            "requests. Sizes are those of each engine, prices those of all. --replicas N for "
            "another number."
        )
    for less in sizing.engines:
        if less.size.dram_nbytes:
            yield _fewer(less, sizing.limit_seconds)


def _fewer(tried: EngineTry, limit: float | None) -> str:
    """Return whether fewer engines with large tiers would do."""
    num, p90 = tried.num_engines, f"p90 TTFT is {seconds_text(tried.ttft_p90)}"
    keeps = "keeps" if num == 1 else "keep"
    text = f"With all that is reused in DRAM, {'one' if num == 1 else num}"
    if not tried.keeps_up:
        return f"{text} {'does' if num == 1 else 'do'} not keep up either: {p90}."
    if limit is not None and not tried.meets(limit):
        return f"{text} {keeps} up too, but {p90}, and the goal {seconds_text(limit)}."
    return f"{text} {keeps} up too: {p90}. Tiers spare an engine: --replicas {num} sizes for fewer."


def _behind(tried: EngineTry) -> str:
    """Return how much too few engines fall behind."""
    text = f"{_number(tried.num_engines)} without tiers falls behind: "
    if tried.load > 1.02:
        text += f"serving takes {tried.load:.2f} times as long as the arrivals"
    else:
        text += f"one request in ten waits {seconds_text(tried.wait_p90)} or more to be admitted"
    return f"{text}, p90 TTFT is {seconds_text(tried.ttft_p90)}."


def _left_out(sizing: Sizing) -> Iterator[str]:
    """Yield that requests were too long to be served."""
    bare = sizing.bare(sizing.plan.kv_dtypes[0])
    if bare is None:
        return
    longest = bare.replay.longest
    num = sum(request.num_tokens > longest for request in sizing.plan.trace.requests)
    if num:
        them = "1 request is" if num == 1 else f"{num:,} requests are"
        yield (
            f"{them} of more than {longest:,} tokens, and left out with every data type, so that "
            f"all serve the same: {LONGEST}."
        )


def _short(sizing: Sizing) -> Iterator[str]:
    """Yield what the replays say less of than it seems."""
    if sizing.trials:
        yield from short_prompts(sizing.trials[0].replay)
    if any(short_day(trial.replay) for trial in sizing.trials):
        least = min(trial.replay.seconds for trial in sizing.trials)
        yield (
            f"What NVMe writes a day is that of a replay, {least:,.0f} s at the least, times what "
            "is missing to a day."
        )


def _knee(sizing: Sizing) -> Iterator[str]:
    dtype = sizing.plan.kv_dtypes[0]
    curve, per_token = sizing.curve, sizing.nbytes_per_token[dtype]
    every, hbm = curve.working_set_tokens, sizing.pools[dtype].num_tokens
    infinite = f"an infinite cache hits {sizing.infinite_hit_rate:.1%}"
    where = f", on {sizing.num_engines} engines" if sizing.num_engines > 1 else ""

    def point(num_tokens: float) -> str:
        size = size_text(num_tokens * per_token)
        return f"{num_tokens:,.0f} tokens ({size} in {dtype}) hit {_rate(sizing, num_tokens):.1%}"

    if not every:
        yield (
            f"No whole block of {sizing.share.block_size:,} tokens is ever used again{where}: "
            f"caches of no size hit anything; {infinite}."
        )
        return
    if every <= hbm:
        yield (
            f"All that is ever used again{where}: {point(every)}. The KV pool in HBM holds that: "
            f"{hbm:,} tokens; {infinite}."
        )
        return
    yield (
        f"Knee of the hit curve of one LRU tier{where}: {point(curve.knee_tokens)}; all that is "
        f"ever used again: {point(every)}; {infinite}."
    )


def _proofs(sizing: Sizing) -> Iterator[str]:
    """Yield why no other size is the answer."""
    on = f" on {sizing.num_engines} engines" if sizing.num_engines > 1 else ""
    for dtype, proof in sizing.proofs.items():
        yield _proof(f"{dtype}{on}", proof, sizing.plan.goal.kind is GoalKind.COST)


def _proof(what: str, proof: Proof, by_money: bool) -> str:
    """Return what became of all sizes, but for what none did."""
    dear, small = proof.num_dearer, proof.num_smaller
    dearer = f"{_are(dear)} beyond the budget"
    if not by_money:
        dearer = f"{dear:,} {'costs' if dear == 1 else 'cost'} as much as the answer, or more"
    smaller = "another one within it" if by_money else "one that failed"
    smaller = f"{_are(small)} no larger than {smaller} (larger tiers are taken never to do worse)"
    every = proof.num_replayed == proof.num_sizes
    parts = ["all replayed" if every else f"{proof.num_replayed} replayed"]
    parts += [text for num, text in ((dear, dearer), (small, smaller)) if num]
    if proof.undecided:
        size, cost = proof.undecided[0]
        cheapest = f", the cheapest of them {size} for {cost:,.0f}"
        num = len(proof.undecided)
        parts.append(f"{_are(num)} undecided{cheapest if num > 1 else f': {size} for {cost:,.0f}'}")
    return f"{what}, of {proof.num_sizes} sizes (powers of two): {'; '.join(parts)}."


def _are(num: int) -> str:
    return f"{num:,} {'is' if num == 1 else 'are'}"


def _surprises(sizing: Sizing) -> Iterator[str]:
    """Yield where larger tiers did do worse."""
    if sizing.plan.goal.kind is GoalKind.COST:
        return
    for one in sizing.trials:
        for other in sizing.trials:
            alike = one.kv_dtype == other.kv_dtype and one.policy == other.policy
            if alike and one.met and not other.met and one.size.within(other.size):
                yield (
                    f"Larger tiers did worse here: {other.size} fails, {one.size} does not "
                    f"({one.kv_dtype}). Others that were not replayed may do too."
                )


def _rate(sizing: Sizing, num_tokens: float) -> float:
    """Return what an LRU cache of about this size hits, between two points of the curve."""
    tokens, rates = sizing.curve.tokens, sizing.curve.rates
    if num_tokens <= tokens[0]:
        return rates[0]
    for (less, low), (more, high) in pairwise(zip(tokens, rates, strict=True)):
        if num_tokens <= more:
            return low + (high - low) * (num_tokens - less) / (more - less)
    return rates[-1]


def _row(trial: Trial, sizing: Sizing) -> tuple[str, ...]:
    found = trial.replay
    yes, no = "met", "no"
    if sizing.plan.goal.kind is GoalKind.COST:
        yes, no = "within", "beyond"
    written = found.written_nbytes_per_device_day.get("nvme")
    return (
        str(sizing.num_engines),
        trial.kv_dtype,
        str(trial.size),
        trial.policy,
        f"{trial.cost:,.0f}",
        seconds_text(found.ttft.p50),
        seconds_text(found.ttft.p90),
        f"{found.output_tokens_per_second:,.0f}",
        seconds_text(found.itl.p90),
        f"{found.tokens.hit_rate:.1%}",
        "-" if written is None else f"{written / 1e12:,.1f} TB",
        yes if trial.met else no,
    )


def _number(num_engines: int) -> str:
    return "One engine" if num_engines == 1 else f"Each of {num_engines} engines"


def _all(trial: Trial, sizing: Sizing) -> str:
    num, size = sizing.num_engines, trial.size
    return str(type(size)(num * size.dram_nbytes, num * size.nvme_nbytes))


def _count(replay: Replay) -> str:
    return f"{replay.output_tokens_per_second:,.0f}"


def seconds_text(value: float | None) -> str:
    """Return a time as it is read."""
    if value is None:
        return "-"
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def size_text(nbytes: float) -> str:
    """Return a size as it is read: whole GiB, and less of a small one."""
    if nbytes >= 10 * _GIB or not nbytes:
        return f"{nbytes / _GIB:,.0f} GiB"
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / 2**20:,.0f} MiB"
