"""One table of what was measured on a device: each line with its target, where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_machine import KIB, MIB

Rows = Sequence[Mapping[str, Any]]
WAYS = {"gather": "out", "scatter": "in"}


@dataclass(frozen=True)
class Line:
    """One result.

    Attributes:
        value: as text. target: as text, "" where there is none. holds: whether it was met.
    """

    what: str
    value: str
    target: str = ""
    holds: bool | None = None


def lines_of(report: Mapping[str, Any]) -> list[Line]:
    """Return the table's lines, in the order of the sections."""
    lines: list[Line] = []
    for name, section in report["sections"].items():
        if isinstance(section, str):
            lines.append(Line(name, section, "", None if section.startswith("not ") else False))
        else:
            lines += LINES[name](section)
    return lines


def table(lines: Sequence[Line]) -> str:
    """Return the table as Markdown."""
    marks = {True: "yes", False: "**NO**", None: ""}
    rows = [(line.what, line.value, line.target, marks[line.holds]) for line in lines]
    rows = [("what", "measured", "target", "holds"), ("---",) * 4, *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def at_least(what: str, value: float, target: float | None = None, form: str = ".2f") -> Line:
    if target is None:
        return Line(what, format(value, form))
    return Line(what, format(value, form), f">= {target:{form}}", value >= target)


def wrong_lines(title: str) -> Callable[[Rows], Iterator[Line]]:
    """Return how to sum up checks that list what was wrong."""

    def lines(rows: Rows) -> Iterator[Line]:
        bad = [row for row in rows if row["wrong"]]
        yield Line(f"{title}: wrong of {len(rows)}", str(len(bad)), "0", not bad)
        for row in bad:
            yield Line(f"{title}: {row['layout']}", "; ".join(row["wrong"]), "", False)

    return lines


def peak_lines(rows: Rows) -> Iterator[Line]:
    for way, value in rows[0].items():
        yield Line(f"peak {way}, GB/s: one pinned copy", f"{value:.1f}")


def piece_lines(rows: Rows) -> Iterator[Line]:
    """The best route of the largest batch, and of the smallest, for each piece and direction."""
    targets = {2 * MIB: 0.95, 16 * KIB: 0.6}
    for piece in sorted({row["piece_nbytes"] for row in rows}):
        for direction, way in WAYS.items():
            mine = [r for r in rows if (r["piece_nbytes"], r["direction"]) == (piece, direction)]
            for row, target in ((mine[-1], targets.get(piece)), (mine[0], None)):
                best = max(("dma", "direct", "staged"), key=lambda route, row=row: row[route])
                what = f"{size(piece)} x {row['num_pieces']} {way}, of peak: {best}"
                yield at_least(what, row[best], target)


def thread_block_lines(rows: Rows) -> Iterator[Line]:
    for row in rows:
        ways = [f"{way} {row[f'staged {direction}']:.2f}" for direction, way in WAYS.items()]
        ways += [f"{way} {row[f'direct {direction}']:.2f}" for direction, way in WAYS.items()]
        what = f"{row['num_thread_blocks']} thread blocks, tiles of {row['tile_nbytes']}, of peak"
        yield Line(what, f"staged {', '.join(ways[:2])}; direct {', '.join(ways[2:])}")


def both_lines(rows: Rows) -> Iterator[Line]:
    for row in rows:
        what = f"both ways over one way, {size(row['piece_nbytes'])} {row['route']}"
        yield at_least(what, row["both_of_one"], 1.6)
        yield Line(f"{what}: two plain copies", f"{row['peak_both_of_one']:.2f}")


def beside_lines(rows: Rows) -> Iterator[Line]:
    for row in rows:
        what = f"products beside {row['route']} {size(row['piece_nbytes'])} {row['ways']}"
        value = f"square {row['square']:+.1%}, thin {row['thin']:+.1%}"
        value += f", {row['copied_gb_s']:.1f} GB/s"
        if row["route"] == "dma":
            yield Line(what, value, "square < 2%", row["square"] < 0.02)
        else:
            yield Line(what, value)


def call_lines(rows: Rows) -> Iterator[Line]:
    for row in rows:
        yield Line(row["call"], f"{row['us']:.1f} us")


def start_lines(rows: Rows) -> Iterator[Line]:
    for row in rows:
        what = f"start-up with {size(row['piece_nbytes'])}: check, measure"
        value = f"{row['check_seconds']:.2f} s, {row['measure_seconds']:.2f} s; {row['routes']}"
        holds = not row["wrong"] and row["measure_seconds"] < 2
        yield Line(what, "; ".join([value, *row["wrong"]]), "right, < 2 s", holds)


def torch_lines(rows: Rows) -> Iterator[Line]:
    for row in rows:
        what = f"through torch, {size(row['piece_nbytes'])} {WAYS[row['direction']]}, of peak"
        yield at_least(what, row["of_peak"])


def pipeline_lines(rows: Rows) -> Iterator[Line]:
    for row in rows:
        yield at_least("disk to device, of its slower stage", row["of_slower_stage"], 0.9)
        speeds = ", ".join(f"{n} {row[f'{n}_gb_s']:.2f}" for n in ("disk", "copies", "pipeline"))
        yield Line("disk to device, GB/s", "; ".join([speeds, *row["wrong"]]), "right",
                   not row["wrong"])  # fmt: skip


def prefill_lines(rows: Rows) -> Iterator[Line]:
    for row in rows:
        if "tier" in row:
            tokens = row["reload_from_tokens"]
            value = f"{tokens} tokens" if tokens is not None else "never"
            yield Line(f"reload wins from, {row['tier']} at {row['link_gb_s']:.1f} GB/s", value)
            continue
        error = row["error_unseen"]
        text = "" if error is None else f"; fit of the others {error:+.1%}"
        value = f"{row['seconds'] * 1e3:.1f} ms, {row['tflop_s']:.0f} TFLOP/s{text}"
        yield Line(f"prefill of {row['tokens']} tokens, 8B layers", value)


def tool_lines(rows: Rows) -> Iterator[Line]:
    for row in rows:
        yield Line(f"compute-sanitizer --tool {row['tool']}", row["said"], "0 errors", row["clean"])


LINES: dict[str, Callable[[Rows], Iterator[Line]]] = {
    "bytes": wrong_lines("bytes of layouts, by all routes"),
    "order": wrong_lines("order behind a busy stream"),
    "peak": peak_lines,
    "pieces": piece_lines,
    "both ways": both_lines,
    "beside compute": beside_lines,
    "disk to device": pipeline_lines,
    "prefill": prefill_lines,
    "start-up": start_lines,
    "calls": call_lines,
    "torch": torch_lines,
    "thread blocks": thread_block_lines,
    "sanitizers": tool_lines,
}
