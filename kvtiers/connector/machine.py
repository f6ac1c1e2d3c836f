"""What tells this machine from others, as read from procfs."""

from __future__ import annotations

import os
from pathlib import Path

from kvtiers.cost.calibration import MachineFacts


def machine_facts(proc: Path = Path("/proc")) -> MachineFacts:
    """Return CPU, GPUs and cores.

    Args:
        proc: where procfs is mounted.
    """
    files = sorted((proc / "driver/nvidia/gpus").glob("*/information"))
    return MachineFacts(
        cpu=_field(proc / "cpuinfo", "model name"),
        gpus=tuple(_field(file, "Model") for file in files),
        num_cores=len(os.sched_getaffinity(0)),
    )


def _field(path: Path, wanted: str) -> str:
    """Return the first value of a name in a file of ``name: value`` lines; "" without one."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == wanted), "")
