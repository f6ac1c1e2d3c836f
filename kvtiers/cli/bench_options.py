"""The options of ``kvtiers bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

PAPER: Final = "On paper (--hardware)"
MEASURED: Final = "Measured (without --hardware)"


def _paper(text: str, least: int | None = None) -> Any:
    return typer.Option(help=text, min=least, rich_help_panel=PAPER)


def _measured(text: str, least: int | None = None) -> Any:
    return typer.Option(help=text, min=least, rich_help_panel=MEASURED)


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A known model, such as llama-3.1-8b, or a config.json. Measured: a small one, "
        "unless it is given.",
    ),
]
LengthOption = Annotated[
    list[str] | None,
    typer.Option("--length", "--lengths", help="Tokens of the prompts: 1024,4096; again for more."),
]
TierOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tier",
        help="A tier below DRAM; may be given again. On paper a known medium, such as nvme-gen4; "
        "measured: nvme, lmdb.",
    ),
]
BlockSizeOption = Annotated[int | None, typer.Option(min=1, help="Tokens of a block.")]
StepTokensOption = Annotated[int, typer.Option(min=1, help="The engine's budget of a step.")]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "--out", help="Folder for a JSON file, a PNG and an HTML page."),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="Data type of the weights; measured, of the KV too: float32, bfloat16."),
]

HardwareOption = Annotated[
    str | None, _paper("A known device, such as h100: predict, and run nothing.")
]
KvDtypeOption = Annotated[str, _paper("Data type of the KV cache.")]
TensorParallelOption = Annotated[int, _paper("Devices of one engine.", 1)]

LayersOption = Annotated[int | None, _measured("Cut the model down to so many layers.", 1)]
HiddenOption = Annotated[int | None, _measured("Cut it down to this hidden size.", 1)]
RepeatsOption = Annotated[int, _measured("Runs of each measurement; medians count.", 1)]
ThrottleOption = Annotated[
    str | None,
    _measured(
        "Slow the reads of stores down to so many bytes a second, such as 40MB; auto: so that the "
        "middle length loads as long as it computes."
    ),
]
StagesOption = Annotated[int, _measured("Layer ranges of overlapped loads, at most.", 1)]
ThreadsOption = Annotated[
    int | None, _measured("Threads of torch on the CPU; all cores but one.", 1)
]
DeviceOption = Annotated[str, _measured("Device of torch: cpu, cuda.")]
FolderOption = Annotated[
    Path | None, _measured("Where stores are made, and removed again: the disk that is measured.")
]
MaxSecondsOption = Annotated[float, _measured("No measurement begins after so many seconds.")]
MaxDiskOption = Annotated[str, _measured("Most bytes that the stores may take.")]
ResumeOption = Annotated[bool, _measured("Go on with the run whose points are in --output.")]
