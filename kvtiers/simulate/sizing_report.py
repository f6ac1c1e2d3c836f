"""Files that show a sizing: JSON, its curves, one page that needs no other file."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtiers.observe.page import NO_PICTURES, canvas, png, table, write_files
from kvtiers.observe.page import page as whole_page
from kvtiers.simulate.goal import GoalKind
from kvtiers.simulate.report import asked_rows
from kvtiers.simulate.sizing import Sizing
from kvtiers.simulate.sizing_answer import sentences
from kvtiers.simulate.sizing_words import HEADER, curve_rows, dtype_rows, trial_rows


def plain(sizing: Sizing, about: Mapping[str, object]) -> dict[str, Any]:
    """Return plain data for JSON; see `write_sizing`."""
    return {"about": dict(about), **sizing.to_plain()}


def write_sizing(
    sizing: Sizing, folder: Path, name: str, about: Mapping[str, object]
) -> tuple[list[Path], str | None]:
    """Write ``NAME.json``, ``NAME.png`` and ``NAME.html`` into a folder, made if need be.

    Args:
        about: what was asked for, by name, so that it can be asked for again.

    Returns:
        the files written, and why there is no picture; None where there is one.

    Raises:
        ConfigError: the folder cannot be written.
    """
    picture = draw(sizing.final)
    written = write_files(plain(sizing, about), page(sizing, picture, about), picture, folder, name)
    return written, None if picture is not None else NO_PICTURES


def page(sizing: Sizing, picture: bytes | None, about: Mapping[str, object]) -> str:
    """Return one HTML page with everything in it, the picture included; see `write_sizing`."""
    answer = "".join(f"<p>{html.escape(text)}</p>" for text in sentences(sizing))
    final = sizing.final
    if final.yaml is not None:
        answer += f"<pre>{html.escape(final.yaml)}</pre>"
    curve = curve_rows(final)
    for it in (sizing, sizing.more):
        if it is not None:
            dtypes = dtype_rows(it)
            answer += table(dtypes[0], dtypes[1:])
    parts = [
        answer,
        "<h2>What was replayed</h2>" + table(HEADER, trial_rows(sizing)),
        "<h2>What larger tiers hit</h2>" + table(curve[0], curve[1:]),
        "<h2>What was asked for</h2>" + table(("", ""), asked_rows(about)),
    ]
    title = f"Tiers for {sizing.plan.trace.name}: {sizing.plan.machine.title}"
    said = ["Predicted: nothing was computed or copied."]
    return whole_page(title, said, parts, picture)


def draw(sizing: Sizing) -> bytes | None:
    """Return a PNG of the curves; None without matplotlib."""
    figure = canvas()
    if figure is None:
        return None
    hits, times = figure.subplots(1, 2)
    _draw_hits(hits, sizing)
    _draw_times(times, sizing)
    return png(figure)


def _draw_hits(axes: Any, sizing: Sizing) -> None:
    curve = sizing.curve
    per_gib = sizing.nbytes_per_token[sizing.plan.kv_dtypes[0]] / 2**30
    axes.semilogx([num * per_gib for num in curve.tokens], curve.rates, label="lru")
    for other in sizing.policy_curves:
        if other.policy != "lru":
            axes.plot(
                [num * per_gib for num in other.tokens], other.rates, ".-", label=other.policy
            )
    axes.axhline(sizing.infinite_hit_rate, color="k", linestyle="--", label="infinite cache")
    goal = sizing.plan.goal
    if goal.kind is GoalKind.HIT_RATE:
        axes.axhline(goal.value, color="k", linestyle="-.", label="goal")
    if curve.knee_tokens:
        axes.axvline(curve.knee_tokens * per_gib, color="C3", linestyle=":", label="knee of lru")
    axes.set(
        xlabel=f"GiB of one tier, {sizing.plan.kv_dtypes[0]}",
        ylabel="hits, share of prompt tokens",
        title="hit rate"
        + (f", each of {sizing.num_engines} engines" if sizing.num_engines > 1 else ""),
        ylim=(0, None),
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")


def _draw_times(axes: Any, sizing: Sizing) -> None:
    for idx, dtype in enumerate(sizing.plan.kv_dtypes):
        mine = [t for t in sizing.trials if t.kv_dtype == dtype and t.replay.ttft.p90]
        colour = f"C{idx}"
        points = sorted((t.cost, t.replay.ttft.p90) for t in mine)
        costs, seconds = [cost for cost, _ in points], [ttft for _, ttft in points]
        axes.plot(costs, seconds, "o", color=colour, label=f"{dtype}, replayed")
        chosen = sizing.answer(dtype)
        if chosen is not None:
            size = max(6, 20 - 8 * idx)  # one over another, both are seen
            axes.plot([chosen.cost], [chosen.replay.ttft.p90], "*", color=colour, markersize=size)
    limit = sizing.plan.goal.limit_seconds(
        sizing.trials[0].replay.ttft.p90 if sizing.trials else None
    )
    if limit is not None:
        axes.axhline(limit, color="k", linestyle="--", label="goal")
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xlim(-1, 2 * max((t.cost for t in sizing.trials), default=10.0))
    of = f" of all {sizing.num_engines} engines" if sizing.num_engines > 1 else ""
    axes.set(
        xlabel=f"price of the tiers{of}",
        ylabel="seconds",
        title="p90 TTFT (star: chosen)",
        ylim=(0, None),
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
