"""``kvtiers store``: look after the stores on disk, stopped or running."""

# ruff: noqa: PLC0415 - a verb imports what it needs when it runs, so that --help is quick

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvtiers.cli.output import JsonOption, echo_json, input_errors, rough_size
from kvtiers.cli.values import size

if TYPE_CHECKING:
    from kvtiers.data.store_admin import StoreAdmin
    from kvtiers.data.store_admin_values import Dropped, Progress, StoreStat, Verdict

FAULTY: Final = 1
"""Exit code when a store is not as it should be."""

app = typer.Typer(help="Look after the stores on disk, stopped or running.", no_args_is_help=True)

PathsArgument = Annotated[
    list[Path],
    typer.Argument(
        help="What the configuration names: an LMDB store's path, or a file store's paths, all "
        "of them if it is striped. An instance's or rank's folder in one will do.",
    ),
]
PatienceOption = Annotated[
    float,
    typer.Option(min=0.0, help="Seconds to wait for the process that owns a running file store."),
]


@app.command()
def stat(paths: PathsArgument, as_json: JsonOption = False) -> None:
    """Say what a store is, what it holds, and who has it open."""
    from kvtiers.data.store_admin import find_stores

    with input_errors(as_json):
        found = [store.stat() for store in find_stores(paths)]
    if as_json:
        echo_json({"stores": [one.to_plain() for one in found]})
    else:
        for one in found:
            _show_stat(one)
    if any(one.problem for one in found):
        raise typer.Exit(FAULTY)


@app.command()
def verify(
    paths: PathsArgument,
    dry_run: Annotated[bool, typer.Option(help="Drop nothing; only say what is damaged.")] = False,
    patience: PatienceOption = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Read every frame and check it; what is damaged is dropped, and the exit code is 1."""
    from kvtiers.data.store_admin import find_stores

    verdicts = []
    with input_errors(as_json):
        stores = find_stores(paths, patience)
        with _progress(stores, quiet=as_json) as progress:
            verdicts = [store.verify(progress, quarantine=not dry_run) for store in stores]
    ok = all(verdict.ok for verdict in verdicts)
    if as_json:
        echo_json({"ok": ok, "stores": [verdict.to_plain() for verdict in verdicts]})
    else:
        for verdict in verdicts:
            _show_verdict(verdict, dry_run=dry_run)
    if not ok:
        raise typer.Exit(FAULTY)


@app.command()
def clear(
    paths: PathsArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    patience: PatienceOption = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Drop every frame."""
    from kvtiers.data.store_admin import find_stores

    with input_errors(as_json):
        stores = find_stores(paths, patience)
        if not yes:
            names = "\n".join(f"  {store.name}" for store in stores)
            typer.confirm(f"{names}\nDrop every frame of these?", abort=True, err=True)
        _drop([store.clear for store in stores], as_json=as_json)


@app.command()
def evict(
    paths: PathsArgument,
    to: Annotated[str, typer.Option(help="What all of them may use together, such as 64GiB.")],
    patience: PatienceOption = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Drop the frames that were used (LMDB) or stored (files) longest ago, down to a size."""
    from kvtiers.data.store_admin import find_stores, shares

    with input_errors(as_json):
        nbytes = size(to, "--to")
        stores = find_stores(paths, patience)
        kept = zip(stores, shares(stores, nbytes), strict=True)
        _drop([partial(store.evict, share) for store, share in kept], as_json=as_json)


@contextlib.contextmanager
def _progress(stores: Sequence[StoreAdmin], *, quiet: bool) -> Iterator[Progress]:
    """Show how much is read, how fast, and how long it takes."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.fields[frames]:,} of {task.fields[of]:,} frames"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    counts = [store.num_to_verify() for store in stores]
    num, nbytes = sum(n for n, _ in counts), sum(b for _, b in counts)
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("verify", total=nbytes, frames=0, of=num)
        done = 0

        def advance(num_frames: int, num_nbytes: int) -> None:
            nonlocal done
            done += num_frames
            bar.update(task, advance=num_nbytes, frames=done)

        yield advance


def _show_stat(found: StoreStat) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=found.name, title_justify="left", show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in stat_rows(found):
        table.add_row(*row)
    Console(highlight=False).print(table, markup=False)


def stat_rows(found: StoreStat) -> list[tuple[str, str]]:
    """Return a store's properties as rows of a table."""
    rows = [("kind", found.kind)]
    if found.problem:
        rows.append(("problem", found.problem))
    if found.format_version is not None:
        rows.append(("format", str(found.format_version)))
    if len(found.paths) > 1:
        rows.append(("paths", ", ".join(found.paths)))
    if found.num_frames is not None:
        rows.append(("frames", f"{found.num_frames:,}"))
    if found.used_nbytes is not None and found.capacity_nbytes is not None:
        share = 100 * found.used_nbytes / max(1, found.capacity_nbytes)
        of = rough_size(found.capacity_nbytes)
        rows.append(("used", f"{rough_size(found.used_nbytes)} of {of} ({share:.0f} %)"))
    if found.num_slots is not None and found.slot_nbytes is not None:
        slots = f"{found.num_slots:,} of {found.slot_nbytes:,} bytes, {found.num_free:,} free"
        rows.append(("slots", slots))
    if found.disk_nbytes is not None:
        rows.append(("on disk", f"{rough_size(found.disk_nbytes)}, {found.filesystem}"))
    rows.append(("open", "no: stopped" if found.owner is None else f"by {found.owner}"))
    if found.owner is not None and found.owner.since is not None:
        rows.append(("since", _date(found.owner.since)))
    if found.changed_seconds_ago is not None:
        rows.append(("last change", f"{_ago(found.changed_seconds_ago)} ago"))
    if found.num_changes_since_oldest_access is not None:
        num = found.num_changes_since_oldest_access
        rows.append(("oldest access", f"{num:,} changes of the store ago"))
    generations = ", ".join(f"{name[:8]}: {num}" for name, num in found.generations.items())
    rows.append(("generations", generations or "none recorded: nothing was reset"))
    return rows


def _show_verdict(verdict: Verdict, *, dry_run: bool) -> None:
    for fault in verdict.faults:
        typer.echo(f"{fault.place}: frame {fault.key[:16]}: {fault.what}")
    rate = verdict.nbytes / max(verdict.seconds, 1e-9) / 2**20
    gone = f", {verdict.num_gone:,} left meanwhile" if verdict.num_gone else ""
    text = (
        f"{verdict.name}: {verdict.num_good:,} frames good, {len(verdict.faults):,} damaged{gone}; "
        f"{rough_size(verdict.nbytes)} in {verdict.seconds:.1f} s ({rate:,.0f} MiB/s)"
    )
    if verdict.faults:
        text += (
            "; dry run: nothing was dropped"
            if dry_run
            else f"; {verdict.num_quarantined:,} dropped, never to be served"
        )
    typer.echo(text)
    if verdict.problem is not None:
        typer.echo(f"{verdict.name}: {verdict.problem}", err=True)


def _drop(actions: Sequence[Callable[[], Dropped]], *, as_json: bool) -> None:
    """Do it to one store after another, and say what became of each."""
    from kvtiers.data.store_admin_values import UnansweredError

    results, problems = [], []
    for action in actions:
        try:
            result = action()
        except UnansweredError as error:
            problems.append(str(error))
            typer.echo(problems[-1], err=True)
            continue
        results.append(result)
        if not as_json:
            who = " by the process that has it open" if result.by_owner else ""
            num, left = result.num_frames, result.num_left
            typer.echo(f"{result.name}: {num:,} frames dropped{who}, {left:,} left")
    if as_json:
        stores = [result.to_plain() for result in results]
        echo_json({"ok": not problems, "stores": stores, "problems": problems})
    if problems:
        raise typer.Exit(FAULTY)


def _ago(seconds: float) -> str:
    for unit, scale in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.0f} {unit}"
    return f"{seconds:.0f} s"


def _date(unix_time: float) -> str:
    import datetime

    then = datetime.datetime.fromtimestamp(unix_time, datetime.UTC).astimezone()
    return then.isoformat(sep=" ", timespec="seconds")
