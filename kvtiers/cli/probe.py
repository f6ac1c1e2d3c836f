"""``kvtiers probe``: what the links of this machine take, for a calibration file."""

# ruff: noqa: PLC0415 - what a verb needs is imported when it runs

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvtiers.cli.output import (
    JsonOption,
    check_outputs,
    echo_json,
    input_errors,
    report_written,
    show_table,
)
from kvtiers.cli.progress import progress_bar
from kvtiers.cli.terminable import terminable
from kvtiers.cli.values import size

if TYPE_CHECKING:
    from kvtiers.bench.probe import ProbeResult
    from kvtiers.bench.probe_even import Even
    from kvtiers.bench.probe_plan import ProbePlan

INCOMPLETE: Final = 1
"""Exit code when a configured tier could not be measured."""


def probe(  # noqa: PLR0913, PLR0917 - one parameter an option
    path: Annotated[
        Path | None, typer.Argument(help="The YAML file; without it, the one in force.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Calibration file to write.")] = None,
    report: Annotated[Path | None, typer.Option(help="Markdown file to write.")] = None,
    model: Annotated[
        str, typer.Option(help="A known model, such as llama-3.1-8b, or a config.json.")
    ] = "llama-3.1-8b",
    hardware: Annotated[
        str | None, typer.Option(help="A known device that computes (default: the GPU found here).")
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(help="Its measured prefill speed instead, in operations a second."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Data type of the weights.")] = "bf16",
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", "--kv-cache-dtype", help="Data type of the KV cache.")
    ] = "bf16",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    device: Annotated[
        str, typer.Option(help="Device of the engine's KV: auto, cpu or cuda.")
    ] = "auto",
    seconds: Annotated[float, typer.Option(help="Seconds to measure for, about.")] = 30.0,
    scratch: Annotated[
        str, typer.Option(help="Bytes that a tier's scratch folder may take at most.")
    ] = "640MiB",
    as_json: JsonOption = False,
) -> None:
    """Measure this machine's links, and from which prefix length on a tier beats computing."""
    from kvtiers.bench.probe_even import EvenPlan, break_even
    from kvtiers.bench.probe_report import markdown, to_plain

    with input_errors(as_json):
        even_plan = EvenPlan(
            model, hardware, flops, dtype=dtype, kv_dtype=kv_dtype, block_size=block_size
        )
        check_outputs(None, out, report)
        plan = _plan(path, even_plan.shape.num_layers, device, seconds, scratch)
        result = _run(plan, as_json)
        even = break_even(even_plan, result.calibration)
        plain = to_plain(result, even)
        if out is not None:
            _write(out, _pretty(plain))
        if report is not None:
            _write(report, markdown(result, even))
    if as_json:
        echo_json(plain)
    else:
        _show(result, even)
    for text in result.missing:
        typer.echo(f"not measured: {text}", err=True)
    if result.missing:
        raise typer.Exit(INCOMPLETE)


def _plan(
    path: Path | None, num_layers: int, device: str, seconds: float, scratch: str
) -> ProbePlan:
    from typing import cast, get_args

    from kvtiers.bench.probe_plan import DeviceChoice, ProbePlan
    from kvtiers.model.config import resolve_config
    from kvtiers.model.errors import ConfigError

    if device not in get_args(DeviceChoice):
        known = ", ".join(get_args(DeviceChoice))
        raise ConfigError(f"--device {device!r} is not known; known: {known}")
    return ProbePlan(
        resolve_config(path).config,
        num_layers=num_layers,
        seconds=seconds,
        scratch_nbytes=size(scratch, "--scratch"),
        device=cast("DeviceChoice", device),
    )


def _run(plan: ProbePlan, quiet: bool) -> ProbeResult:
    from kvtiers.bench.probe import num_shapes, run_probe
    from kvtiers.bench.probe_plan import Shape

    with progress_bar(34, quiet=quiet) as bar, terminable():
        task = bar.add_task("the way to HBM", total=num_shapes(plan))

        def on_shape(name: str, shape: Shape) -> None:
            what = f"{name}: {shape.depth} x {shape.block_nbytes // 1024} KiB"
            bar.update(task, advance=1, description=what)

        result = run_probe(plan, on_shape)
        bar.update(task, total=bar.tasks[0].completed, description="done")
    return result


def _write(path: Path, text: str) -> None:
    from kvtiers.model.errors import ConfigError
    from kvtiers.observe.files import write_whole

    try:
        write_whole({path: text.encode()})
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    report_written([path])


def _pretty(plain: dict[str, object]) -> str:
    """Return JSON with one measurement a line."""
    import json

    cells = plain["cells"]
    assert isinstance(cells, list)
    text = json.dumps({**plain, "cells": "CELLS"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(cell)}" for cell in cells)
    return text.replace('"CELLS"', f"[\n{rows}\n ]") + "\n"


def _show(result: ProbeResult, even: Even | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from kvtiers.bench.probe_even import NO_SPEED
    from kvtiers.bench.probe_report import (
        LINK_CAPTION,
        LINK_HEADER,
        even_rows,
        even_title,
        link_rows,
    )

    console = Console(markup=False)
    table = Table(title="links", caption=LINK_CAPTION, box=box.SIMPLE_HEAVY)
    for name in LINK_HEADER:
        table.add_column(name, justify="left" if name == "link" else "right", no_wrap=True)
    for row in link_rows(result.calibration):
        table.add_row(*row)
    show_table(table)
    if even is None:
        console.print(NO_SPEED, markup=False)
    else:
        console.print(even_title(even), markup=False)
        table = Table(box=box.SIMPLE_HEAVY)
        table.add_column("tier")
        table.add_column("tokens", justify="right")
        for tier, tokens in even_rows(even):
            table.add_row(tier, tokens)
        show_table(table)
    for note in result.notes:
        console.print(note, markup=False)
