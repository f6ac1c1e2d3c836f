"""``kvtiers config``: check a configuration, show the one in force, describe the schema."""

# ruff: noqa: PLC0415 - a verb imports what it needs when it runs, so that --help is quick

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtiers.cli.output import BAD_INPUT, JsonOption, echo_json, input_errors

if TYPE_CHECKING:
    from kvtiers.model.config import Config, Loaded

app = typer.Typer(help="Check, show and describe the configuration.", no_args_is_help=True)


@app.command()
def check(
    path: Annotated[Path, typer.Argument(help="The YAML file.")],
    here: Annotated[
        bool, typer.Option("--here", help="Also: whether this machine can hold the tiers.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether a file is right: exit 0 with a summary, or 2 with every problem."""
    from kvtiers.model.config import load_config

    with input_errors(as_json):
        loaded = load_config(path)
        if here:
            _check_machine(loaded)
    if as_json:
        echo_json(_report(loaded))
    else:
        typer.echo(f"{loaded.source}: ok: {_summary(loaded.config)}")


@app.command()
def show(
    path: Annotated[
        Path | None, typer.Argument(help="The YAML file; without it, the one in force.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the configuration in force, every default filled in, with its source."""
    from kvtiers.model.config import dump_yaml, resolve_config

    with input_errors(as_json):
        loaded = resolve_config(path)
    if as_json:
        config = loaded.config.model_dump(mode="json", by_alias=True)
        echo_json({"source": loaded.source, "config": config})
    else:
        typer.echo(f"# source: {loaded.source}\n{dump_yaml(loaded.config)}", nl=False)


@app.command()
def schema(
    markdown: Annotated[bool, typer.Option(help="Print the reference page instead.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the schema: JSON schema for editors, or the reference page."""
    from kvtiers.model.config import json_schema
    from kvtiers.model.config_reference import reference_markdown

    if markdown and as_json:
        typer.echo("--markdown and --json exclude each other; give one", err=True)
        raise typer.Exit(BAD_INPUT)
    if markdown:
        typer.echo(reference_markdown(), nl=False)
    else:
        echo_json(json_schema())


def _check_machine(loaded: Loaded) -> None:
    from kvtiers.connector.calibrated import measured_seeds
    from kvtiers.connector.fit import misfits
    from kvtiers.model.errors import ConfigError

    lines = [f"{loaded.where(error.path)}: {error}" for error in misfits(loaded.config)]
    try:
        measured_seeds(loaded.config)  # warns where the file is not this machine's
    except ConfigError as error:  # which names the key
        at = loaded.at(("cost", "calibration"))
        lines += [f"{at}: {line}" for line in str(error).splitlines()]
    if lines:
        raise ConfigError("\n".join(lines))


def _summary(config: Config) -> str:
    """Return the tiers, their total and what decides, in one line."""
    from kvtiers.model.units import format_size

    tiers = [f"dram {format_size(config.dram.capacity)} (pin {config.dram.pin})"]
    tiers += [
        f"{tier.name} {format_size(tier.capacity)} (write {tier.write}, admit {tier.admit})"
        for tier in config.stores
    ]
    memory, disk = _totals(config)
    where = f"{format_size(memory)} of host memory" + (
        f" and {format_size(disk)} on disk" if disk else ""
    )
    return (
        f"{', '.join(tiers)}; {where} in total; offload {config.policy.offload}, "
        f"cost {config.cost.mode} with margin {config.cost.margin:g}"
    )


def _totals(config: Config) -> tuple[int, int]:
    """Return the bytes of all tiers in host memory, and on disk."""
    memory = sum(tier.capacity for tier in config.tiers if tier.kind in ("dram", "memory"))
    return memory, sum(tier.capacity for tier in config.tiers) - memory


def _report(loaded: Loaded) -> dict[str, Any]:
    stores = [
        {"kind": tier.kind, "name": tier.name, "capacity_nbytes": tier.capacity}
        for tier in loaded.config.stores
    ]
    dram = loaded.config.dram
    tiers = [{"kind": dram.kind, "name": dram.kind, "capacity_nbytes": dram.capacity}, *stores]
    memory, disk = _totals(loaded.config)
    return {
        "ok": True,
        "source": loaded.source,
        "tiers": tiers,
        "memory_nbytes": memory,
        "disk_nbytes": disk,
    }
