"""``kvtiers capacity``: what KV an engine holds, how many sequences that sustains, what binds."""

# ruff: noqa: PLC0415 - what a verb needs is imported when it runs

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvtiers.cli.output import JsonOption, echo_json, input_errors

if TYPE_CHECKING:
    from kvtiers.simulate.capacity import CapacityResult


def capacity(  # noqa: PLR0913, PLR0917 - one parameter an option
    model: Annotated[
        str, typer.Option("--model", help="A known model, such as llama-3.1-8b, or a config.json.")
    ],
    hardware: Annotated[str, typer.Option(help="A known device, such as h100.")],
    dtype: Annotated[str, typer.Option(help="Data type of the weights: bf16, fp8, fp32.")] = "bf16",
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", "--kv-cache-dtype", help="Data type of the KV cache.")
    ] = "bf16",
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", "--tp", min=1, help="Devices of one engine.")
    ] = 1,
    utilization: Annotated[
        float, typer.Option(help="Share of a device's memory that the engine claims.")
    ] = 0.9,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the longest sequence; checked if given.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences of a batch.")] = 256,
    step_tokens: Annotated[
        int,
        typer.Option(
            "--step-tokens", "--max-num-batched-tokens", min=1, help="Budget of an engine step."
        ),
    ] = 8192,
    average_context: Annotated[
        int, typer.Option(min=1, help="Tokens of a running sequence, on average.")
    ] = 4000,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="A prompt whose steps are counted.")
    ] = 30_000,
    decodes: Annotated[int, typer.Option(min=0, help="Sequences that decode beside it.")] = 0,
    runtime_memory: Annotated[
        str | None,
        typer.Option(help="Memory of a device beside weights and KV, such as 4GiB; estimated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Work out the KV pool of an engine, the sequences that it sustains, and which limit binds."""
    with input_errors(as_json):
        from kvtiers.cli.values import size
        from kvtiers.simulate.capacity import CapacityPlan, work_out

        result = work_out(
            CapacityPlan(
                model=model,
                hardware=hardware,
                dtype=dtype,
                kv_dtype=kv_dtype,
                tensor_parallel_size=tensor_parallel,
                utilization=utilization,
                block_size=block_size,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=step_tokens,
                average_context=average_context,
                prompt_tokens=prompt_tokens,
                num_decodes=decodes,
                runtime_nbytes=size(runtime_memory, "--runtime-memory"),
            )
        )
    if as_json:
        echo_json(result.to_plain())
    else:
        _show(result)


def _show(result: CapacityResult) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    def gb(nbytes: float) -> str:
        return f"{nbytes / 1e9:,.1f} GB"

    plan = result.plan
    memory = Table(title=f"{result.title}: memory of one device", box=box.SIMPLE_HEAVY)
    memory.add_column("")
    memory.add_column("", justify="right", no_wrap=True)
    memory.add_row("device", gb(result.memory_nbytes))
    memory.add_row(f"claimed ({plan.utilization:g})", gb(result.claimed_nbytes))
    memory.add_row(f"weights ({plan.dtype})", gb(result.weights_nbytes))
    given = "" if plan.runtime_nbytes is not None else ", estimated"
    memory.add_row(f"activations and runtime{given}", gb(result.other_nbytes))
    memory.add_row("KV pool", gb(result.pool_nbytes))
    pools = Table(
        title="What the KV pool holds",
        caption=f"Sequences of {plan.average_context:,} tokens that run at once without preempting "
        "each other; binds: the limit that is reached first.",
        box=box.SIMPLE_HEAVY,
    )
    names = ("KV cache", "bytes a token", "blocks", "tokens", "sequences", "binds")
    for name in names:
        pools.add_column(name, justify="left" if name == names[0] else "right", no_wrap=True)
    for pool in result.pools:
        numbers = (pool.nbytes_per_token, pool.num_blocks, pool.num_tokens, pool.num_seqs)
        pools.add_row(pool.kv_dtype, *(f"{number:,}" for number in numbers), pool.limit.value)
    console = Console()
    console.print(memory)
    console.print(pools)
    beside = f" beside {plan.num_decodes} decodes" if plan.num_decodes else ""
    console.print(
        f"A prompt of {plan.prompt_tokens:,} tokens takes {len(result.chunks)} steps{beside}: "
        f"{result.chunks[0]:,} tokens in the first.",
        markup=False,
    )
    for note in result.notes:
        console.print(note, markup=False)
