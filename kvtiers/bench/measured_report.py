"""Files that show a measured comparison: JSON, a picture, one page that needs no other file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtiers.bench.judge import Comparison, Crossover, Verdict
from kvtiers.bench.measured_run import MeasuredResult
from kvtiers.bench.plan import RECOMPUTE
from kvtiers.observe.page import NO_PICTURES, canvas, milliseconds, png, table, write_files
from kvtiers.observe.page import page as whole_page


def write_measured_report(
    result: MeasuredResult, folder: Path, name: str = "bench"
) -> tuple[list[Path], str | None]:
    """Write ``NAME.json``, ``NAME.png`` and ``NAME.html`` into a folder, made if need be.

    Returns:
        the files written, and why there is no picture; None where there is one.

    Raises:
        ConfigError: the folder cannot be written.
    """
    picture = draw(result)
    written = write_files(result.to_plain(), page(result, picture), picture, folder, name)
    return written, _why_no_picture(result) if picture is None else None


def page(result: MeasuredResult, picture: bytes | None) -> str:
    """Return one HTML page with everything in it, the picture included."""
    plan, shape = result.plan, result.plan.shape
    sizes = (
        f"<p>{shape.num_layers} layers, hidden size {shape.hidden_size}, {shape.num_heads} query "
        f"and {shape.num_kv_heads} KV heads of {shape.head_size}, {shape.dtype}; "
        f"{shape.num_params / 1e6:,.1f} million weights, {shape.kv_nbytes_per_token:,} bytes of KV "
        f"a token; blocks of {plan.block_size} tokens; {plan.num_threads} threads; medians of "
        f"{plan.num_repeats} runs.</p>"
    )
    parts = [sizes, *([] if result.verdict is None else _verdict_parts(result.verdict))]
    title = f"Recompute or reload, measured: {plan.model_name} on {result.device}"
    return whole_page(title, result.notes, parts, picture, _why_no_picture(result))


def _why_no_picture(result: MeasuredResult) -> str:
    return NO_PICTURES if result.verdict is not None else "no picture: too little was measured"


def _verdict_parts(verdict: Verdict) -> list[str]:
    parts = []
    if verdict.median_error is not None:
        parts.append(
            f"<p>Median prediction error on lengths that were not fitted: "
            f"<b>{verdict.median_error:.1%}</b>; allowed are {verdict.allowed_error:.1%}, the "
            "larger of 10 % and 1.5 times the median distance of the repeats' quartiles.</p>"
        )
    parts += [
        "<h2>From which prompt length a reload is faster</h2>",
        table(("tier", "measured", "predicted"), [_crossover_row(c) for c in verdict.crossovers]),
        "<h2>Times to the first token</h2>",
        _comparison_table(verdict.comparisons),
        "<h2>What the planner's choice costs</h2>",
        "<p>Over the better of recompute and reload, as measured.</p>",
        table(
            ("tier", "tokens", "choice", "regret"),
            [
                (
                    r.tier,
                    f"{r.num_tokens:,}",
                    r.chosen,
                    "" if r.regret is None else f"{r.regret:.1%}",
                )
                for r in verdict.regrets
            ],
        ),
    ]
    if verdict.splits:
        parts += [
            "<h2>Loads inside the step that computes the rest</h2>",
            "<p>The first blocks come layer range by layer range while the rest of the prompt is "
            "computed; both pure choices were measured in turn by the same means.</p>",
            table(
                ("tokens", "loaded", "recompute", "reload", "split", "gain"),
                [
                    (
                        f"{s.num_tokens:,}",
                        f"{s.num_loaded_blocks} of {s.num_blocks} blocks",
                        *map(
                            milliseconds, (s.recompute_seconds, s.reload_seconds, s.split_seconds)
                        ),
                        f"{s.gain:.2f}x",
                    )
                    for s in verdict.splits
                ],
            ),
        ]
    coefficients = [(name, f"{value:.4g}") for name, value in verdict.calibrated.items()]
    return [*parts, "<h2>What was learnt</h2>", table(("coefficient", "value"), coefficients)]


def _crossover_row(crossover: Crossover) -> tuple[str, str, str]:
    measured, predicted = crossover.measured_tokens, crossover.predicted_tokens
    return (
        crossover.tier,
        "never" if measured is None else f"{measured:,.0f}",
        "never" if predicted is None else f"{predicted:,}",
    )


def _comparison_table(comparisons: Sequence[Comparison]) -> str:
    rows = "".join(
        f'<tr class="{"fitted" if c.fitted else "judged"}">'
        f"<td>{html.escape(c.way)}</td><td>{c.num_tokens:,}</td>"
        f"<td>{milliseconds(c.measured_seconds)}</td><td>{c.spread:.1%}</td>"
        f"<td>{milliseconds(c.predicted_seconds)}</td><td>{c.error:.1%}</td>"
        f"<td>{'fitted' if c.fitted else 'judged'}</td></tr>"
        for c in comparisons
    )
    header = "".join(
        f"<th>{name}</th>"
        for name in ("way", "tokens", "measured", "spread", "predicted", "error", "")
    )
    return f"<table><tr>{header}</tr>{rows}</table>"


def draw(result: MeasuredResult) -> bytes | None:
    """Return a PNG of the curves; None without matplotlib, or without a verdict."""
    figure = canvas()
    if figure is None or result.verdict is None:
        return None
    times, errors = figure.subplots(1, 2)
    ways = (RECOMPUTE, *result.plan.tiers)
    for idx, way in enumerate(ways):
        rows = [c for c in result.verdict.comparisons if c.way == way]
        _draw_way(times, rows, f"C{idx}")
        _draw_errors(errors, rows, f"C{idx}")
    times.set(xscale="log", yscale="log", xlabel="tokens of the prompt")
    times.set(ylabel="seconds to the first token", title="measured (points) and predicted (lines)")
    errors.axhline(100 * result.verdict.allowed_error, color="k", linestyle="--", label="allowed")
    errors.set(xscale="log", xlabel="tokens of the prompt", ylabel="prediction error, %")
    errors.set(title="hollow: fitted to")
    for axes in (times, errors):
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend()
    figure.suptitle(f"{result.plan.model_name} on {result.device}")
    return png(figure)


def _draw_way(axes: Any, rows: Sequence[Comparison], colour: str) -> None:
    if not rows:
        return
    lengths = [row.num_tokens for row in rows]
    axes.plot(lengths, [row.predicted_seconds for row in rows], "-", color=colour)
    for fitted in (True, False):
        shown = [row for row in rows if row.fitted is fitted]
        axes.plot(
            [row.num_tokens for row in shown],
            [row.measured_seconds for row in shown],
            "o",
            color=colour,
            fillstyle="none" if fitted else "full",
            label=None if fitted else rows[0].way,
        )


def _draw_errors(axes: Any, rows: Sequence[Comparison], colour: str) -> None:
    for fitted in (True, False):
        shown = [row for row in rows if row.fitted is fitted]
        axes.plot(
            [row.num_tokens for row in shown],
            [100 * row.error for row in shown],
            "o",
            color=colour,
            fillstyle="none" if fitted else "full",
            label=None if fitted or not rows else rows[0].way,
        )
