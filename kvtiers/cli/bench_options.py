"""The options of ``kvtiers bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

PAPER: Final = "On paper (--hardware)"
MEASURED: Final = "Measured (without --hardware)"


def _paper(*names: str, text: str, least: int | None = None) -> Any:
    return typer.Option(*names, help=text, min=least, rich_help_panel=PAPER)


def _measured(text: str, least: int | None = None) -> Any:
    return typer.Option(help=text, min=least, rich_help_panel=MEASURED)


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A known model, such as llama-3.1-8b, or a config.json. Measured, without it: a small "
        "model of random weights.",
    ),
]
LengthOption = Annotated[
    list[str] | None,
    typer.Option("--length", "--lengths", help="Tokens of the prompts, such as 1024,4096."),
]
TierOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tier",
        help="A tier below DRAM; may be given again. On paper a known medium, such as nvme-gen4; "
        "measured: nvme, lmdb.",
    ),
]
BlockSizeOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a block (default: 16 on paper, 32 measured).")
]
StepTokensOption = Annotated[
    int,
    typer.Option(
        "--step-tokens", "--max-num-batched-tokens", min=1, help="Token budget of an engine step."
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", help="Folder for a JSON file, a PNG and an HTML page."),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="Data type of the weights. On paper: bf16 (default), fp8, fp32. Measured, of the KV "
        "too: float32, bfloat16, float16."
    ),
]

HardwareOption = Annotated[
    str | None, _paper("--hardware", text="A known device, such as h100: predict, and run nothing.")
]
KvDtypeOption = Annotated[
    str, _paper("--kv-dtype", "--kv-cache-dtype", text="Data type of the KV cache.")
]
TensorParallelOption = Annotated[
    int, _paper("--tensor-parallel", "--tp", text="Devices of one engine.", least=1)
]

LayersOption = Annotated[int | None, _measured("Cut the model down to so many layers.", 1)]
HiddenOption = Annotated[int | None, _measured("Cut it down to this hidden size.", 1)]
RepeatsOption = Annotated[int, _measured("Runs of each measurement; medians count.", 1)]
ThrottleOption = Annotated[
    str | None,
    _measured(
        "Slow the stores' reads down to so many bytes a second, such as 40MB; auto: to the speed "
        "at which the middle length takes as long to load as to compute."
    ),
]
StagesOption = Annotated[int, _measured("Layer ranges of overlapped loads, at most.", 1)]
ThreadsOption = Annotated[
    int | None, _measured("Threads of torch on the CPU (default: all cores but one).", 1)
]
DeviceOption = Annotated[str, _measured("Device of torch: cpu, cuda.")]
FolderOption = Annotated[
    Path | None, _measured("Folder on the disk to be measured (default: a temporary one).")
]
MaxSecondsOption = Annotated[float, _measured("No measurement begins after so many seconds.")]
MaxDiskOption = Annotated[str, _measured("Bytes that the stores may take at most.")]
ResumeOption = Annotated[
    bool, _measured("Go on with an earlier run, whose measurements are in --output.")
]
