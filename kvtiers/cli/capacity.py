"""``kvtiers capacity``: what KV an engine holds, how many sequences that sustains, what binds."""

# ruff: noqa: PLC0415 - what a verb needs is imported when it runs

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtiers.cli import simulate_options as options
from kvtiers.cli.output import JsonOption, echo_json, input_errors, show_table

if TYPE_CHECKING:
    from kvtiers.simulate.capacity import CapacityResult


def capacity(  # noqa: PLR0913, PLR0917 - one parameter an option
    model: options.ModelOption,
    hardware: options.HardwareOption,
    dtype: options.DtypeOption = "bf16",
    kv_dtype: options.KvDtypeOption = "bf16",
    tensor_parallel: options.TensorParallelOption = 1,
    utilization: options.UtilizationOption = 0.9,
    block_size: options.BlockSizeOption = 16,
    step_tokens: options.StepTokensOption = 8192,
    max_num_seqs: options.MaxSeqsOption = 256,
    max_model_len: options.MaxLenCheckOption = None,
    average_context: options.AverageOption = 4000,
    prompt_tokens: options.PromptOption = 30_000,
    decodes: options.DecodesOption = 0,
    runtime_memory: options.RuntimeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Work out the KV pool of an engine, the sequences that it sustains, and which limit binds."""
    device = (model, hardware, dtype, kv_dtype, tensor_parallel, utilization)
    knobs = (block_size, step_tokens, max_num_seqs, max_model_len)
    with input_errors(as_json):
        from kvtiers.cli.values import size
        from kvtiers.simulate.capacity import CapacityPlan, work_out

        plan = CapacityPlan(
            **options.engine_values(device, knobs),
            average_context=average_context,
            prompt_tokens=prompt_tokens,
            num_decodes=decodes,
            runtime_nbytes=size(runtime_memory, "--runtime-memory"),
        )
        result = work_out(plan)
    if as_json:
        echo_json(result.to_plain())
    else:
        _show(result)


def _show(result: CapacityResult) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from kvtiers.model.units import counted

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
        caption=f"Sequences of {counted(plan.average_context, 'token')} that run at once without "
        "preempting each other; binds: the limit that is reached first.",
        box=box.SIMPLE_HEAVY,
    )
    names = ("KV cache", "bytes a token, each device", "blocks", "tokens", "sequences", "binds")
    for name in names:
        pools.add_column(name, justify="left" if name == names[0] else "right", no_wrap=True)
    for pool in result.pools:
        numbers = (pool.nbytes_per_token, pool.num_blocks, pool.num_tokens, pool.num_seqs)
        pools.add_row(pool.kv_dtype, *(f"{number:,}" for number in numbers), pool.limit.value)
    console = Console(markup=False)
    console.print(result.summary + "\n", markup=False)
    show_table(memory)
    show_table(pools)
    console.print(result.steps, markup=False)
    for note in result.notes:
        console.print(note, markup=False)
