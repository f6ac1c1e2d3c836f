"""``kvtiers size``: the cheapest tiers that meet a goal, for a trace, a model and a device."""

# ruff: noqa: PLC0415 - what a verb needs is imported when it runs

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

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
)
from kvtiers.cli.progress import progress_bar
from kvtiers.cli.simulate import errors_only
from kvtiers.cli.terminable import terminable
from kvtiers.model.errors import ConfigError

if TYPE_CHECKING:
    from kvtiers.simulate.sizing import Sizing, SizingPlan

_MOST_PRICE: Final = 1e12
_BAR_WIDTH: Final = 44  # the longest name of a replay
_BLOCK_TOKENS: Final = 512  # to which smaller blocks are put together: replays take as long as
# they have blocks, and this much of a prefix hardly matters where prompts are long
_POLICIES: Final = ("lru", "arc", "s3-fifo", "w-tinylfu", "cost")  # adaptive follows the best

NOT_MET: Final = 1
"""Exit code when no size meets the goal."""

NOT_KNOWN: Final = 3
"""Exit code when time was up before it was known whether one does."""


def size(  # noqa: PLR0913, PLR0917 - one parameter an option
    model: options.ModelOption,
    hardware: options.HardwareOption,
    trace: options.TraceOption = None,
    generate: options.GenerateOption = None,
    goal: options.GoalOption = "ttft-p90=0.5x",
    price: options.PriceOption = None,
    policy: options.PolicyOption = None,
    requests: options.NumRequestsOption = None,
    rate: options.RateOption = None,
    seed: options.SeedOption = None,
    trace_block: options.TraceBlockOption = None,
    speed: options.SpeedOption = 1.0,
    concurrency: options.ConcurrencyOption = None,
    replicas: options.AutoReplicasOption = None,
    warmup: options.WarmupOption = 0.0,
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
    max_seconds: options.MaxSecondsOption = 1200.0,
    jobs: options.JobsOption = None,
    write_config: options.WriteConfigOption = None,
    output: options.OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find how much DRAM and NVMe a trace needs to meet a goal, and what an fp8 cache changes.

    As many sizes are replayed as prove it. Ctrl-C and SIGTERM tell what was found: exit code 130.
    """
    device = (model, hardware, dtype, kv_dtype, tensor_parallel, utilization)
    knobs = (block_size, step_tokens, max_num_seqs, max_model_len)
    with terminable(), input_errors(as_json):
        from kvtiers.simulate.sizing import SizingPlan

        check_outputs(output, write_config)
        engine = options.engine_values(device, knobs)
        found = _read(trace, (generate, rate, seed), requests, trace_block)
        plan = SizingPlan(
            trace=found,
            machine=options.machine_plan(engine, medium or (), preemption),
            **_wanted(goal, price or ()),
            kv_dtypes=tuple(dict.fromkeys((kv_dtype, "fp8"))),
            policies=tuple(dict.fromkeys(policy or _POLICIES)),
            arrivals=options.arrival_plan(speed, concurrency, found),
            warmup=warmup,
            num_engines=replicas,
            max_seconds=max_seconds,
            num_jobs=jobs or len(os.sched_getaffinity(0)),
        )
        about = _about(plan, trace, (generate, rate, seed), engine) | {"goal": goal}
        sizing = _run(plan, as_json)
        _write(sizing, about, output, write_config)
    _tell(sizing, about, as_json)


def _about(
    plan: SizingPlan,
    path: Path | None,
    generate: tuple[str | None, float | None, int | None],
    engine: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what a report says of what was asked for."""
    arrivals, machine = plan.arrivals, plan.machine
    about = options.about_requests(path, generate, plan.trace)
    about |= options.about_arrivals(
        arrivals.speed, arrivals.concurrency, plan.num_engines, plan.warmup
    )
    about |= {**engine, "preemption": machine.preemption, "media": dict(machine.media)}
    prices = {f"price_{name}": value for name, value in asdict(plan.prices).items()}
    return {**about, "policies": list(plan.policies), **prices}


def _wanted(goal: str, price: Sequence[str]) -> dict[str, Any]:
    """Return the goal and the prices of a plan."""
    from kvtiers.simulate.goal import Goal

    return {"goal": Goal.parse(goal), "prices": _prices(price)}


def _tell(sizing: Sizing, about: Mapping[str, object], as_json: bool) -> None:
    """Print the answer; exits with a code that says so where there is none."""
    if as_json:
        from kvtiers.simulate.sizing_report import plain

        echo_json(plain(sizing, about))
    else:
        _show(sizing)
    if sizing.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not sizing.met:
        raise typer.Exit(NOT_MET if sizing.final.decided else NOT_KNOWN)


def _read(path: Path | None, generate: Any, num: int | None, block_size: int | None) -> Any:
    """Return the trace, in blocks that are not needlessly small."""
    trace = options.read_trace(path, generate, num, block_size)
    return trace if block_size else trace.coarser(_BLOCK_TOKENS)


def _prices(texts: Any) -> Any:
    from kvtiers.simulate.goal import Prices

    values = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name in values:
            raise ConfigError(f"--price: {name} is given twice; give one price of a GB")
        try:
            values[name] = float(value)
        except ValueError:
            values[name] = -1.0
        if name not in ("dram", "nvme") or not 0 <= values[name] <= _MOST_PRICE:
            raise ConfigError(f"--price: {text!r} is no price; write dram=4 or nvme=0.1")
    return Prices(**values)


def _run(plan: SizingPlan, quiet: bool) -> Sizing:
    """Search, and show how far it is."""
    from kvtiers.simulate.sizing_run import size_tiers

    with errors_only(), progress_bar(_BAR_WIDTH, quiet=quiet) as bar:

        def told(what: str) -> Any:
            task = bar.add_task(what, total=None)

            def follow(ended: int, num: int) -> None:
                bar.update(task, completed=ended, total=num)
                if ended < num or not bar.tasks[task].visible:
                    return
                seconds = bar.tasks[task].elapsed or 0.0
                bar.update(task, visible=False)  # bars are for what runs; a line stays of the rest
                if num and not quiet:
                    bar.console.print(f"{what:<{_BAR_WIDTH}} {seconds:,.0f} s")

            return follow

        whole = bar.add_task("all replays", total=None)

        def expected(done: int, num: int, seconds: float | None) -> None:
            left = "" if seconds is None else f", about {_minutes(seconds)} left"
            bar.update(whole, description=f"all replays{left}", completed=done, total=num)

        sizing = size_tiers(plan, told, expected)
        bar.update(whole, visible=False)
    return sizing


def _minutes(seconds: float) -> str:
    """Return a time to wait for, roughly."""
    return f"{seconds:,.0f} s" if seconds < 100 else f"{seconds / 60:,.0f} min"


def _write(
    sizing: Sizing,
    about: Mapping[str, object],
    output: Path | None,
    write_config: Path | None,
) -> None:
    """Write what is to be kept."""
    from kvtiers.observe.files import write_whole
    from kvtiers.simulate.sizing_report import write_sizing

    met, yaml = sizing.met, sizing.final.yaml
    if write_config is not None and yaml is not None and met:
        try:
            write_whole({write_config: yaml.encode()})
        except OSError as error:
            raise ConfigError(f"{write_config}: cannot be written ({error.strerror})") from error
        report_written([write_config])
    elif write_config is not None:
        why = "it is met without tiers" if met else "no size meets it"
        if not sizing.final.decided:
            why = "it was stopped before it was known whether a size meets it"
        typer.echo(
            f"{write_config} was not written: there is no YAML for the goal, {why}", err=True
        )
    if output is None:
        return
    name = f"size-{sizing.plan.trace.name}".lower()
    report_written(*write_sizing(sizing, output, name, about))


def _show(sizing: Sizing) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from kvtiers.simulate.sizing_answer import headline
    from kvtiers.simulate.sizing_words import HEADER, curve_rows, details, dtype_rows, trial_rows

    def shown(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> None:
        table = Table(title=title, box=box.SIMPLE_HEAVY)
        for idx, name in enumerate(header):
            table.add_column(name, justify="left" if idx < left else "right")
        for row in rows:
            table.add_row(*row)
        show_table(table)

    console = Console(markup=False)
    for text in headline(sizing):
        console.print(text, markup=False)
    console.print()
    curve = curve_rows(sizing.final)
    for it in (sizing, sizing.more):
        if it is not None:
            dtypes, many = dtype_rows(it), ""
            if sizing.more is not None:
                many = ", one engine" if it.num_engines == 1 else f", {it.num_engines} engines"
            shown(f"What the data type of the KV cache changes{many}", dtypes[0], dtypes[1:], 1)
    if trials := trial_rows(sizing):
        shown("What was replayed", HEADER, trials, 4)
    shown("What larger tiers hit, and what twice the size adds", curve[0], curve[1:], 1)
    for text in details(sizing):
        console.print(text, markup=False)
    final = sizing.final
    if final.yaml is not None:
        what = "meets the goal" if sizing.met else "comes close, for its price"
        each = f" (each of {final.num_engines} engines)" if final.num_engines > 1 else ""
        console.print(f"\nA configuration that {what}{each}:\n", markup=False)
        console.print(final.yaml, markup=False, highlight=False)
