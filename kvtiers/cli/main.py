"""The command ``kvtiers``: its verbs, each in a file of its own.

A verb imports what it needs when it runs, so that ``kvtiers --help`` is quick and needs
neither torch nor a GPU.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvtiers import __version__
from kvtiers.cli import bench, capacity, config, demo, explain, info, probe, simulate, size, store

app = typer.Typer(
    name="kvtiers",
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
