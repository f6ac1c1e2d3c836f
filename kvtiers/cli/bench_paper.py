"""What ``kvtiers bench`` shows of a comparison on paper."""

# ruff: noqa: PLC0415 - what a verb needs is imported when it runs

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtiers.cli.output import report_written, show_table

if TYPE_CHECKING:
    from kvtiers.bench.paper import PaperResult


def write(result: PaperResult, folder: Path) -> None:
    """Write the report, and name its files on standard error."""
    from kvtiers.bench.paper_report import write_report

    model = Path(result.plan.model)
    stem = model.parent.name if model.name == "config.json" else model.name
    name = f"{stem.removesuffix('.json') or 'model'}-on-{result.plan.hardware}".lower()
    report_written(*write_report(result, folder, name))


def show(result: PaperResult) -> None:
    """Print one table, and what the reader should know."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{result.title}: seconds to the first token, on paper",
        caption="In parentheses: how many times faster than recompute. Break-even: the prefix "
        "length from which on a reload is faster. Best split: over the better of recompute and "
        "reload, where loads come layer by layer inside the step.",
        box=box.SIMPLE_HEAVY,
    )
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("recompute", justify="right", no_wrap=True)
    for tier in result.tiers:
        table.add_column(tier.title, justify="right")
    for row in zip(*(tier.points for tier in result.tiers), strict=True):
        cells = [f"{point.reload_seconds:.3f} ({point.gain:.1f}x)" for point in row]
        table.add_row(f"{row[0].num_tokens:,}", f"{row[0].recompute_seconds:.3f}", *cells)
    table.add_section()
    even = [f"{t.break_even_tokens:,}" if t.break_even_tokens else "never" for t in result.tiers]
    table.add_row("break-even", "", *even)
    split = [f"{max(point.split_gain for point in t.points):.2f}x" for t in result.tiers]
    table.add_row("best split", "", *split)
    show_table(table)
    console = Console(markup=False)
    for note in result.notes:
        console.print(note, markup=False)
