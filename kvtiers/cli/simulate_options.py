"""The options of ``kvtiers simulate``, ``kvtiers size`` and ``kvtiers capacity``."""

# ruff: noqa: PLC0415 - what a verb needs is imported when it runs

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvtiers.cli.output import shown_path
from kvtiers.model.errors import ConfigError

if TYPE_CHECKING:
    from kvtiers.simulate.arrivals import ArrivalPlan
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
    _engine(
        "--step-tokens", "--max-num-batched-tokens", text="Token budget of an engine step.", min=1
    ),
]
MaxSeqsOption = Annotated[
    int, _engine("--max-num-seqs", text="Sequences of a batch at most.", min=1)
]
MaxLenOption = Annotated[
    int | None,
    _engine(
        "--max-model-len", text="Longest sequence (default: as the trace needs, if it fits).", min=1
    ),
]
MaxLenCheckOption = Annotated[
    int | None, _engine("--max-model-len", text="Longest sequence (default: not checked).", min=1)
]
PreemptionOption = Annotated[
    str, _engine("--preemption", text="What happens to preempted requests: recompute, swap, cost.")
]
MediumOption = Annotated[
    list[str] | None,
    _engine("--medium", text="Medium of a store, such as nvme=nvme-gen5; may be given again."),
]
TraceOption = Annotated[
    Path | None,
    _requests("--trace", text="JSONL conversation trace, or a folder of agent sessions."),
]
GenerateOption = Annotated[
    str | None,
    _requests(
        "--generate", text="Synthetic requests instead: chat, agents, documents, bursts, mixed."
    ),
]
NumRequestsOption = Annotated[
    int | None,
    _requests("--requests", text="The first N requests (default: all; generated: 1000).", min=1),
]
RateOption = Annotated[
    float | None, _requests("--rate", text="Generated: requests a second on average (default: 2).")
]
SeedOption = Annotated[
    int | None,
    _requests("--seed", text="Generated: equal seeds, equal traces (default: 0).", min=0),
]
TraceBlockOption = Annotated[
    int | None,
    _requests("--trace-block", text="Merge the trace's blocks to blocks of so many tokens.", min=1),
]
SpeedOption = Annotated[
    float, _requests("--speed", text="Speed of the arrivals: 0.5 is half as fast as recorded.")
]
ConcurrencyOption = Annotated[
    int | None,
    _requests(
        "--concurrency",
        text="Closed loop: so many sessions at a time, in place of arrival times.",
        min=1,
    ),
]
ReplicasOption = Annotated[
    int,
    _requests("--replicas", text="Engines that share the trace; one of them is replayed.", min=1),
]
AutoReplicasOption = Annotated[
    int | None,
    _requests(
        "--replicas",
        text="Engines that share the trace (default: the fewest that keep up without tiers).",
        min=1,
    ),
]
WarmupOption = Annotated[
    float, _requests("--warmup", text="Share of the requests that only fill the caches.")
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="YAML file of the tiers (default: no tiers).")
]
CompareOption = Annotated[
    list[Path] | None,
    typer.Option("--compare", help="Another YAML file to compare with; may be given again."),
]
MoreOption = Annotated[
    list[Path] | None, typer.Argument(help="Further files for --compare.", metavar="[YAML]...")
]
WriteTraceOption = Annotated[
    Path | None, typer.Option(help="Write the generated trace to a JSONL file as well.")
]
StopOption = Annotated[
    float | None, typer.Option(help="Stop each replay after so many seconds of real time.")
]
GoalOption = Annotated[
    str,
    typer.Option(
        help="ttft-p90=0.5x (of that without tiers), ttft-p90=2s, hit-rate=0.3, or cost=500: the "
        "best p90 TTFT for the money."
    ),
]
PriceOption = Annotated[
    list[str] | None,
    typer.Option(help="Price of a GB: dram=4, nvme=0.1 (assumed); may be given again."),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Replacement rule, as in policy.evict; may be given again. The first one is sized "
        "with, the others are compared (default: all but adaptive, lru first)."
    ),
]
MaxSecondsOption = Annotated[
    float, typer.Option(help="No replay begins after so many seconds of real time.")
]
JobsOption = Annotated[
    int | None,
    typer.Option(
        help="Replays at a time, each a process of about 200 MiB (default: one a core).", min=1
    ),
]
WriteConfigOption = Annotated[
    Path | None, typer.Option(help="Write the YAML that meets the goal to this file.")
]
AverageOption = Annotated[
    int, typer.Option(min=1, help="Tokens of a running sequence, on average.")
]
PromptOption = Annotated[
    int, typer.Option(min=1, help="Tokens of a prompt whose steps are counted.")
]
DecodesOption = Annotated[
    int, typer.Option(min=0, help="Sequences that decode beside that prompt.")
]
RuntimeOption = Annotated[
    str | None,
    typer.Option(
        help="Memory of a device beside weights and KV, such as 4GiB (default: estimated)."
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", help="Folder for a JSON file, a PNG and an HTML page."),
]


_DEVICE: Final = ("model", "hardware", "dtype", "kv_dtype", "tensor_parallel_size", "utilization")
_KNOBS: Final = ("block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len")


def engine_values(device: Sequence[Any], knobs: Sequence[Any]) -> dict[str, Any]:
    """Return the engine's options, in the order of `_DEVICE` and `_KNOBS`, by their names."""
    return dict(zip((*_DEVICE, *_KNOBS), (*device, *knobs), strict=True))


def read_trace(
    path: Path | None,
    generate: tuple[str | None, float | None, int | None],
    num_requests: int | None,
    block_size: int | None,
) -> Trace:
    """Return the trace that the options name; `generate`: kind, rate and seed.

    Raises:
        ConfigError: neither or both are named, or an option is given that would change nothing.
        TraceError: it cannot be read.
    """
    from kvtiers.simulate.generate import Workload
    from kvtiers.simulate.generate import generate as make
    from kvtiers.simulate.trace import Trace, load_trace

    kind, rate, seed = generate
    if (path is None) == (kind is None):
        raise ConfigError("give either --trace PATH or --generate KIND")
    if kind is not None:
        if block_size is not None:
            raise ConfigError("--trace-block: is for --trace; what --generate makes has 512 tokens")
        named = workload((kind, rate, seed))
        return make(Workload(kind, num_requests or 1000, named["rate"], named["seed"]))
    for name, value in (("--rate", rate), ("--seed", seed)):
        if value is not None:
            raise ConfigError(
                f"{name}: is for --generate; a trace has its own requests, of which --speed "
                "changes the pace"
            )
    assert path is not None, "one of both is given"
    trace = load_trace(path, block_size)
    if num_requests is None:
        return trace
    return Trace(trace.name, trace.block_size, trace.requests[:num_requests])


def workload(generate: tuple[str, float | None, int | None]) -> dict[str, Any]:
    """Return what is generated, with the defaults filled in."""
    kind, rate, seed = generate
    return {"generate": kind, "rate": 2.0 if rate is None else rate, "seed": seed or 0}


def about_requests(
    path: Path | None, generate: tuple[str | None, float | None, int | None], trace: Trace
) -> dict[str, Any]:
    """Return what a report says of the requests; see `read_trace`."""
    kind, rate, seed = generate
    made = {} if kind is None else workload((kind, rate, seed))
    name = None if path is None else shown_path(path)
    return {"trace": name, **made, "requests": len(trace.requests), "trace_block": trace.block_size}


def arrival_plan(speed: float, concurrency: int | None, trace: Trace) -> ArrivalPlan:
    """Return how the requests come.

    Raises:
        ConfigError: the options make no sense, or the speed would change nothing.
    """
    from kvtiers.simulate.arrivals import ArrivalPlan

    plan = ArrivalPlan(speed, concurrency)
    plan.check(trace.requests)
    return plan


def about_arrivals(
    speed: float, concurrency: int | None, replicas: int | None, warmup: float
) -> dict[str, Any]:
    """Return what a report says of when they come, and to how many engines."""
    loop = "open" if concurrency is None else "closed"
    more = {"replicas": replicas, "warmup": warmup}
    return {"loop": loop, "concurrency": concurrency, "speed": speed, **more}


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
