"""``kvtiers bench``: recompute against reload, on paper, for a model and a machine."""

# ruff: noqa: PLC0415 - what a verb needs is imported when it runs

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtiers.cli.output import JsonOption, echo_json, input_errors

if TYPE_CHECKING:
    from kvtiers.bench.paper import PaperResult


def bench(  # noqa: PLR0913, PLR0917 - one parameter an option
    model: Annotated[
        str, typer.Option(help="A known model, such as llama-3.1-8b, or a config.json.")
    ],
    hardware: Annotated[str, typer.Option(help="A known device, such as h100.")],
    tier: Annotated[
        list[str] | None, typer.Option(help="A known medium below DRAM; may be given again.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Data type of the weights.")] = "bf16",
    kv_dtype: Annotated[str, typer.Option(help="Data type of the KV cache.")] = "bf16",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices of one engine.")] = 1,
    length: Annotated[
        list[int] | None, typer.Option(min=2, help="Tokens of a prompt; may be given again.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    step_tokens: Annotated[int, typer.Option(min=1, help="The engine's budget of a step.")] = 8192,
    output: Annotated[
        Path | None, typer.Option(help="Folder for a JSON file, a PNG and an HTML page.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict from which prefix length on a reload is faster, for hardware one need not have."""
    from kvtiers.bench.paper import DEFAULT_LENGTHS, DEFAULT_STORES, PaperPlan, run_paper

    with input_errors(as_json):
        plan = PaperPlan(
            model=model,
            hardware=hardware,
            stores=tuple(tier or DEFAULT_STORES),
            dtype=dtype,
            kv_dtype=kv_dtype,
            tensor_parallel_size=tensor_parallel,
            lengths=tuple(sorted(length or DEFAULT_LENGTHS)),
            block_size=block_size,
            max_tokens_per_step=step_tokens,
        )
        result = run_paper(plan)
        if output is not None:
            _write(result, output)
    if as_json:
        echo_json(result.to_plain())
    else:
        _show(result)


def _write(result: PaperResult, folder: Path) -> None:
    from kvtiers.bench.paper_report import write_report

    model = Path(result.plan.model)
    stem = model.parent.name if model.name == "config.json" else model.name
    name = f"{stem.removesuffix('.json') or 'model'}-on-{result.plan.hardware}".lower()
    written, missing = write_report(result, folder, name)
    for path in written:
        typer.echo(f"wrote {path}", err=True)
    if missing is not None:
        typer.echo(missing, err=True)


def _show(result: PaperResult) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{result.title}: seconds to the first token, on paper",
        caption="In parentheses: how many times faster than recompute. Break-even: the prefix "
        "length from which on a reload is faster. Best split: over the better of recompute and "
        "reload, where loads come layer by layer inside the step.",
        box=box.SIMPLE_HEAVY,
    )
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("recompute", justify="right", no_wrap=True)
    for tier in result.tiers:
        table.add_column(tier.title, justify="right")
    for row in zip(*(tier.points for tier in result.tiers), strict=True):
        cells = [f"{point.reload_seconds:.3f} ({point.gain:.1f}x)" for point in row]
        table.add_row(f"{row[0].num_tokens:,}", f"{row[0].recompute_seconds:.3f}", *cells)
    table.add_section()
    even = [f"{t.break_even_tokens:,}" if t.break_even_tokens else "never" for t in result.tiers]
    table.add_row("break-even", "", *even)
    split = [f"{max(point.split_gain for point in t.points):.2f}x" for t in result.tiers]
    table.add_row("best split", "", *split)
    console = Console()
    console.print(table)
    for note in result.notes:
        console.print(note, markup=False)
