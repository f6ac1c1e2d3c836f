"""Whether the modelled runner says what an engine does: errors, spread of repeats, and order."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtiers.cost.links import LinkModel, LinkSeed
from kvtiers.model.messages import Link

FLOOR = 0.10  # a median error that is always allowed
SPREADS = 1.5  # or so many times the spread of repeats


@dataclass(frozen=True)
class Run:
    """What serving a workload took.

    Attributes:
        ttft_seconds: mean over the requests, each from its arrival. tokens_per_second: prompts
            and outputs, from the first arrival to the end.
        hits: tier to tokens that came from there, "hbm" among them.
        num_preemptions: of requests.
    """

    ttft_seconds: float
    tokens_per_second: float
    hits: Mapping[str, int] = field(default_factory=dict)
    num_preemptions: int = 0


@dataclass(frozen=True)
class Cell:
    """One workload on one configuration: measured several times, and modelled."""

    workload: str
    config: str
    measured: Sequence[Run]
    modelled: Run

    def median(self, of: Callable[[Run], float]) -> float:
        """Return the median over the repeats."""
        return statistics.median(of(run) for run in self.measured)

    def error(self, of: Callable[[Run], float]) -> float:
        """Return how far off the model is, of the median."""
        return abs(of(self.modelled) / self.median(of) - 1)

    def spread(self, of: Callable[[Run], float]) -> float:
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


def rate(run: Run) -> float:
    """Return the tokens per second."""
    return run.tokens_per_second


def order_kept(cells: Sequence[Cell], of: Callable[[Run], float]) -> tuple[int, int, list[str]]:
    """Compare each pair of configurations of each workload.

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
    """Return the table, and the verdict.

    Args:
        across: compare the order of all cells, not only of configurations of one workload.
    """
    lines = [
        "workload           configuration     TTFT ms    model  error spread"
        "  tokens/s    model  error spread  hits by tier"
    ]
    lines += [_line(cell) for cell in cells]
    for name, of in (("TTFT", ttft), ("throughput", rate)):
        error = statistics.median(cell.error(of) for cell in cells)
        spread = statistics.median(cell.spread(of) for cell in cells)
        allowed = max(FLOOR, SPREADS * spread)
        if across:
            groups = [list(cells)]
        else:
            names = dict.fromkeys(cell.workload for cell in cells)
            groups = [[c for c in cells if c.workload == workload] for workload in names]
        found = [order_kept(group, of) for group in groups]
        kept, num = sum(f[0] for f in found), sum(f[1] for f in found)
        wrong = [pair for f in found for pair in f[2]]
        lines.append(
            f"{name}: median error {error:.1%}, largest {max(c.error(of) for c in cells):.1%}; "
            f"allowed {allowed:.1%}: {'met' if error <= allowed else 'missed'}; order of {kept} of "
            f"{num} pairs that differ by more than the spread kept"
            + (f", not of {'; '.join(wrong)}" if wrong else "")
        )
    return "\n".join(lines)


def _line(cell: Cell) -> str:
    return (
        f"{cell.workload:18} {cell.config:15}"
        f"{cell.median(ttft) * 1e3:9.1f}{cell.modelled.ttft_seconds * 1e3:9.1f}"
        f"{cell.error(ttft):7.1%}{cell.spread(ttft):7.1%}"
        f"{cell.median(rate):10.0f}{cell.modelled.tokens_per_second:9.0f}"
        f"{cell.error(rate):7.1%}{cell.spread(rate):7.1%}  {_hits(cell)}"
    )


def _hits(cell: Cell) -> str:
    said = " ".join(f"{tier} {num}" for tier, num in sorted(cell.modelled.hits.items()) if num)
    if cell.hits_equal:
        return f"{said or 'none'}, equal"
    seen = " ".join(f"{t} {num}" for t, num in sorted(cell.measured[-1].hits.items()) if num)
    return f"{said or 'none'}; measured {seen or 'none'}"


def fitted_links(jobs: Sequence[Link], block_nbytes: int) -> dict[str, LinkSeed]:
    """Return what links were measured to take, for blocks of one size."""
    found = {}
    for name in dict.fromkeys(job.name for job in jobs):
        model = LinkModel(1e-4, 1e-5, 5e9)
        mine = [job for job in jobs if job.name == name]
        model.fit([Link(name, j.num_blocks, j.num_blocks * block_nbytes, j.seconds) for j in mine])
        found[name] = LinkSeed(
            model.latency_seconds, model.seconds_per_piece, model.bandwidth_bytes_per_second
        )
    return found


def words(links: Mapping[str, LinkSeed], block_nbytes: int) -> str:
    """Return what a job and a block of each link take."""
    return "; ".join(
        f"{name} {seed.latency_seconds * 1e6:.0f} us + "
        f"{(seed.seconds_per_piece + block_nbytes / seed.bandwidth_bytes_per_second) * 1e6:.0f} us"
        " a block"
        for name, seed in links.items()
    )


def to_plain(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return plain data for JSON."""
    return [asdict(cell) for cell in cells]
