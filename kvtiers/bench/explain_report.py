"""Files that show a log of decisions: pictures, and one page that needs no other file."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtiers.bench.explain import Errors, Pair, Summary
from kvtiers.bench.explain_words import milliseconds, short
from kvtiers.model.errors import ConfigError

NO_PICTURES: Final = "no pictures: matplotlib is not installed; pip install 'kvtiers[bench]'"
REGRET_NOTE: Final = (
    "Regret is an estimate: what was chosen, with its load as measured, against what was "
    "predicted of the alternatives, which nobody tried."
)

Rows = list[tuple[str, str]]

_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}
th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #ddd}
th:first-child,td:first-child{text-align:left}
.note{background:#fff6d9;padding:.5rem 1rem;border-left:4px solid #e0b400}
img{max-width:100%}
"""


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
    contents = {
        "json": (json.dumps(summary.to_plain(), indent=2) + "\n").encode(),
        "html": page(summary, picture).encode(),
    }
    if picture is not None:
        contents["png"] = picture
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, content in contents.items():
            path = folder / f"decisions.{suffix}"
            path.write_bytes(content)
            written.append(path)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write there: {error}") from error
    return written, None if picture is not None else NO_PICTURES


def page(summary: Summary, picture: bytes | None) -> str:
    """Return one HTML page with everything in it, the picture included."""
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Decisions</title>',
        f"<style>{_STYLE}</style><h1>Decisions</h1>",
        *(_table((), rows(summary)) for rows in (count_rows, block_rows, error_rows)),
        f'<p class="note">{html.escape(REGRET_NOTE)}</p>',
    ]
    if picture is None:
        parts.append(f'<p class="note">{html.escape(NO_PICTURES)}</p>')
    else:
        encoded = base64.b64encode(picture).decode()
        parts.append(f'<img alt="predicted and measured" src="data:image/png;base64,{encoded}">')
    if summary.worst:
        parts.append("<h2>Loads that took the longest beyond their prediction</h2>")
        parts.append(_table(("request", "line", "predicted", "measured"), worst_rows(summary)))
    return "\n".join([*parts, "</html>\n"])


def _total(seconds: float) -> str:
    return f"{seconds:,.1f} s" if abs(seconds) >= 10 else milliseconds(seconds)


def _error(errors: Errors | None) -> str:
    if errors is None:
        return "none was measured"
    return (
        f"median {errors.median:.1%}, p90 {errors.p90:.1%}, "
        f"bias {errors.bias:+.1%} ({errors.num:,} measured)"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    top = line("th", header) if header else ""
    return "<table>" + top + "".join(line("td", row) for row in rows) + "</table>"


def _picture(summary: Summary) -> bytes | None:
    """Return a PNG of predictions and measurements; None without matplotlib."""
    try:
        from matplotlib.figure import Figure as Canvas  # noqa: PLC0415 - an optional package
    except ImportError:
        return None
    canvas = Canvas(figsize=(11, 4.5), layout="constrained")
    scatter, histogram = canvas.subplots(1, 2)
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
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=110, metadata={"Software": "kvtiers"})
    return buffer.getvalue()


def _draw_pairs(axes: Any, pairs: Sequence[Pair], name: str, colour: str) -> None:
    predicted = np.maximum([pair.predicted for pair in pairs], 1e-6)
    measured = np.array([pair.measured for pair in pairs])
    axes.loglog(predicted, measured, ".", color=colour, alpha=0.5, label=name)
    ends = [min(predicted.min(), measured.min()), max(predicted.max(), measured.max())]
    axes.loglog(ends, ends, "k--", linewidth=1)
