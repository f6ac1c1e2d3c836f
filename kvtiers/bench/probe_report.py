"""What a probe found, as data for programs and as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvtiers.bench.probe import ProbeResult
from kvtiers.bench.probe_even import NO_SPEED, Even
from kvtiers.cost.calibration import Calibration, LinkFit

LINK_HEADER = ("link", "job us", "block us", "GB/s", "small", "large", "error", "jobs")
LINK_CAPTION = (
    "Fitted: a job takes so much, and each block beside its bytes, and these at so many GB/s. "
    "Measured GB/s: small, the smallest block alone; large, the largest at the greatest depth. "
    "Error: the median, of what the fit says of each job."
)


def to_plain(result: ProbeResult, even: Even | None) -> dict[str, Any]:
    """Return the calibration with what else was found; the file may hold all of it."""
    plain = result.calibration.to_plain()
    plain["missing"], plain["notes"] = list(result.missing), list(result.notes)
    plain["break_even"] = None if even is None else asdict(even)
    return plain


def link_rows(found: Calibration) -> list[tuple[str, ...]]:
    """Return a row a link, as under `LINK_HEADER`."""
    return [(name, *_row(found, name, fit)) for name, fit in found.fits.items()]


def even_rows(even: Even) -> list[tuple[str, str]]:
    """Return tier and break-even length."""
    return [
        (name, "never" if tokens is None else f"{tokens:,}") for name, tokens in even.tokens.items()
    ]


def even_title(even: Even) -> str:
    """Return what the break-even lengths are about."""
    return f"{even.model}, computed by {even.computes}: from this prefix on, a reload is faster"


def markdown(result: ProbeResult, even: Even | None) -> str:
    """Return everything as a Markdown page."""
    found = result.calibration
    machine = ", ".join((found.machine.cpu, *found.machine.gpus))
    lines = [
        "# Links of a machine",
        "",
        "- command: `kvtiers probe CONFIG --report PAGE`, with these tiers",
        f"- machine: {machine}, {found.machine.num_cores} cores",
        f"- date: {found.date}; kvtiers {found.kvtiers}; engine on: {found.device}",
        *(
            f"- {name}: {facts.kind}, {facts.filesystem or 'in memory'}"
            for name, facts in found.tiers.items()
        ),
        *(f"- not measured: {text}" for text in result.missing),
        *(f"- {text}" for text in result.notes),
        "",
        LINK_CAPTION,
        "",
        *_table(LINK_HEADER, link_rows(found)),
        "",
        "All measurements: median GB/s (median microseconds of a job).",
        "",
        *_table(("link", "block", "depth", "GB/s", "us", "jobs"), _cell_rows(found)),
        "",
    ]
    if even is None:
        return "\n".join([*lines, NO_SPEED, ""])
    lines += [f"{even_title(even)}.", "", *_table(("tier", "tokens"), even_rows(even)), ""]
    return "\n".join(lines)


def _row(found: Calibration, name: str, fit: LinkFit) -> tuple[str, ...]:
    cells = sorted(
        (cell for cell in found.cells if cell.link == name),
        key=lambda cell: (cell.nbytes // cell.num_blocks, cell.num_blocks),
    )
    return (
        f"{fit.latency_seconds * 1e6:,.0f}",
        f"{fit.seconds_per_piece * 1e6:,.1f}",
        f"{fit.bandwidth_bytes_per_second / 1e9:.2f}",
        f"{cells[0].bytes_per_second / 1e9:.2f}",
        f"{cells[-1].bytes_per_second / 1e9:.2f}",
        f"{fit.median_error:.0%}",
        str(fit.num_jobs),
    )


def _cell_rows(found: Calibration) -> list[tuple[str, ...]]:
    return [
        (
            cell.link,
            f"{cell.nbytes // cell.num_blocks // 1024} KiB",
            str(cell.num_blocks),
            f"{cell.bytes_per_second / 1e9:.2f}",
            f"{cell.median_seconds * 1e6:,.0f}",
            str(len(cell.seconds)),
        )
        for cell in found.cells
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
