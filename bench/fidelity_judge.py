"""Whether the modelled runner says what an engine does: errors, spread of repeats, and order."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FLOOR = 0.10  # a median error that is always allowed
SPREADS = 1.5  # or so many times the spread of repeats


@dataclass(frozen=True)
class Run:
    """What serving a workload took.

    Attributes:
        ttft_seconds, ttft_median, ttft_p90: mean, median and 90th percentile over the requests,
            each from its arrival.
        tokens_per_second: prompts and outputs, from the first arrival to the end.
        hits: tier to tokens that came from there, "hbm" among them.
        num_preemptions: of requests.
    """

    ttft_seconds: float
    ttft_median: float
    ttft_p90: float
    tokens_per_second: float
    hits: Mapping[str, int] = field(default_factory=dict)
    num_preemptions: int = 0

    @classmethod
    def of(cls, ttfts: Sequence[float], tokens_per_second: float, **more: Any) -> Run:
        """Return a run whose requests waited so long for their first tokens."""
        tenths = statistics.quantiles(ttfts, n=10, method="inclusive") if len(ttfts) > 1 else ttfts
        mean, middle = statistics.fmean(ttfts), statistics.median(ttfts)
        return cls(mean, middle, tenths[-1], tokens_per_second, **more)


@dataclass(frozen=True)
class Cell:
    """One workload on one configuration: measured several times, and modelled."""

    workload: str
    config: str
    measured: Sequence[Run]
    modelled: Run

    def median(self, of: Metric) -> float:
        """Return the median over the repeats."""
        return statistics.median(of(run) for run in self.measured)

    def error(self, of: Metric) -> float:
        """Return how far off the model is, of the median."""
        return abs(of(self.modelled) / self.median(of) - 1)

    def spread(self, of: Metric) -> float:
        """Return the interquartile range of the repeats, of the median."""
        if len(self.measured) < 2:
            return 0.0
        low, middle, high = statistics.quantiles((of(run) for run in self.measured), n=4)
        return (high - low) / middle

    @property
    def hits_equal(self) -> bool:
        """Whether the model's hits by tier are those of the last repeat."""
        return dict(self.measured[-1].hits) == dict(self.modelled.hits)


def ttft(run: Run) -> float:
    """Return the mean time to the first token."""
    return run.ttft_seconds


def ttft_median(run: Run) -> float:
    """Return the median time to the first token."""
    return run.ttft_median


def ttft_p90(run: Run) -> float:
    """Return the 90th percentile of the times to the first token."""
    return run.ttft_p90


def rate(run: Run) -> float:
    """Return the tokens per second."""
    return run.tokens_per_second


Metric = Callable[[Run], float]
METRICS: Mapping[str, Metric] = {
    "TTFT, mean": ttft,
    "TTFT, median": ttft_median,
    "TTFT, p90": ttft_p90,
    "throughput": rate,
}


@dataclass(frozen=True)
class Verdict:
    """What became of one metric over all cells.

    Attributes:
        error, spread: medians over the cells. largest: error.
        num_kept, num_pairs: pairs of configurations in the right order, of those that differ by
            more than their spread.
        wrong: the others, in words.
    """

    error: float
    spread: float
    largest: float
    num_kept: int
    num_pairs: int
    wrong: Sequence[str]

    @property
    def allowed(self) -> float:
        """The error that is allowed."""
        return max(FLOOR, SPREADS * self.spread)

    @property
    def met(self) -> bool:
        """Whether the median error is within what is allowed."""
        return self.error <= self.allowed


def verdict(cells: Sequence[Cell], of: Metric, *, across: bool = False) -> Verdict:
    """Judge one metric.

    Args:
        across: compare the order of all cells, not only of configurations of one workload.
    """
    names = [""] if across else list(dict.fromkeys(cell.workload for cell in cells))
    found = [order_kept([c for c in cells if across or c.workload == name], of) for name in names]
    return Verdict(
        statistics.median(cell.error(of) for cell in cells),
        statistics.median(cell.spread(of) for cell in cells),
        max(cell.error(of) for cell in cells),
        sum(kept for kept, _, _ in found),
        sum(num for _, num, _ in found),
        [pair for _, _, wrong in found for pair in wrong],
    )


def order_kept(cells: Sequence[Cell], of: Metric) -> tuple[int, int, list[str]]:
    """Compare each pair of cells.

    Returns:
        pairs in the same order, pairs that differ by more than their spread, and those that are
        in another order, in words.
    """
    kept, num, wrong = 0, 0, []
    for one, two in itertools.combinations(cells, 2):
        a, b = one.median(of), two.median(of)
        if abs(a - b) <= max(one.spread(of) * a, two.spread(of) * b):
            continue
        num += 1
        if (a < b) == (of(one.modelled) < of(two.modelled)):
            kept += 1
        else:
            wrong.append(f"{one.workload}/{one.config} and {two.workload}/{two.config}")
    return kept, num, wrong


def report(cells: Sequence[Cell], *, across: bool = False) -> str:
    """Return the table, and the verdicts; `across` as in `verdict`."""
    lines = [
        "                                  TTFT, mean, ms              median    p90  tokens/s",
        "workload           configuration       is    model  error spread  error  error"
        "        is    model  error spread  hits by tier",
    ]
    lines += [_line(cell) for cell in cells]
    for name, of in METRICS.items():
        found = verdict(cells, of, across=across)
        lines.append(
            f"{name}: median error {found.error:.1%}, largest {found.largest:.1%}; allowed "
            f"{found.allowed:.1%}: {'met' if found.met else 'missed'}; order of {found.num_kept} "
            f"of {found.num_pairs} pairs that differ by more than the spread kept"
            + (f", not of {'; '.join(found.wrong)}" if found.wrong else "")
        )
    configs = list(dict.fromkeys(cell.config for cell in cells))
    for config in configs if len(configs) > 1 else []:
        mine = [cell for cell in cells if cell.config == config]
        errors = [statistics.median(cell.error(of) for cell in mine) for of in METRICS.values()]
        said = ", ".join(f"{e:.1%} {n}" for e, n in zip(errors, METRICS, strict=True))
        lines.append(f"median errors of {config}: {said}")
    return "\n".join(lines)


def _line(cell: Cell) -> str:
    return (
        f"{cell.workload:18} {cell.config:15}"
        f"{cell.median(ttft) * 1e3:9.1f}{cell.modelled.ttft_seconds * 1e3:9.1f}"
        f"{cell.error(ttft):7.1%}{cell.spread(ttft):7.1%}"
        f"{cell.error(ttft_median):7.1%}{cell.error(ttft_p90):7.1%}"
        f"{cell.median(rate):10.0f}{cell.modelled.tokens_per_second:9.0f}"
        f"{cell.error(rate):7.1%}{cell.spread(rate):7.1%}  {_hits(cell)}"
    )


def _hits(cell: Cell) -> str:
    said = " ".join(f"{tier} {num}" for tier, num in sorted(cell.modelled.hits.items()) if num)
    if cell.hits_equal:
        return f"{said or 'none'}, equal"
    seen = " ".join(f"{t} {num}" for t, num in sorted(cell.measured[-1].hits.items()) if num)
    return f"{said or 'none'}; measured {seen or 'none'}"


def to_plain(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return plain data for JSON."""
    return [asdict(cell) for cell in cells]
