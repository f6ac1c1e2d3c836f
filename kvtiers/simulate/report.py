"""Files that show replays: JSON, a picture, one page that needs no other file."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtiers.model.config_yaml import write_yaml
from kvtiers.model.units import counted, format_size
from kvtiers.observe.page import NO_PICTURES, canvas, png, table, write_files
from kvtiers.observe.page import page as whole_page
from kvtiers.simulate.replay_result import Replay

LONGEST: Final = (
    "a sequence may not be longer (--max-model-len; without it, as the KV pool holds above the "
    "watermark)"
)
_UNITS: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SHORT_SECONDS: Final = 600.0  # a shorter replay says little about a day
_FEW: Final = 0.01  # share of prompts below which it does not matter that they cannot be hit
_NOT_KEPT: Final = (  # how a reason begins, before the store's name if any, and its meaning
    ("no_room_", "{} was full of what it was writing or reading"),
    ("no_room", "DRAM was full of blocks on their way: it is too small"),
    ("unwritten", "DRAM needed their room before a store had them; lower watermarks help"),
    ("not_admitted", "a store takes what is seen again only"),
    ("over_budget_", "the write budget of {} was spent"),
    ("off_", "{} was not used: its writes kept failing, or took too long"),
)
_NOT_MOVED: Final = (  # how an outcome begins, and its meaning
    ("missing", "they had been evicted by then"),
    ("timed_out", "they did not begin in time, and were given up"),
    ("full", "a store had no room"),
)
_TIMES: Final = {
    "ttft": "TTFT",
    "wait": "queued",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "end to end",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One number of several replays.

    Attributes:
        cells: one a replay. changes: of all but the first, against it; "" where that says nothing.
    """

    name: str
    cells: tuple[str, ...]
    changes: tuple[str, ...]


def rows(replays: Sequence[Replay]) -> list[Row]:
    """Return the numbers that people compare, the same ones for every replay."""
    marks = [(name, mark) for name in ("ttft", "itl", "e2e") for mark in ("p50", "p90", "p99")]
    marks.insert(6, ("tpot", "p90"))
    marks.insert(3, ("wait", "p90"))
    found = [
        _row(f"{_TIMES[name]} {mark}", replays, _percentile(name, mark), _seconds)
        for name, mark in marks
    ]
    plain: list[tuple[str, Callable[[Replay], float | None], Callable[[float], str]]] = [
        ("queued, share of all TTFT", _queued, _share),
        ("output tokens/s", lambda r: r.output_tokens_per_second, _count),
        ("prompt tokens/s", lambda r: r.prompt_tokens_per_second, _count),
        ("hit rate", lambda r: r.tokens.hit_rate, _share),
    ]
    tiers = list(dict.fromkeys(tier for replay in replays for tier in replay.tokens.hits))
    plain += [(f"hits in {tier}", _hits(tier), _share) for tier in tiers]
    plain += [
        ("computed", lambda r: r.tokens.computed / max(1, r.tokens.prompt), _share),
        ("infinite cache", lambda r: r.infinite_hit_rate, _share),
        ("prefill saved by hits, in all", lambda r: r.saved_seconds, _seconds),
        ("preemptions", lambda r: r.num_preemptions, _count),
        ("of these swaps", lambda r: r.num_swaps, _count),
        ("recompute avoided, tokens", lambda r: r.num_reloaded_tokens, _count),
        ("recompute caused, tokens", lambda r: r.num_recomputed_tokens, _count),
    ]
    found += [_row(name, replays, get, show) for name, get, show in plain]
    stores = list(dict.fromkeys(name for replay in replays for name in replay.written_nbytes))
    found += [
        _row(f"written to {name}, a device and day", replays, _written(name), _size)
        for name in stores
    ]
    return found


def notes(replay: Replay) -> list[str]:
    """Return what a reader should know of a replay."""
    found = []
    if not replay.complete:
        what = "interrupted" if replay.interrupted else "stopped (--max-seconds)"
        found.append(f"It was {what} before every request was served: later ones are missing.")
    if replay.num_skipped:
        found.append(
            f"{counted(replay.num_skipped, 'request')} of more than {replay.longest:,} tokens, "
            f"prompt and output, {_was(replay.num_skipped)} skipped: {LONGEST}."
        )
    if replay.num_warmup:
        first = counted(replay.num_warmup, "request")
        found.append(f"The first {first} only filled the caches.")
    found += [*short_prompts(replay), *_queue(replay)]
    block = f"block of {replay.block_size:,} tokens"
    for reason, num in replay.dropped.items():
        why = _why(reason, _NOT_KEPT, has_stores=bool(replay.written_nbytes))
        what = "not written back" if reason == "unwritten" else "not offloaded"
        found.append(f"{counted(num, block)} {_was(num)} {what} ({reason}){why}.")
    if short_day(replay):
        found.append(
            f"Bytes a day are those of {replay.seconds:,.0f} s, times what is missing to a day."
        )
    for outcome, num in replay.failed.items():
        why = _why(outcome, _NOT_MOVED)
        found.append(f"{counted(num, block)} {_was(num)} not moved ({outcome}){why}.")
    found += [f"Not modelled, as if it were not set: {option}." for option in replay.ignored]
    found += [f"The engine thrashed: {advice}" for advice in replay.advice]
    return found


def short_prompts(replay: Replay) -> list[str]:
    """Return that prompts are too short to be hit, where that are not just a few."""
    num = replay.num_short
    if not replay.num_requests or num < _FEW * replay.num_requests:
        return []
    share = replay.num_short_tokens / max(1, replay.tokens.prompt)
    return [
        f"{counted(num, 'prompt')} of {replay.num_requests:,} ({num / replay.num_requests:.0%}; "
        f"{share:.1%} of the prompt tokens) {'has' if num == 1 else 'have'} no more than the "
        f"{replay.block_size:,} tokens of a block of this trace: they hit nothing here, whatever "
        "an engine with smaller blocks would hit."
    ]


def short_day(replay: Replay) -> bool:
    """Whether bytes a day are those of much less than one."""
    return replay.seconds < _SHORT_SECONDS and any(replay.written_nbytes.values())


def _queue(replay: Replay) -> list[str]:
    """Return why a queue grew long, if one did."""
    line = replay.timeline
    if not line.num_waiting or max(line.num_waiting) <= max(64, 0.1 * replay.num_requests):
        return []
    why = (
        "they come faster than this engine serves them, and times to the first token are those "
        "of the queue. Slow the arrivals (--speed), or share the trace among more engines "
        "(--replicas)."
        if replay.concurrency is None
        else f"this engine does not admit {replay.concurrency:,} sessions at a time, and times "
        "to the first token are those of the queue (--concurrency)."
    )
    return [f"The queue grew to {max(line.num_waiting):,} requests: {why}"]


def summary(replays: Sequence[Replay]) -> list[str]:
    """Return one line a replay: how soon, how much, and what was not computed; each but the first
    against the first."""
    first = replays[0]
    said = []
    for replay in replays:
        ttft, output = replay.ttft.p90, replay.output_tokens_per_second
        text = f"{replay.label}: p90 TTFT {'-' if ttft is None else _seconds(ttft)}"
        if replay is not first and ttft is not None and first.ttft.p90:
            text += f" ({ttft / first.ttft.p90:.2f} times)"
        text += (
            f", {_count(output)} output tokens/s, hit rate {_share(replay.tokens.hit_rate)} of at "
            f"most {_share(replay.infinite_hit_rate)}"
        )
        said.append(text + ("; it does not keep up" if _falls_behind(replay) else "") + ".")
    return said


def requests_text(replay: Replay) -> str:
    """Return how many requests were served."""
    return counted(replay.num_requests, "request")


def _falls_behind(replay: Replay) -> bool:
    """Whether the queue only grew; in a closed loop the engine sets the pace itself."""
    return replay.complete and replay.concurrency is None and not replay.keeps_up


def plain(replays: Sequence[Replay], about: Mapping[str, object]) -> dict[str, Any]:
    """Return plain data for JSON; see `write_report`."""
    return {
        "ok": True,
        "about": dict(about),
        "replays": [replay.to_plain() for replay in replays],
    }


def write_report(
    replays: Sequence[Replay], folder: Path, name: str, about: Mapping[str, object]
) -> tuple[list[Path], str | None]:
    """Write ``NAME.json``, ``NAME.png`` and ``NAME.html`` into a folder, made if need be.

    Args:
        about: what was asked for, by name, so that it can be asked for again.

    Returns:
        the files written, and why there is no picture; None where there is one.

    Raises:
        ConfigError: the folder cannot be written.
    """
    picture = draw(replays)
    shown = page(replays, picture, about)
    written = write_files(plain(replays, about), shown, picture, folder, name)
    return written, None if picture is not None else NO_PICTURES


def page(replays: Sequence[Replay], picture: bytes | None, about: Mapping[str, object]) -> str:
    """Return one HTML page with everything in it, the picture included; see `write_report`."""
    several = len(replays) > 1
    header = ["", replays[0].label]
    for replay in replays[1:]:
        header += [replay.label, "change"]
    lines = []
    for row in rows(replays):
        cells = [row.name, row.cells[0]]
        for cell, change in zip(row.cells[1:], row.changes, strict=True):
            cells += [cell, change]
        lines.append(cells)
    said = [
        f"{replay.label}: {text}" if several else text
        for replay in replays
        for text in notes(replay)
    ]
    first = replays[0]
    parts = [
        "".join(f"<p>{html.escape(text)}</p>" for text in summary(replays))
        + f"<p>{html.escape(first.title)}; {requests_text(first)}, {first.seconds:,.0f} s "
        "on the virtual clock. Throughput and inter-token latency belong together: one is bought "
        "with the other.</p>" + table(header, lines),
        *map(_token_table, replays),
        "<h2>What was replayed</h2>" + table(("", ""), asked_rows(about)),
        *map(_config, replays),
    ]
    title = "Traces replayed" if several else "A trace replayed"
    title += "" if all(replay.complete for replay in replays) else ", in part"
    return whole_page(title, ["Predicted: nothing was computed or copied.", *said], parts, picture)


def draw(replays: Sequence[Replay]) -> bytes | None:
    """Return a PNG of the timelines, a column a replay; None without matplotlib."""
    figure = canvas()
    if figure is None:
        return None
    num_rows = 3 if any(replay.timeline.tiers for replay in replays) else 2
    figure.set_size_inches(5.5 * max(2, len(replays)), 3 * num_rows)
    axes = figure.subplots(num_rows, len(replays), squeeze=False, sharex="col", sharey="row")
    for column, replay in zip(axes.T, replays, strict=True):
        queues, memory, *below = column
        line = replay.timeline
        queues.plot(line.seconds, line.num_running, label="running")
        queues.plot(line.seconds, line.num_waiting, label="waiting")
        queues.plot(line.seconds, line.num_swapped, label="swapped")
        queues.set_title(replay.label, parse_math=False)  # a name, whatever is in it
        queues.set(ylabel="requests")
        memory.plot(line.seconds, line.kv_use, label="held by requests")
        memory.set(ylabel="share of HBM's KV blocks", ylim=(0, 1.05))
        for tiers in below:
            for name, use in line.tiers.items():
                tiers.plot(line.seconds[-len(use) :], use, label=name)
            tiers.set(ylabel="share of the tier in use", ylim=(0, 1.05))
        column[-1].set(xlabel="seconds")
        for each in column:
            each.grid(visible=True, alpha=0.3)
            if replay.num_warmup:
                each.axvline(replay.began_seconds, color="grey", linestyle=":", label="warm")
            if each.get_legend_handles_labels()[0]:
                each.legend(loc="best", framealpha=0.5)
    return png(figure)


def _why(text: str, meanings: Sequence[tuple[str, str]], *, has_stores: bool = False) -> str:
    """Return what a reason or an outcome means, as the end of a sentence; "" where that is not
    known."""
    for begin, meaning in meanings:
        if text.startswith(begin):
            more = ", or a store below it too slow" if text == "no_room" and has_stores else ""
            return f": {meaning.format(text.removeprefix(begin))}{more}"
    return ""


def _token_table(replay: Replay) -> str:
    tokens = replay.tokens
    parts = [*tokens.hits.items(), ("computed", tokens.computed), ("prompt tokens", tokens.prompt)]
    lines = [(name, f"{num:,}", _share(num / max(1, tokens.prompt))) for name, num in parts]
    heading = f"<h2>{html.escape(replay.label)}: where the prompts' KV came from</h2>"
    return heading + table(("", "tokens", "share"), lines)


def asked_rows(about: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return what was asked for, a row an option."""
    return [
        (
            name.replace("_", " "),
            ", ".join(map(str, value)) if isinstance(value, list) else f"{value}",
        )
        for name, value in about.items()
        if value is not None and value != {}
    ]


def _config(replay: Replay) -> str:
    if replay.config is None:
        return ""
    text = write_yaml(replay.config)
    return f"<h2>{html.escape(replay.label)}: configuration</h2><pre>{html.escape(text)}</pre>"


def _row(
    name: str,
    replays: Sequence[Replay],
    get: Callable[[Replay], float | None],
    show: Callable[[float], str],
) -> Row:
    values = [get(replay) for replay in replays]
    cells = tuple("-" if value is None else show(value) for value in values)
    change = _points if show is _share else _change
    return Row(name, cells, tuple(change(values[0], value) for value in values[1:]))


def _change(before: float | None, after: float | None) -> str:
    if before is None or after is None or not before:
        return ""
    return f"{_zero(100 * (after - before) / before):+.1f}%"


def _points(before: float | None, after: float | None) -> str:
    """Return how a share changed, of which a percentage would be taken for another share."""
    if before is None or after is None:
        return ""
    return f"{_zero(100 * (after - before)):+.1f} points"


def _zero(value: float) -> float:
    """Return a value with a tenth, and never less than nothing for what is nothing then."""
    return round(value, 1) + 0.0


def _percentile(name: str, mark: str) -> Callable[[Replay], float | None]:
    def get(replay: Replay) -> float | None:
        value: float | None = getattr(getattr(replay, name), mark)
        return value

    return get


def _queued(replay: Replay) -> float | None:
    """Return how much of the times to the first token requests waited for their admission."""
    wait, ttft = replay.wait.mean, replay.ttft.mean
    return wait / ttft if wait is not None and ttft else None


def _hits(tier: str) -> Callable[[Replay], float | None]:
    def get(replay: Replay) -> float | None:
        num = replay.tokens.hits.get(tier)
        return None if num is None else num / max(1, replay.tokens.prompt)

    return get


def _written(store: str) -> Callable[[Replay], float | None]:
    return lambda replay: replay.written_nbytes_per_device_day.get(store)


def _seconds(value: float) -> str:
    return f"{value * 1e3:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _size(value: float) -> str:
    unit = next(((size, name) for size, name in _UNITS if value >= size), None)
    return format_size(int(value)) if unit is None else f"{value / unit[0]:,.1f} {unit[1]}"


def _was(num: int) -> str:
    return "was" if num == 1 else "were"
