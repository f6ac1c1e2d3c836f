"""What every report of a comparison is made of: one page without other files, and its picture."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvtiers.model.errors import ConfigError
from kvtiers.observe.files import file_name, write_whole

NO_PICTURES: Final = "no pictures: matplotlib is not installed; pip install 'kvtiers[bench]'"

_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}
th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #ddd}
th:first-child,td:first-child{text-align:left}
td.source{text-align:left;color:#666;font-size:13px}
.note{background:#fff6d9;padding:.5rem 1rem;border-left:4px solid #e0b400}
.judged{font-weight:600}
img{max-width:100%}
"""


def page(
    title: str,
    notes: Sequence[str],
    parts: Sequence[str],
    picture: bytes | None,
    why_none: str = NO_PICTURES,
) -> str:
    """Return an HTML page with everything in it, the picture included.

    Args:
        title, notes: plain text. parts: HTML; the picture comes after the first of them.
        picture: a PNG; None: there is none, and `why_none` is said.
    """
    shown = note(why_none) if picture is None else embedded(picture)
    heading = html.escape(title)
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{heading}</title>',
            f"<style>{_STYLE}</style><h1>{heading}</h1>",
            *map(note, notes),
            *parts[:1],
            shown,
            *parts[1:],
            "</html>\n",
        ]
    )


def note(text: str) -> str:
    """Return a paragraph that stands out."""
    return f'<p class="note">{html.escape(text)}</p>'


def embedded(picture: bytes) -> str:
    """Return a PNG as an element that holds it."""
    encoded = base64.b64encode(picture).decode()
    return f'<img alt="curves" src="data:image/png;base64,{encoded}">'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of plain text."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "<table>" + line("th", header) + "".join(line("td", row) for row in rows) + "</table>"


def milliseconds(seconds: float) -> str:
    """Return seconds as people read them in a table."""
    return f"{seconds * 1e3:,.1f} ms"


def canvas() -> Any | None:
    """Return an empty figure of matplotlib for two plots; None where it is not installed."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an optional package
    except ImportError:
        return None
    return Figure(figsize=(11, 4.5), layout="constrained")


def png(figure: Any) -> bytes:
    """Return a figure as a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": "kvtiers"})
    return buffer.getvalue()


def write_files(
    plain: Mapping[str, Any], page: str, picture: bytes | None, folder: Path, name: str
) -> list[Path]:
    """Write ``NAME.json``, ``NAME.html`` and, where there is a picture, ``NAME.png``.

    Those of an earlier time are replaced, all together; without a picture there is none left.

    Args:
        plain: what the JSON holds. folder: made if need be.

    Raises:
        ConfigError: the folder cannot be written.
    """
    contents = {
        "json": (json.dumps(plain, indent=2) + "\n").encode(),
        "html": page.encode("utf-8", "backslashreplace"),
    }
    if picture is not None:
        contents["png"] = picture
    stem = file_name(name)
    written = {folder / f"{stem}.{suffix}": content for suffix, content in contents.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(written)
        if picture is None:
            (folder / f"{stem}.png").unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write there: {error.strerror}") from error
    return list(written)
