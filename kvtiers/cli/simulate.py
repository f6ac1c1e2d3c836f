"""``kvtiers simulate``: a trace replayed through an engine on paper and the real control plane."""

# ruff: noqa: PLC0415 - what a verb needs is imported when it runs

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvtiers.cli import simulate_options as options
from kvtiers.cli.output import (
    INTERRUPTED,
    JsonOption,
    check_outputs,
    echo_json,
    input_errors,
    show_table,
)
from kvtiers.cli.progress import progress_bar
from kvtiers.model.errors import ConfigError

if TYPE_CHECKING:
    from kvtiers.simulate.replay import Progress, Replay, ReplayPlan
    from kvtiers.simulate.trace import Trace


def simulate(  # noqa: PLR0913, PLR0917 - one parameter an option
    model: options.ModelOption,
    hardware: options.HardwareOption,
    trace: options.TraceOption = None,
    generate: options.GenerateOption = None,
    config: options.ConfigOption = None,
    compare: options.CompareOption = None,
    more: options.MoreOption = None,
    requests: options.NumRequestsOption = None,
    rate: options.RateOption = 2.0,
    seed: options.SeedOption = 0,
    trace_block: options.TraceBlockOption = None,
    speed: options.SpeedOption = 1.0,
    concurrency: options.ConcurrencyOption = None,
    replicas: options.ReplicasOption = 1,
    warmup: options.WarmupOption = 0.0,
    write_trace: options.WriteTraceOption = None,
    dtype: options.DtypeOption = "bf16",
    kv_dtype: options.KvDtypeOption = "bf16",
    tensor_parallel: options.TensorParallelOption = 1,
    utilization: options.UtilizationOption = 0.9,
    block_size: options.BlockSizeOption = 16,
    step_tokens: options.StepTokensOption = 8192,
    max_num_seqs: options.MaxSeqsOption = 256,
    max_model_len: options.MaxLenOption = None,
    preemption: options.PreemptionOption = "cost",
    medium: options.MediumOption = None,
    max_seconds: options.StopOption = None,
    output: options.OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a trace in virtual time: latencies, throughput, hits by tier, bytes written.

    With --compare, and further files behind it, the same trace runs through each configuration.
    Ctrl-C ends it with what was served until then, and exit code 130.
    """
    device = (model, hardware, dtype, kv_dtype, tensor_parallel, utilization)
    knobs = (block_size, step_tokens, max_num_seqs, max_model_len)
    with input_errors(as_json):
        from kvtiers.simulate.arrivals import ArrivalPlan
        from kvtiers.simulate.replay import ReplayPlan
        from kvtiers.simulate.share import busiest_share

        check_outputs(output, write_trace)
        found = options.read_trace(trace, (generate, rate, seed), requests, trace_block)
        _keep(found, write_trace)
        machine = options.machine_plan(
            options.engine_values(device, knobs), medium or (), preemption
        )
        shared: dict[str, Any] = {"machine": machine, "warmup": warmup}
        longest = machine.settings(found).max_model_len
        shared["trace"] = busiest_share(found, replicas, longest)
        shared |= {"arrivals": ArrivalPlan(speed, concurrency), "max_seconds": max_seconds}
        named = _configs([*([config] if config else []), *(compare or ()), *(more or ())])
        plans = [ReplayPlan(**shared, label=label, config=it) for label, it in named]
        replays = _run(plans, as_json)
        if output is not None:
            _write(replays, output, found.name)
    _tell(replays, as_json, replicas)


def _tell(replays: list[Replay], as_json: bool, num_engines: int) -> None:
    """Print the numbers; exits with `INTERRUPTED` where there could be more."""
    if as_json:
        from kvtiers.simulate.report import plain

        echo_json(plain(replays))
    else:
        if num_engines > 1:
            typer.echo(f"One of {num_engines} engines, that with the most prompt tokens:")
        show(replays)
    if replays[-1].interrupted:
        raise typer.Exit(INTERRUPTED)


def _keep(trace: Trace, path: Path | None) -> None:
    from kvtiers.simulate.generate import write_trace

    if path is not None:
        write_trace(trace, path)


def _configs(files: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """Yield the label and the configuration of each file; without any, that of no tiers."""
    from kvtiers.model.config import load_config

    if not files:
        yield "no tiers", None
    names = [path.stem for path in files]
    for path, name in zip(files, names, strict=True):
        label = name if names.count(name) == 1 else str(path)
        yield label, load_config(path).config


def _run(plans: Sequence[ReplayPlan], quiet: bool) -> list[Replay]:
    from kvtiers.simulate.replay import replay

    replays = []
    for plan in plans:
        with progress(plan.label, quiet) as told:
            replays.append(replay(plan, told))
        if replays[-1].interrupted:
            break
    if not any(replay.num_requests for replay in replays):
        raise ConfigError("no request was served before it was stopped; there is nothing to tell")
    return replays


@contextmanager
def progress(what: str, quiet: bool) -> Iterator[Progress]:
    """Show a bar on standard error while a replay runs."""
    with errors_only(), progress_bar(24, quiet=quiet) as bar:
        task = bar.add_task(what, total=None)
        yield lambda ended, num: bar.update(task, completed=ended, total=num)


@contextmanager
def errors_only() -> Iterator[None]:
    """Log errors only: what the control plane would warn an operator of, such as a store that is
    switched off, stands in the report instead."""
    logger = logging.getLogger("kvtiers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _write(replays: Sequence[Replay], folder: Path, name: str) -> None:
    from kvtiers.simulate.report import write_report

    written, missing = write_report(replays, folder, f"simulate-{name}".lower())
    for path in written:
        typer.echo(f"wrote {path}", err=True)
    if missing is not None:
        typer.echo(missing, err=True)


def show(replays: Sequence[Replay]) -> None:
    """Print one table, side by side, and what the reader should know."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from kvtiers.simulate.report import notes, rows, summary

    first, console = replays[0], Console(markup=False)
    for text in summary(replays):
        console.print(text, markup=False)
    table = Table(
        title=f"{first.title}: {first.num_requests:,} requests in {first.seconds:,.0f} s, on paper"
        + ("" if all(replay.complete for replay in replays) else ", PARTIAL"),
        caption="Shares are of the prompt tokens: hits of all tiers and computed are all of them. "
        "Infinite cache: what one that forgets nothing would hit.",
        box=box.SIMPLE_HEAVY,
    )
    table.add_column("", no_wrap=True)
    table.add_column(first.label, justify="right", no_wrap=True)
    for replay in replays[1:]:
        table.add_column(replay.label, justify="right", no_wrap=True)
        table.add_column("change", justify="right", no_wrap=True)
    for row in rows(replays):
        cells = [row.cells[0]]
        for cell, change in zip(row.cells[1:], row.changes, strict=True):
            cells += [cell, change]
        table.add_row(row.name, *cells)
    show_table(table)
    for replay in replays:
        for text in notes(replay):
            said = f"{replay.label}: {text}" if len(replays) > 1 else text
            console.print(said, markup=False)
