"""``kvtiers demo``: a real engine answers a long prompt, computed and reloaded."""

# ruff: noqa: PLC0415 - what a verb needs is imported when it runs

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvtiers.cli.output import JsonOption, check_outputs, echo_json, input_errors, show_table
from kvtiers.cli.progress import progress_bar
from kvtiers.cli.terminable import terminable

if TYPE_CHECKING:
    from kvtiers.bench.demo import DemoPlan, DemoResult

DIFFERENT_TOKENS: Final = 1
"""Exit code when a row did not give the same tokens, or nothing was reloaded."""


def demo(
    tokens: Annotated[int, typer.Option(min=256, max=16384, help="Tokens of the prompt.")] = 4096,
    repeats: Annotated[int, typer.Option(min=1, max=99, help="Runs of each quick row.")] = 5,
    threads: Annotated[
        int | None, typer.Option(min=1, help="OpenMP threads of a CPU engine (default: all cores).")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the random model (default: a temporary one)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute a long prompt in real vLLM, then reload it: times, tokens, and whether they agree."""
    import tempfile

    with input_errors(as_json):
        from kvtiers.bench.demo import DemoPlan

        check_outputs(folder)
        plan = DemoPlan(num_prompt_tokens=tokens, num_repeats=repeats)
        if threads is not None:
            plan = replace(plan, num_threads=threads)
        with tempfile.TemporaryDirectory(prefix="kvtiers-demo-") as temporary:
            result = _run(plan, folder or Path(temporary), as_json)
    if as_json:
        echo_json(result.to_plain())
    else:
        _show(result)
    if not result.ok:
        raise typer.Exit(DIFFERENT_TOKENS)


def _run(plan: DemoPlan, folder: Path, quiet: bool) -> DemoResult:
    from kvtiers.bench.demo import num_events, run_demo

    with progress_bar(36, quiet=quiet, spinner=True) as bar, terminable():
        task = bar.add_task("writing a model, starting vLLM", total=num_events(plan))
        return run_demo(plan, folder, lambda what: bar.update(task, advance=1, description=what))


def _show(result: DemoResult) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    plan = result.plan
    mib = plan.num_prompt_tokens * plan.model.kv_nbytes_per_token / 2**20
    table = Table(
        title=f"vLLM on {result.device}: a prompt of {plan.num_prompt_tokens} tokens, "
        f"{mib:.0f} MiB of KV in {plan.model.dtype}",
        caption="TTFT: median time to the first token. kvtiers/HBM/new: the prompt's tokens whose "
        "KV kvtiers reloaded, the engine had, and the engine computed. same: tokens as in the "
        "first row.",
        box=box.SIMPLE_HEAVY,
    )
    table.add_column("", no_wrap=True)
    for name in ("TTFT", "speed-up", "kvtiers/HBM/new", "MiB", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result.rows:
        in_hbm = row.num_cached_tokens - row.num_reloaded_tokens
        table.add_row(
            row.name,
            f"{row.ttft_seconds * 1e3:,.0f} ms",
            f"{row.speedup:,.1f}x",
            f"{row.num_reloaded_tokens} / {in_hbm} / {row.num_computed_tokens}",
            f"{row.nbytes / 2**20:.0f}",
            Text("yes", "green") if row.same_tokens else Text("NO", "red"),
        )
    show_table(table)
