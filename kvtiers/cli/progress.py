"""The progress bar of a verb that takes a while."""

# ruff: noqa: PLC0415 - what a verb needs is imported when it runs

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


@contextmanager
def progress_bar(width: int, *, quiet: bool, spinner: bool = False) -> Iterator[Progress]:
    """Show what is done, how much of it, and since when, on standard error.

    Args:
        width: characters of what is done, so that the bar stays where it is.
        quiet: show nothing. spinner: for single parts that take long.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        *((SpinnerColumn(),) if spinner else ()),
        # Names of files are shown as they are, square brackets and all.
        TextColumn(f"{{task.description:<{width}}}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bar:
        yield bar
