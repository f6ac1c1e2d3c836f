"""The command ``kvtiers``: its verbs, each in a file of its own.

A verb imports what it needs when it runs, so that ``kvtiers --help`` is quick and needs
neither torch nor a GPU.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvtiers import __version__
from kvtiers.cli import bench, capacity, config, demo, explain, info, probe, simulate, size, store
from kvtiers.cli.output import BAD_INPUT


class _Verbs(TyperGroup):
    """All verbs; what they print may be lost without a traceback."""

    def main(self, *args: Any, **more: Any) -> Any:
        """Run the verb that was named."""
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # names that a terminal cannot show are escaped
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().main(*args, **more)
        except OSError as error:
            if not _stdout_fails():
                raise
            typer.echo(f"standard output cannot be written: {error.strerror}", err=True)
            sys.exit(BAD_INPUT)


def _stdout_fails() -> bool:
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except (OSError, ValueError):
        return True
    return False


app = typer.Typer(
    name="kvtiers",
    cls=_Verbs,
    help="KV-cache offload and tiering for LLM serving engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(config.app, name="config")
app.add_typer(store.app, name="store")
app.command("info")(info.info)
app.command("demo")(demo.demo)
app.command("bench")(bench.bench)
app.command("capacity")(capacity.capacity)
app.command("simulate")(simulate.simulate)
app.command("size")(size.size)
app.command("probe")(probe.probe)
app.command("explain")(explain.explain)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtiers {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Move KV blocks between HBM, host memory and what lies below."""
