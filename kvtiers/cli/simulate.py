"""``kvtiers simulate``: a trace replayed through an engine on paper and the real control plane."""

# ruff: noqa: PLC0415 - what a verb needs is imported when it runs

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
    report_written,
    show_table,
    shown_path,
)
from kvtiers.cli.progress import progress_bar
from kvtiers.cli.terminable import terminable
from kvtiers.model.errors import ConfigError, PlacedError

if TYPE_CHECKING:
    from kvtiers.model.config import Loaded
    from kvtiers.simulate.machine import MachinePlan
    from kvtiers.simulate.replay import Progress, ReplayPlan
    from kvtiers.simulate.replay_result import Replay
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
    rate: options.RateOption = None,
    seed: options.SeedOption = None,
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
    Ctrl-C and SIGTERM tell what was served until then: exit code 130.
    """
    device = (model, hardware, dtype, kv_dtype, tensor_parallel, utilization)
    knobs = (block_size, step_tokens, max_num_seqs, max_model_len)
    files = [*([config] if config else []), *(compare or ()), *(more or ())]
    with terminable(), input_errors(as_json):
        from kvtiers.simulate.share import busiest_share

        _check_outputs(output, write_trace, generate)
        configs = _configs(files)
        found = options.read_trace(trace, (generate, rate, seed), requests, trace_block)
        engine = options.engine_values(device, knobs)
        machine = options.machine_plan(engine, medium or (), preemption)
        share = busiest_share(found, replicas, machine.settings(found).max_model_len)
        arrivals = options.arrival_plan(speed, concurrency, found)
        shared = {"warmup": warmup, "max_seconds": max_seconds, "arrivals": arrivals}
        plans = _plans(machine, {"trace": share, **shared}, configs)
        _keep(found, write_trace)
        about = options.about_requests(trace, (generate, rate, seed), found)
        about |= options.about_arrivals(speed, concurrency, replicas, warmup)
        about |= {**engine, "preemption": preemption, "media": medium}
        replays, interrupted = _run(plans, as_json)
        _write(replays, about, output, found.name)
    _tell(replays, about, as_json, replicas)
    raise typer.Exit(INTERRUPTED if interrupted else 0)


def _check_outputs(output: Path | None, write_trace: Path | None, generate: str | None) -> None:
    check_outputs(output, write_trace)
    if write_trace is not None and generate is None:
        raise ConfigError("--write-trace: is for --generate; a trace is there already")


def _tell(
    replays: list[Replay], about: Mapping[str, object], as_json: bool, num_engines: int
) -> None:
    """Print the numbers."""
    if as_json:
        from kvtiers.simulate.report import plain

        echo_json(plain(replays, about))
    else:
        if num_engines > 1:
            typer.echo(f"One of {num_engines} engines, that with the most prompt tokens:")
        show(replays)


def _keep(trace: Trace, path: Path | None) -> None:
    from kvtiers.simulate.generate import write_trace

    if path is not None:
        write_trace(trace, path)


def _configs(files: Sequence[Path]) -> list[tuple[str, Loaded | None]]:
    """Return the label and the configuration of each file; without any, that of no tiers."""
    from kvtiers.model.config import load_config

    stems = [path.stem for path in files]
    labels = [
        shown_path(Path(stem) if stems.count(stem) == 1 else path)
        for path, stem in zip(files, stems, strict=True)
    ]
    if not files:
        return [("no tiers", None)]
    return [(label, load_config(path)) for label, path in zip(labels, files, strict=True)]


def _plans(
    machine: MachinePlan, shared: Mapping[str, Any], configs: Sequence[tuple[str, Loaded | None]]
) -> list[ReplayPlan]:
    """Return what is to be replayed, all of which would start.

    Raises:
        ConfigError: one would not; says of which file and line that is.
    """
    from kvtiers.simulate.machine import MEDIA
    from kvtiers.simulate.replay import ReplayPlan

    stores = [{tier.name for tier in loaded.config.stores} for _, loaded in configs if loaded]
    every = set().union(*stores)
    plans = []
    for label, loaded in configs:
        config = None if loaded is None else loaded.config
        # A medium of a store that only another configuration has means nothing here.
        others = every - {tier.name for tier in config.stores} if config else every
        media = {name: it for name, it in machine.media.items() if name not in others - {*MEDIA}}
        each = replace(machine, media=media)
        try:
            each.check(shared["trace"], config)
        except PlacedError as error:
            if loaded is None or not error.path:
                raise
            raise ConfigError(f"{loaded.where(error.path)}: {error}") from error
        plans.append(ReplayPlan(**shared, machine=each, label=label, config=config))
    return plans


def _run(plans: Sequence[ReplayPlan], as_json: bool) -> tuple[list[Replay], bool]:
    """Replay the plans one after another; returns whether they were interrupted, too.

    Raises:
        ConfigError: no request was served before the time was up.
    """
    from kvtiers.simulate.replay import replay

    replays: list[Replay] = []
    interrupted = False
    for plan in plans:
        try:
            with progress(plan.label, as_json) as told:
                replays.append(replay(plan, told))
            interrupted = replays[-1].interrupted
        except KeyboardInterrupt:  # before its first step, or after its last
            interrupted = True
        if interrupted:
            break
    problem = "no request was served before it was stopped; there is nothing to tell"
    if not any(replay.num_requests for replay in replays):
        if not interrupted:
            raise ConfigError(problem)
        typer.echo(problem, err=True)
        if as_json:
            echo_json({"ok": False, "problems": [problem]})
        raise typer.Exit(INTERRUPTED)
    left = [plan.label for plan in plans[len(replays) :]]
    if left:
        typer.echo(f"interrupted before it was replayed: {', '.join(left)}", err=True)
    return replays, interrupted


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


def _write(
    replays: Sequence[Replay], about: Mapping[str, object], folder: Path | None, name: str
) -> None:
    from kvtiers.simulate.report import write_report

    if folder is None:
        return
    report_written(*write_report(replays, folder, f"simulate-{name}".lower(), about))


def show(replays: Sequence[Replay]) -> None:
    """Print one table, side by side, and what the reader should know."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from kvtiers.simulate.report import notes, requests_text, rows, summary

    first, console = replays[0], Console(markup=False)
    for text in summary(replays):
        console.print(text, markup=False)
    table = Table(
        title=f"{first.title}: {requests_text(first)} in {first.seconds:,.0f} s, on paper"
        + ("" if all(replay.complete for replay in replays) else ", PARTIAL"),
        caption="Shares of hits and computed are of the prompt tokens, and add up to all of them. "
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
