"""Files that show a comparison on paper: JSON, a picture, and one page that needs no other file."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtiers.bench.paper import PaperResult, TierResult
from kvtiers.observe.page import NO_PICTURES, canvas, milliseconds, png, table, write_files
from kvtiers.observe.page import page as whole_page


def write_report(result: PaperResult, folder: Path, name: str) -> tuple[list[Path], str | None]:
    """Write ``NAME.json``, ``NAME.png`` and ``NAME.html`` into a folder, made if need be.

    Returns:
        the files written, and why there is no picture; None where there is one.

    Raises:
        ConfigError: the folder cannot be written.
    """
    picture = _picture(result)
    written = write_files(result.to_plain(), page(result, picture), picture, folder, name)
    return written, None if picture is not None else NO_PICTURES


def page(result: PaperResult, picture: bytes | None) -> str:
    """Return one HTML page with everything in it, the picture included."""
    sizes = (
        f"<p>{result.num_params / 1e9:.1f} billion weights in {result.plan.dtype}; "
        f"{result.kv_nbytes_per_token:,} bytes of KV a token and rank in {result.plan.kv_dtype}; "
        f"steps of {result.plan.max_tokens_per_step:,} tokens.</p>" + _break_even_table(result)
    )
    parts = [sizes, *map(_tier_table, result.tiers), _assumption_table(result)]
    return whole_page(f"Recompute or reload: {result.title}", result.notes, parts, picture)


def _break_even_table(result: PaperResult) -> str:
    rows = [
        (tier.title, "never" if tier.break_even_tokens is None else f"{tier.break_even_tokens:,}")
        for tier in result.tiers
    ]
    heading = "<h2>From which prefix length a reload is faster</h2>"
    return heading + table(("tier", "tokens"), rows)


def _tier_table(tier: TierResult) -> str:
    header = ("tokens", "recompute", "reload", "gain", "chosen", "reloaded", "split", "split gain")
    rows = [
        (
            f"{point.num_tokens:,}",
            milliseconds(point.recompute_seconds),
            milliseconds(point.reload_seconds),
            f"{point.gain:.2f}x",
            milliseconds(point.chosen_seconds),
            f"{point.num_chosen_tokens:,}",
            milliseconds(point.split_seconds),
            f"{point.split_gain:.2f}x",
        )
        for point in tier.points
    ]
    text = (
        "<p>Time to the first token of a prompt that the tier holds but for its last block. "
        "<em>Chosen</em>: load, then compute, as the planner cuts it. <em>Split</em>: loads that "
        "come layer by layer inside the step that computes the rest, and their gain over the "
        "better of recompute and reload.</p>"
    )
    return f"<h2>{html.escape(tier.title)}</h2>{text}{table(header, rows)}"


def _assumption_table(result: PaperResult) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{figure.value:.4g}</td>"
        f'<td class="source">{html.escape(figure.source)}</td></tr>'
        for name, figure in result.assumptions.items()
    )
    model = f"<p>The model's sizes: {html.escape(result.model_source)}.</p>"
    return f"<h2>What this rests on</h2>{model}<table>{cells}</table>"


def _picture(result: PaperResult) -> bytes | None:
    """Return a PNG of the curves; None without matplotlib."""
    figure = canvas()
    if figure is None:
        return None
    ttft, gains = figure.subplots(1, 2)
    _draw_ttft(ttft, result)
    _draw_gains(gains, result)
    figure.suptitle(result.title)
    return png(figure)


def _draw_ttft(axes: Any, result: PaperResult) -> None:
    lengths = result.plan.lengths
    recompute = [point.recompute_seconds for point in result.tiers[0].points]
    axes.loglog(lengths, recompute, "k--", label="recompute")
    for tier in result.tiers:
        axes.loglog(lengths, [p.reload_seconds for p in tier.points], "o-", label=tier.title)
    axes.set(xlabel="tokens", ylabel="seconds to the first token", title="recompute and reload")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()


def _draw_gains(axes: Any, result: PaperResult) -> None:
    lengths = result.plan.lengths
    for colour, tier in zip(_colours(), result.tiers, strict=False):
        gain = [p.recompute_seconds / p.reload_seconds for p in tier.points]
        split = [p.recompute_seconds / p.split_seconds for p in tier.points]
        axes.loglog(lengths, gain, "o-", color=colour, label=tier.title)
        axes.loglog(lengths, split, ":", color=colour)
    axes.axhline(1.0, color="k", linestyle="--")
    axes.set(xlabel="tokens", ylabel="times faster than recompute", title="gain (dotted: split)")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()


def _colours() -> Iterator[str]:
    return (f"C{idx}" for idx in range(10**6))
