"""What every verb shares: JSON on request, and errors without a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import typer

from kvtiers.model.errors import KVTiersError

BAD_INPUT: Final = 2
"""Exit code for input that the user must correct, as for a wrong option."""

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
