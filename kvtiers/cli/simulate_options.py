"""The options that ``kvtiers simulate`` and ``kvtiers size`` share."""

# ruff: noqa: PLC0415 - what a verb needs is imported when it runs

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvtiers.model.errors import ConfigError

if TYPE_CHECKING:
    from kvtiers.simulate.machine import MachinePlan
    from kvtiers.simulate.trace import Trace

ENGINE: Final = "The engine"
REQUESTS: Final = "The requests"


def _engine(*names: str, text: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=ENGINE, **more)


def _requests(*names: str, text: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=REQUESTS, **more)


ModelOption = Annotated[
    str, _engine("--model", text="A known model, such as llama-3.1-8b, or a config.json.")
]
HardwareOption = Annotated[str, _engine("--hardware", text="A known device, such as h100.")]
DtypeOption = Annotated[str, _engine("--dtype", text="Data type of the weights.")]
KvDtypeOption = Annotated[
    str, _engine("--kv-dtype", "--kv-cache-dtype", text="Data type of the KV cache.")
]
TensorParallelOption = Annotated[
    int, _engine("--tensor-parallel", "--tp", text="Devices of one engine.", min=1)
]
UtilizationOption = Annotated[
    float, _engine("--utilization", text="Share of a device's memory that the engine claims.")
]
BlockSizeOption = Annotated[int, _engine("--block-size", text="Tokens of a block.", min=1)]
StepTokensOption = Annotated[
    int,
    _engine("--step-tokens", "--max-num-batched-tokens", text="Budget of an engine step.", min=1),
]
MaxSeqsOption = Annotated[int, _engine("--max-num-seqs", text="Sequences of a batch.", min=1)]
MaxLenOption = Annotated[
    int | None,
    _engine("--max-model-len", text="Longest sequence; as the trace needs and HBM holds.", min=1),
]
PreemptionOption = Annotated[
    str, _engine("--preemption", text="What becomes of victims: recompute, swap, cost.")
]
MediumOption = Annotated[
    list[str] | None,
    _engine("--medium", text="What a store is made of: nvme=nvme-gen5; may be given again."),
]
TraceOption = Annotated[
    Path | None,
    _requests("--trace", text="JSONL conversation trace, or a folder of agent sessions."),
]
GenerateOption = Annotated[
    str | None,
    _requests("--generate", text="A synthetic one: chat, agents, documents, bursts, mixed."),
]
NumRequestsOption = Annotated[
    int | None, _requests("--requests", text="Requests: the first so many; generated: 1000.", min=1)
]
RateOption = Annotated[float, _requests("--rate", text="Generated: requests a second.")]
SeedOption = Annotated[int, _requests("--seed", text="Generated: equal seeds, equal traces.")]
TraceBlockOption = Annotated[
    int | None,
    _requests("--trace-block", text="Put small ids together to blocks of so many tokens.", min=1),
]
SpeedOption = Annotated[
    float, _requests("--speed", text="Times as fast as recorded: 0.5 is half as fast.")
]
ConcurrencyOption = Annotated[
    int | None,
    _requests("--concurrency", text="Closed loop: so many sessions at a time.", min=1),
]
WarmupOption = Annotated[
    float, _requests("--warmup", text="Share of the requests that only fill the caches.")
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "--out", help="Folder for a JSON file, a PNG and an HTML page."),
]


def read_trace(
    path: Path | None,
    generate: tuple[str | None, float, int],
    num_requests: int | None,
    block_size: int | None,
) -> Trace:
    """Return the trace that the options name; `generate`: kind, rate and seed.

    Raises:
        ConfigError: neither or both are named. TraceError: it cannot be read.
    """
    from kvtiers.simulate.generate import Workload
    from kvtiers.simulate.generate import generate as make
    from kvtiers.simulate.trace import Trace, load_trace

    kind, rate, seed = generate
    if (path is None) == (kind is None):
        raise ConfigError("give either --trace PATH or --generate KIND")
    if kind is not None:
        return make(Workload(kind, num_requests or 1000, rate, seed))
    assert path is not None, "one of both is given"
    trace = load_trace(path, block_size)
    if num_requests is None:
        return trace
    return Trace(trace.name, trace.block_size, trace.requests[:num_requests])


def machine_plan(values: dict[str, Any], media: Sequence[str], preemption: str) -> MachinePlan:
    """Return the engine that the options describe.

    Raises:
        ConfigError: a medium is not written as STORE=MEDIUM, or a word is not known.
    """
    from kvtiers.cost.preempt import PreemptMode
    from kvtiers.simulate.machine import MachinePlan

    chosen = {}
    for text in media:
        name, equals, medium = text.partition("=")
        if not (name and equals and medium):
            raise ConfigError(f"--medium: {text!r} is not STORE=MEDIUM; write nvme=nvme-gen5")
        chosen[name] = medium
    if preemption not in list(PreemptMode):
        raise ConfigError(
            f"--preemption: {preemption!r} is not known; write one of {', '.join(PreemptMode)}"
        )
    return MachinePlan(**values, media=chosen, preemption=PreemptMode(preemption))
