"""``kvtiers explain``: why requests were reloaded or computed, from the decision log."""

# ruff: noqa: PLC0415 - what a verb needs is imported when it runs

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtiers.cli.output import JsonOption, echo_json, input_errors, report_written, show_table

if TYPE_CHECKING:
    from kvtiers.bench.explain import Explanation, Summary
    from kvtiers.observe.decision_file import DecisionFile


def explain(
    request: Annotated[
        str | None, typer.Argument(help="The request's id, as it stands in the log.")
    ] = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="All requests in numbers instead.")
    ] = False,
    log: Annotated[
        Path | None,
        typer.Option(help="The decision log (default: that of the configuration in force)."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="With --summary: folder for a JSON file, a PNG and a page.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say why a request was reloaded or computed, and how good the predictions were."""
    from kvtiers.bench.explain import explain as explain_request
    from kvtiers.bench.explain import summarize
    from kvtiers.model.errors import ConfigError

    with input_errors(as_json):
        if (request is None) is not summary:
            raise ConfigError("name a request, or give --summary: one of both")
        if output is not None and not summary:
            raise ConfigError("--output goes with --summary")
        file = _file(log)
        if request is not None:
            found = explain_request(file, request)
            plain = {"decisions": [each.to_plain() for each in found]}
        else:
            numbers = summarize(file)
            plain = numbers.to_plain()
            if output is not None:
                _write(numbers, output)
    _show_broken(file)
    if as_json:
        echo_json({**plain, "log": str(file.path), "broken": _broken(file)})
    elif request is not None:
        for each in found:
            _show(each)
    else:
        _show_summary(numbers)


def _file(path: Path | None) -> DecisionFile:
    from kvtiers.model.config import resolve_config
    from kvtiers.model.errors import ConfigError
    from kvtiers.observe.decision_file import DecisionFile

    if path is None:
        loaded = resolve_config()
        path = loaded.config.cost.decision_log
        if path is None:
            raise ConfigError(f"{loaded.source}: names no cost.decision_log; give --log FILE")
    if not path.is_file():
        what = "no regular file" if path.exists() else "no such file"
        raise ConfigError(f"{path}: {what}; an engine with `cost.decision_log: {path}` writes it")
    return DecisionFile(path)


def _broken(file: DecisionFile) -> dict[str, object]:
    lines = [{"line": broken.line, "why": broken.why} for broken in file.broken]
    return {"num": file.num_broken, "lines": lines}


def _show_broken(file: DecisionFile) -> None:
    for broken in file.broken:
        typer.echo(f"{file.path}:{broken.line}: passed over: {broken.why}", err=True)
    if file.num_broken > len(file.broken):
        typer.echo(f"{file.path}: {file.num_broken:,} broken lines in all", err=True)


def _write(numbers: Summary, folder: Path) -> None:
    from kvtiers.bench.explain_report import write_report

    report_written(*write_report(numbers, folder))


def _show(found: Explanation) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from kvtiers.bench.explain_rows import alternative_rows, fact_rows

    console = Console(highlight=False, markup=False)
    console.print(f"{found.decision.request_id} (line {found.decision.line})")
    console.print(f"{found.choice}: {found.decision.reason}")
    console.print(found.sentence)
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for row in fact_rows(found):
        facts.add_row(*row)
    console.print(facts)
    table = Table(box=box.SIMPLE_HEAVY)
    for name in ("", "predicted", "measured", "error"):
        table.add_column(name, justify="right" if name else "left")
    for alternative in alternative_rows(found):
        table.add_row(*alternative)
    show_table(table)


def _show_summary(numbers: Summary) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from kvtiers.bench.explain_report import (
        REGRET_NOTE,
        block_rows,
        count_rows,
        error_rows,
        worst_rows,
    )

    console = Console(highlight=False, markup=False)
    for rows in (count_rows, block_rows, error_rows):
        table = Table(show_header=False, box=box.SIMPLE)
        table.add_column(min_width=22)
        for row in rows(numbers):
            table.add_row(*row)
        show_table(table)
    if numbers.worst:
        table = Table(title="loads longest beyond their prediction", box=box.SIMPLE_HEAVY)
        for name in ("request", "line", "predicted", "measured"):
            table.add_column(name, justify="left" if name == "request" else "right")
        for worst in worst_rows(numbers):
            table.add_row(*worst)
        show_table(table)
    console.print(REGRET_NOTE)
