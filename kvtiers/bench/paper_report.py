"""Files that show a comparison on paper: JSON, a picture, and one page that needs no other file."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvtiers.bench.paper import PaperResult, TierResult
from kvtiers.model.errors import ConfigError

NO_PICTURES: Final = "no pictures: matplotlib is not installed; pip install 'kvtiers[plot]'"

_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}
th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #ddd}
th:first-child,td:first-child{text-align:left}
td.source{text-align:left;color:#666;font-size:13px}
.note{background:#fff6d9;padding:.5rem 1rem;border-left:4px solid #e0b400}
img{max-width:100%}
"""


def write_report(result: PaperResult, folder: Path, name: str) -> tuple[list[Path], str | None]:
    """Write ``NAME.json``, ``NAME.png`` and ``NAME.html`` into a folder, made if need be.

    Returns:
        the files written, and why there is no picture; None where there is one.

    Raises:
        ConfigError: the folder cannot be written.
    """
    picture = _picture(result)
    contents: dict[str, bytes] = {
        "json": (json.dumps(result.to_plain(), indent=2) + "\n").encode(),
        "html": page(result, picture).encode(),
    }
    if picture is not None:
        contents["png"] = picture
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, content in contents.items():
            path = folder / f"{name}.{suffix}"
            path.write_bytes(content)
            written.append(path)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write there: {error}") from error
    return written, None if picture is not None else NO_PICTURES


def page(result: PaperResult, picture: bytes | None) -> str:
    """Return one HTML page with everything in it, the picture included."""
    title = html.escape(f"Recompute or reload: {result.title}")
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
        f"<style>{_STYLE}</style><h1>{title}</h1>",
        *(f'<p class="note">{html.escape(note)}</p>' for note in result.notes),
        f"<p>{result.num_params / 1e9:.1f} billion weights in {result.plan.dtype}; "
        f"{result.kv_nbytes_per_token:,} bytes of KV a token and rank in {result.plan.kv_dtype}; "
        f"steps of {result.plan.max_tokens_per_step:,} tokens.</p>",
        _break_even_table(result),
    ]
    if picture is None:
        parts.append(f'<p class="note">{html.escape(NO_PICTURES)}</p>')
    else:
        encoded = base64.b64encode(picture).decode()
        parts.append(f'<img alt="curves" src="data:image/png;base64,{encoded}">')
    parts += [_tier_table(tier) for tier in result.tiers]
    parts += [_assumption_table(result), "</html>\n"]
    return "\n".join(parts)


def _break_even_table(result: PaperResult) -> str:
    rows = [
        (tier.title, "never" if tier.break_even_tokens is None else f"{tier.break_even_tokens:,}")
        for tier in result.tiers
    ]
    heading = "<h2>From which prefix length a reload is faster</h2>"
    return heading + _table(("tier", "tokens"), rows)


def _tier_table(tier: TierResult) -> str:
    header = ("tokens", "recompute", "reload", "gain", "chosen", "reloaded", "split", "split gain")
    rows = [
        (
            f"{point.num_tokens:,}",
            _ms(point.recompute_seconds),
            _ms(point.reload_seconds),
            f"{point.gain:.2f}x",
            _ms(point.chosen_seconds),
            f"{point.num_chosen_tokens:,}",
            _ms(point.split_seconds),
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
    return f"<h2>{html.escape(tier.title)}</h2>{text}{_table(header, rows)}"


def _assumption_table(result: PaperResult) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{figure.value:.4g}</td>"
        f'<td class="source">{html.escape(figure.source)}</td></tr>'
        for name, figure in result.assumptions.items()
    )
    model = f"<p>The model's sizes: {html.escape(result.model_source)}.</p>"
    return f"<h2>What this rests on</h2>{model}<table>{cells}</table>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "<table>" + line("th", header) + "".join(line("td", row) for row in rows) + "</table>"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _picture(result: PaperResult) -> bytes | None:
    """Return a PNG of the curves; None without matplotlib."""
    try:
        from matplotlib.figure import Figure as Canvas  # noqa: PLC0415 - an optional package
    except ImportError:
        return None
    canvas = Canvas(figsize=(11, 4.5), layout="constrained")
    ttft, gains = canvas.subplots(1, 2)
    _draw_ttft(ttft, result)
    _draw_gains(gains, result)
    canvas.suptitle(result.title)
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=110, metadata={"Software": "kvtiers"})
    return buffer.getvalue()


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
