"""What every verb shares: JSON or whole tables on standard output, errors without a traceback."""

# ruff: noqa: PLC0415 - what a verb needs is imported when it runs

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvtiers.model.errors import ConfigError, KVTiersError

if TYPE_CHECKING:
    from rich.table import Table

BAD_INPUT: Final = 2
"""Exit code for input that the user must correct, as for a wrong option."""

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C, as of a shell: what was found until then is told all the same."""

_WIDEST: Final = 10_000  # columns; wider than any table

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


def echo_json(value: object) -> None:
    """Print plain data as JSON on standard output."""
    typer.echo(json.dumps(value, indent=2))


@contextmanager
def input_errors(as_json: bool) -> Iterator[None]:
    """Report an error of kvtiers on standard error, then exit with `BAD_INPUT`.

    Args:
        as_json: print the problems on standard output as well, as JSON.
    """
    try:
        yield
    except KVTiersError as error:
        problems = str(error).splitlines()
        for problem in problems:
            typer.echo(problem, err=True)
        if as_json:
            echo_json({"ok": False, "problems": problems})
        raise typer.Exit(BAD_INPUT) from None


def show_table(table: Table) -> None:
    """Print a table, every cell of it whole and as it is, without markup.

    In a terminal that is too narrow cells go over several lines; a file has room for all.
    """
    from rich.console import Console

    console = Console(markup=False)
    wanted = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    if wanted > console.width and not console.is_terminal:
        console = Console(markup=False, width=wanted)
    elif wanted > console.width:
        for column in table.columns:
            column.no_wrap, column.overflow = False, "fold"
    console.print(table)


def report_written(written: Iterable[Path], no_picture: str | None = None) -> None:
    """Name the files that were written, on standard error.

    Args:
        no_picture: why there is no picture among them; None where there is one, or none was due.
    """
    for path in written:
        typer.echo(f"wrote {path}", err=True)
    if no_picture is not None:
        typer.echo(no_picture, err=True)


def rough_size(nbytes: int) -> str:
    """Return a size with one decimal, for reading only; `format_size` is exact."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes / 2**10:.1f} KiB"


def shown_path(path: Path) -> str:
    """Return a path as text that can be written anywhere, whatever bytes it consists of."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def check_outputs(folder: Path | None, *files: Path | None) -> None:
    """See whether reports can be written, before the work begins; None is for one not wanted.

    Args:
        folder: made if need be. files: nothing is made or changed.

    Raises:
        ConfigError: one cannot be written; says why.
    """
    if folder is not None:
        _check_folder(folder)
    for path in files:
        if path is not None:
            _check_file(path)


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot write there: {error.strerror}; name a folder that can be written"
        ) from error


def _check_file(path: Path) -> None:
    folder = path.absolute().parent
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder; name a file in it")
        if not folder.is_dir():
            raise ConfigError(f"{path}: there is no folder to write it to; make it first")
        if not path.exists():
            with tempfile.TemporaryFile(dir=folder):
                pass
        elif not os.access(path, os.W_OK):
            raise ConfigError(f"{path}: cannot be written: permission denied")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
