"""What ``kvtiers bench`` shows while it measures, and of what it has measured."""

# ruff: noqa: PLC0415 - what a verb needs is imported when it runs

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtiers.cli.output import report_written, show_table
from kvtiers.cli.progress import progress_bar
from kvtiers.cli.terminable import terminable

if TYPE_CHECKING:
    from kvtiers.bench.measured_run import MeasuredResult
    from kvtiers.bench.plan import MeasuredPlan


def run(
    plan: MeasuredPlan, folder: Path | None, output: Path | None, *, resume: bool, quiet: bool
) -> MeasuredResult:
    """Measure, with a progress bar on standard error."""
    from kvtiers.bench.measure import num_measurements
    from kvtiers.bench.measured_run import run_measured

    with progress_bar(44, quiet=quiet) as bar, terminable():
        total = num_measurements(plan)
        task = bar.add_task("starting", total=total)

        def progress(what: str, num_done: int) -> None:
            bar.update(task, description=what, completed=num_done, total=max(total, num_done + 1))

        return run_measured(plan, folder, output, resume, progress)


def write(result: MeasuredResult, folder: Path) -> None:
    """Write the report, and name its files on standard error."""
    from kvtiers.bench.measured_report import write_measured_report

    report_written(*write_measured_report(result, folder))


def show(result: MeasuredResult) -> None:
    """Print one table, the splits, and what the reader should know."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False)
    verdict = result.verdict
    if verdict is not None:
        ways = list(dict.fromkeys(c.way for c in verdict.comparisons))
        table = Table(
            title=f"{result.plan.model_name} on {result.device}: time to the first token, ms",
            caption="Measured median, and the calibrated model's prediction in parentheses. "
            "*: lengths that the model was not fitted to.",
            box=box.SIMPLE_HEAVY,
        )
        table.add_column("tokens", justify="right", no_wrap=True)
        for way in ways:
            table.add_column(way, justify="right", no_wrap=True)
        rows = {(c.way, c.num_tokens): c for c in verdict.comparisons}
        for num_tokens in result.plan.lengths:
            found = [rows.get((way, num_tokens)) for way in ways]
            judged = "" if num_tokens in result.plan.fitted_lengths else "*"
            cells = [
                f"{_ms(c.measured_seconds)} ({_ms(c.predicted_seconds)})" if c else ""
                for c in found
            ]
            table.add_row(f"{num_tokens:,}{judged}", *cells)
        table.add_section()
        even = {c.tier: c for c in verdict.crossovers}
        table.add_row("break-even", *(_break_even(even.get(way)) for way in ways))
        show_table(table)
        for split in verdict.splits:
            console.print(
                f"split at {split.num_tokens:,} tokens: {split.num_loaded_blocks} of "
                f"{split.num_blocks} blocks loaded beside the computation of the rest: "
                f"{split.split_seconds * 1e3:,.1f} ms, {split.gain:.2f} times faster than the "
                f"better of recompute ({split.recompute_seconds * 1e3:,.1f}) and reload "
                f"({split.reload_seconds * 1e3:,.1f})",
                markup=False,
            )
        if verdict.median_error is not None:
            console.print(
                f"prediction error on lengths not fitted: median {verdict.median_error:.1%}, "
                f"allowed {verdict.allowed_error:.1%}",
                markup=False,
            )
    for note in result.notes:
        console.print(note, markup=False)


def _ms(seconds: float) -> str:
    """Return milliseconds, short enough for five columns of a terminal."""
    return f"{seconds * 1e3:,.{1 if seconds < 0.1 else 0}f}"


def _break_even(crossover: object) -> str:
    from kvtiers.bench.judge import Crossover

    if not isinstance(crossover, Crossover):
        return ""
    measured, predicted = crossover.measured_tokens, crossover.predicted_tokens
    shown = "never" if measured is None else f"{measured:,.0f}"
    return f"{shown} ({'never' if predicted is None else f'{predicted:,}'})"
