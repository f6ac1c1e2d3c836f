"""``kvtiers bench``: recompute against reload, measured here, or on paper for other hardware."""

# ruff: noqa: PLC0415 - what a verb needs is imported when it runs

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer

from kvtiers.cli.bench_options import (
    MEASURED,
    PAPER,
    BlockSizeOption,
    DeviceOption,
    DtypeOption,
    FolderOption,
    HardwareOption,
    HiddenOption,
    KvDtypeOption,
    LayersOption,
    LengthOption,
    MaxDiskOption,
    MaxSecondsOption,
    ModelOption,
    OutputOption,
    RepeatsOption,
    ResumeOption,
    StagesOption,
    StepTokensOption,
    TensorParallelOption,
    ThreadsOption,
    ThrottleOption,
    TierOption,
)
from kvtiers.cli.output import JsonOption, check_outputs, echo_json, input_errors
from kvtiers.cli.values import size
from kvtiers.model.errors import ConfigError

WENT_WRONG: Final = 1
"""Exit code when a reload gave another token, did not come whole, or the run is not complete."""


def bench(  # noqa: PLR0913, PLR0917 - one parameter an option
    context: typer.Context,
    model: ModelOption = None,
    hardware: HardwareOption = None,
    tier: TierOption = None,
    length: LengthOption = None,
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = "bf16",
    tensor_parallel: TensorParallelOption = 1,
    block_size: BlockSizeOption = None,
    step_tokens: StepTokensOption = 8192,
    layers: LayersOption = None,
    hidden: HiddenOption = None,
    repeats: RepeatsOption = 5,
    throttle: ThrottleOption = None,
    stages: StagesOption = 8,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
    folder: FolderOption = None,
    max_seconds: MaxSecondsOption = 600.0,
    max_disk: MaxDiskOption = "4GiB",
    output: OutputOption = None,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find out from which prompt length on a reload is faster than computing.

    Without --hardware it is measured: a small transformer computes prompts, and reloads them
    through the real tiers. With --hardware it is predicted from published figures.
    """
    lengths = tuple(length or ())
    tiers = tuple(tier or ())
    with input_errors(as_json):
        _refuse_options_of_the_other(context, measured=hardware is None)
        check_outputs(output)
        if hardware is not None:
            paper: dict[str, Any] = {
                "dtype": dtype,
                "kv_dtype": kv_dtype,
                "tensor_parallel_size": tensor_parallel,
            }
            paper |= {"block_size": block_size, "max_tokens_per_step": step_tokens}
            _on_paper(_Asked(model, tiers, lengths, paper), hardware, output, as_json)
            return
        sizes: dict[str, Any] = {
            "num_repeats": repeats,
            "num_stages": stages,
            "max_seconds": max_seconds,
        }
        sizes |= {"block_size": block_size, "max_tokens_per_step": step_tokens, "device": device}
        balanced = throttle == "auto"
        sizes |= {"throttle": None if balanced else size(throttle, "--throttle")}
        sizes |= {"balanced": balanced, "num_threads": threads}
        sizes |= {"max_disk_nbytes": size(max_disk, "--max-disk")}
        asked = _Asked(model, tiers, lengths, sizes)
        _measured(asked, (layers, hidden, dtype or ""), (folder, output, resume), as_json)


def _refuse_options_of_the_other(context: typer.Context, *, measured: bool) -> None:
    """Refuse options that would change nothing: those of the comparison that is not made.

    Raises:
        ConfigError: one was given.
    """
    other = PAPER if measured else MEASURED
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        if given and getattr(option, "rich_help_panel", None) == other:
            remedy = "add --hardware" if measured else "drop --hardware"
            raise ConfigError(f"{option.opts[0]}: changes nothing here; {remedy}, or leave it out")


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options that both comparisons have, and in `rest` those of the one that is made.

    Attributes:
        rest: by the plan's own names; None stands for the plan's default.
    """

    model: str | None
    tiers: tuple[str, ...]
    lengths: tuple[str, ...]
    rest: dict[str, Any]

    def given(self) -> dict[str, Any]:
        """Return the plan's arguments but for the model and the tiers."""
        found = {name: value for name, value in self.rest.items() if value is not None}
        lengths = _lengths(self.lengths)
        return {**found, "lengths": lengths} if lengths else found


def _on_paper(asked: _Asked, hardware: str, output: Path | None, as_json: bool) -> None:
    from kvtiers.bench.paper import PaperPlan, run_paper
    from kvtiers.cli import bench_paper

    if asked.model is None:
        raise ConfigError("--hardware needs --model: a known model's name, or a config.json")
    stores: dict[str, Any] = {"stores": asked.tiers} if asked.tiers else {}
    result = run_paper(PaperPlan(model=asked.model, hardware=hardware, **stores, **asked.given()))
    if output is not None:
        bench_paper.write(result, output)
    if as_json:
        echo_json(result.to_plain())
    else:
        bench_paper.show(result)


def _measured(
    asked: _Asked,
    cut: tuple[int | None, int | None, str],
    where: tuple[Path | None, Path | None, bool],
    as_json: bool,
) -> None:
    """Measure; `cut`: layers, hidden size, data type. `where`: folder, output, resume."""
    from kvtiers.bench.measure import BenchError
    from kvtiers.bench.plan import DRAM, SMALL, MeasuredPlan, load_reference_shape
    from kvtiers.cli import bench_measured

    model = asked.model or SMALL
    given = asked.given()
    given.setdefault("num_threads", max(1, len(os.sched_getaffinity(0)) - 1))
    if asked.tiers:
        given["tiers"] = tuple(dict.fromkeys((DRAM, *asked.tiers)))
    shape = load_reference_shape(model, *cut)
    given["num_stages"] = min(given["num_stages"], shape.num_layers)
    plan = MeasuredPlan(model, shape, **given)
    folder, output, resume = where
    try:
        result = bench_measured.run(plan, folder, output, resume=resume, quiet=as_json)
    except BenchError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(WENT_WRONG) from None
    if output is not None:
        bench_measured.write(result, output)
    if as_json:
        echo_json(result.to_plain())
    else:
        bench_measured.show(result)
    if result.verdict is None or not result.verdict.complete:
        raise typer.Exit(WENT_WRONG)


def _lengths(texts: Sequence[str]) -> tuple[int, ...]:
    """Return the lengths that texts such as ``1024,4096`` name, ascending."""
    found = set()
    for part in ",".join(texts).split(",") if texts else ():
        if not part.strip().isdecimal():
            raise ConfigError(f"--length: {part!r} is no number of tokens; write 1024,4096")
        found.add(int(part))
    return tuple(sorted(found))
