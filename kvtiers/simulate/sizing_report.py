"""Files that show a sizing: JSON, its curves, one page that needs no other file."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from kvtiers.observe.page import NO_PICTURES, canvas, png, table, write_files
from kvtiers.observe.page import page as whole_page
from kvtiers.simulate.sizing import Sizing, Trial

_SPEED = ("TTFT p50", "TTFT p90", "output tokens/s", "ITL p90")
HEADER = ("KV", "tiers", "policy", "price", *_SPEED, "hit rate", "NVMe a day", "meets the goal")


def trial_rows(sizing: Sizing) -> list[tuple[str, ...]]:
    """Return one row a replay, as `HEADER` says."""
    return [_row(trial) for trial in sizing.trials]


def sentences(sizing: Sizing) -> list[str]:
    """Return the answer in words."""
    plan, curve = sizing.plan, sizing.curve
    first = plan.kv_dtypes[0]
    per_token = sizing.nbytes_per_token.get(first)
    said = [f"Goal: {plan.goal}."]
    chosen = sizing.chosen.get(first)
    if chosen is None:
        said.append("No size that was replayed meets it.")
    else:
        said.append(f"Cheapest found: {chosen.size} ({_row(chosen)[5]} p90 TTFT).")
    said.append(f"What binds: {sizing.limit}.")
    if per_token is not None:
        gib = 2**30
        said.append(
            f"Knee of the hit curve: {curve.knee_tokens / 1e6:,.2f} million tokens "
            f"({curve.knee_tokens * per_token / gib:,.0f} GiB); all that is ever used again: "
            f"{curve.working_set_tokens / 1e6:,.2f} million "
            f"({curve.working_set_tokens * per_token / gib:,.0f} GiB). "
            f"An infinite cache hits {sizing.infinite_hit_rate:.1%}."
        )
    said += _dtype_sentences(sizing)
    if not sizing.complete:
        said.append("It was stopped early: sizes that were not replayed may be cheaper.")
    return said


def _dtype_sentences(sizing: Sizing) -> list[str]:
    """Return what another data type of the KV cache changes."""
    plan, said = sizing.plan, []
    bare = {t.kv_dtype: t for t in sizing.trials if not t.size.dram_nbytes}
    first = plan.kv_dtypes[0]
    for dtype in plan.kv_dtypes[1:]:
        if dtype not in bare or first not in bare:
            continue
        text = (
            f"With a {dtype} cache, p90 TTFT without tiers is {_row(bare[dtype])[5]} instead of "
            f"{_row(bare[first])[5]}"
        )
        other = sizing.chosen.get(dtype)
        if other is not None:
            text += f"; the goal needs {other.size} ({_row(other)[5]})"
        else:
            text += "; no size that was replayed meets the goal"
        said.append(text + ".")
    return said


def write_sizing(sizing: Sizing, folder: Path, name: str) -> tuple[list[Path], str | None]:
    """Write ``NAME.json``, ``NAME.png`` and ``NAME.html`` into a folder, made if need be.

    Returns:
        the files written, and why there is no picture; None where there is one.

    Raises:
        ConfigError: the folder cannot be written.
    """
    picture = draw(sizing)
    written = write_files(sizing.to_plain(), page(sizing, picture), picture, folder, name)
    return written, None if picture is not None else NO_PICTURES


def page(sizing: Sizing, picture: bytes | None) -> str:
    """Return one HTML page with everything in it, the picture included."""
    answer = "".join(f"<p>{html.escape(text)}</p>" for text in sentences(sizing))
    if sizing.yaml is not None:
        answer += f"<pre>{html.escape(sizing.yaml)}</pre>"
    parts = [answer, "<h2>What was replayed</h2>" + table(HEADER, trial_rows(sizing))]
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
    axes.semilogx(curve.tokens, curve.rates, label="one LRU cache of this size")
    axes.axhline(sizing.infinite_hit_rate, color="k", linestyle="--", label="infinite cache")
    axes.axvline(curve.knee_tokens, color="C3", linestyle=":", label="knee")
    axes.set(xlabel="tokens", ylabel="hits, share of prompt tokens", title="hit rate")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def _draw_times(axes: Any, sizing: Sizing) -> None:
    for idx, dtype in enumerate(sizing.plan.kv_dtypes):
        mine = [t for t in sizing.trials if t.kv_dtype == dtype and t.replay.ttft.p90]
        colour = f"C{idx}"
        points = sorted((t.cost, t.replay.ttft.p90) for t in mine)
        costs, seconds = [cost for cost, _ in points], [ttft for _, ttft in points]
        axes.plot(costs, seconds, "o", color=colour, label=f"{dtype}, replayed")
        chosen = sizing.chosen.get(dtype)
        if chosen is not None:
            axes.plot([chosen.cost], [chosen.replay.ttft.p90], "*", color=colour, markersize=16)
    limit = sizing.plan.goal.limit_seconds(
        sizing.trials[0].replay.ttft.p90 if sizing.trials else None
    )
    if limit is not None:
        axes.axhline(limit, color="k", linestyle="--", label="goal")
    axes.set(xlabel="price of the tiers", ylabel="seconds", title="p90 TTFT (star: chosen)")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def _row(trial: Trial) -> tuple[str, ...]:
    found = trial.replay
    written = found.written_nbytes_per_day.get("nvme")

    def seconds(value: float | None) -> str:
        return (
            "-" if value is None else f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"
        )

    return (
        trial.kv_dtype,
        str(trial.size),
        trial.policy,
        f"{trial.cost:,.0f}",
        seconds(found.ttft.p50),
        seconds(found.ttft.p90),
        f"{found.output_tokens_per_second:,.0f}",
        seconds(found.itl.p90),
        f"{found.tokens.hit_rate:.1%}",
        "-" if written is None else f"{written / 1e12:,.1f} TB",
        "yes" if trial.met else "no",
    )
