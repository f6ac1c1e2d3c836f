"""Files that show a log of decisions: pictures, and one page that needs no other file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtiers.bench.explain import Errors, Pair, Summary
from kvtiers.bench.explain_words import milliseconds, short
from kvtiers.observe.page import NO_PICTURES, canvas, png, table, write_files
from kvtiers.observe.page import page as html_page

REGRET_NOTE: Final = (
    "Regret is an estimate: what was chosen, with its load as measured, against what was "
    "predicted of the alternatives, which nobody tried."
)

Rows = list[tuple[str, str]]


def count_rows(summary: Summary) -> Rows:
    """Return how many decisions there are, by decision and by reason."""
    total = max(1, summary.num_decisions)
    rows = [("decisions", f"{summary.num_decisions:,}")]
    for found in (summary.num_by_decision, summary.num_by_reason):
        rows += [(short(name), f"{num:,} ({num / total:.0%})") for name, num in found.items()]
    return rows


def block_rows(summary: Summary) -> Rows:
    """Return what was found, chosen and loaded."""
    rows = [
        ("prompt tokens", f"{summary.num_tokens:,}"),
        ("in HBM already", f"{summary.num_local_tokens:,}"),
    ]
    for tier, num in summary.num_blocks_by_tier.items():
        tokens = summary.num_tokens_by_tier.get(tier)
        text = f"{num:,} blocks" if tokens is None else f"{tokens:,} tokens, {num:,} blocks"
        rows.append((f"found in {tier}", text))
    return [
        *rows,
        ("chosen to reload", f"{summary.num_chosen_blocks:,} blocks"),
        ("loaded", f"{summary.num_loaded_blocks:,} blocks"),
        ("failed", f"{summary.num_failed_blocks:,} blocks"),
    ]


def error_rows(summary: Summary) -> Rows:
    """Return how good the predictions and the choices were."""
    worse = f"{summary.num_regretted:,} decisions"
    rows = [
        ("error of loads", _error(summary.load)),
        ("error of first tokens", _error(summary.ttft)),
        ("regret", f"{_total(summary.regret_seconds)}, {summary.regret_share:.1%}, {worse}"),
    ]
    if summary.auto_saves_seconds:
        rows.append(("auto had saved", f"{_total(summary.auto_saves_seconds)}, as predicted"))
    return rows


def worst_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Return the loads that took the longest beyond their prediction."""
    return [
        (pair.request_id, str(pair.line), milliseconds(pair.predicted), milliseconds(pair.measured))
        for pair in summary.worst
    ]


def write_report(summary: Summary, folder: Path) -> tuple[list[Path], str | None]:
    """Write ``decisions.json``, ``.html`` and ``.png`` into a folder, made if need be.

    Returns:
        the files written, and why there is no picture; None where there is one.

    Raises:
        ConfigError: the folder cannot be written.
    """
    picture = _picture(summary)
    html = page(summary, picture)
    written = write_files(summary.to_plain(), html, picture, folder, "decisions")
    return written, None if picture is not None else NO_PICTURES


def page(summary: Summary, picture: bytes | None) -> str:
    """Return one HTML page with everything in it, the picture included."""
    parts = ["".join(table((), rows(summary)) for rows in (count_rows, block_rows, error_rows))]
    if summary.worst:
        heading = "<h2>Loads that took the longest beyond their prediction</h2>"
        header = ("request", "line", "predicted", "measured")
        parts.append(heading + table(header, worst_rows(summary)))
    return html_page("Decisions", (REGRET_NOTE,), parts, picture)


def _total(seconds: float) -> str:
    return f"{seconds:,.1f} s" if abs(seconds) >= 10 else milliseconds(seconds)


def _error(errors: Errors | None) -> str:
    if errors is None:
        return "none was measured"
    return (
        f"median {errors.median:.1%}, p90 {errors.p90:.1%}, "
        f"bias {errors.bias:+.1%} ({errors.num:,} measured)"
    )


def _picture(summary: Summary) -> bytes | None:
    """Return a PNG of predictions and measurements; None without matplotlib."""
    figure = canvas()
    if figure is None:
        return None
    scatter, histogram = figure.subplots(1, 2)
    for name, colour in (("load", "C0"), ("ttft", "C1")):
        pairs = summary.pairs.get(name, ())
        if pairs:
            _draw_pairs(scatter, pairs, name, colour)
            errors = [pair.predicted / pair.measured - 1 for pair in pairs]
            bins = np.linspace(-1, 2, 61)
            histogram.hist(np.clip(errors, -1, 2), bins=bins, color=colour, alpha=0.6, label=name)
    if any(summary.pairs.values()):
        scatter.legend()
        histogram.legend()
    scatter.set(xlabel="predicted seconds", ylabel="measured seconds", title="predictions")
    scatter.grid(visible=True, which="both", alpha=0.3)
    histogram.set(xlabel="predicted / measured - 1", ylabel="decisions", title="errors")
    return png(figure)


def _draw_pairs(axes: Any, pairs: Sequence[Pair], name: str, colour: str) -> None:
    predicted = np.maximum([pair.predicted for pair in pairs], 1e-6)
    measured = np.array([pair.measured for pair in pairs])
    axes.loglog(predicted, measured, ".", color=colour, alpha=0.5, label=name)
    ends = [min(predicted.min(), measured.min()), max(predicted.max(), measured.max())]
    axes.loglog(ends, ends, "k--", linewidth=1)
