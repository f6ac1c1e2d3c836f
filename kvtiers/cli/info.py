"""``kvtiers info``: what is built, and what this machine offers."""

# ruff: noqa: PLC0415 - a verb imports what it needs when it runs, so that --help is quick

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvtiers.cli.output import JsonOption, echo_json, rough_size

if TYPE_CHECKING:
    from kvtiers.cli.probe_install import Installation
    from kvtiers.cli.probe_machine import CudaDriver, Machine

Row = tuple[str, str]


def info(as_json: JsonOption = False) -> None:
    """Say what is built, and what this machine offers."""
    from kvtiers.cli.probe_install import probe_installation
    from kvtiers.cli.probe_machine import probe_cuda, probe_machine

    installation, machine, driver = probe_installation(), probe_machine(), probe_cuda()
    if as_json:
        cuda = asdict(driver) if driver is not None else None
        echo_json({"built": asdict(installation), "machine": asdict(machine), "cuda": cuda})
        return
    _print_rows("built", installation_rows(installation))
    _print_rows("machine", [*machine_rows(machine), *cuda_rows(driver)])


def installation_rows(found: Installation) -> list[Row]:
    """Return the installed parts as rows of a table."""
    from kvtiers.cli.probe_install import SUPPORTED_VLLM

    if found.vllm is None:
        vllm = f"not installed; {SUPPORTED_VLLM}.x is supported"
    elif found.vllm_supported:
        vllm = f"{found.vllm}, supported"
    else:
        vllm = f"{found.vllm}, not supported; install {SUPPORTED_VLLM}.x"
    problem = found.compiled_module_problem
    nbytes = found.cuda_kernels_nbytes
    kernels = _size(nbytes) if nbytes else "none: built without nvcc; CuPy can compile them"
    return [
        ("kvtiers", found.kvtiers),
        ("python", found.python),
        ("compiled module", "loads" if problem is None else f"none: {problem}"),
        ("CUDA kernels", kernels),
        ("torch", found.torch or "not installed"),
        ("cupy", found.cupy or "not installed"),
        ("vllm", vllm),
    ]


def machine_rows(machine: Machine) -> list[Row]:
    """Return the machine's properties as rows of a table."""
    available, total = _size(machine.memory_available_nbytes), _size(machine.memory_total_nbytes)
    memory = f"{available} available of {total}"
    if machine.memory_limit_nbytes is not None:
        memory += f", the container's limit is {_size(machine.memory_limit_nbytes)}"
    memlock = machine.memlock_nbytes
    free_pages = machine.num_free_huge_pages
    return [
        ("cores", str(machine.num_cores)),
        ("L3 cache", _size(machine.l3_nbytes)),
        ("memory", memory),
        ("memory lock limit", "none" if memlock is None else _size(memlock)),
        (
            "huge pages",
            f"transparent: {machine.transparent_huge_pages or 'unknown'}, "
            f"reserved and free: {'unknown' if free_pages is None else free_pages}",
        ),
        ("vector units", ", ".join(machine.cpu_features) or "no AVX2"),
    ]


def cuda_rows(driver: CudaDriver | None) -> list[Row]:
    """Return the driver and its GPUs as rows of a table."""
    if driver is None:
        return [("CUDA driver", "not found")]
    gpus = [f"{gpu.name}, {_size(gpu.memory_nbytes)}" for gpu in driver.gpus]
    return [
        ("CUDA driver", f"serves CUDA {driver.version}"),
        ("GPU", "; ".join(gpus) or f"none ({driver.fault or 'the driver counts no device'})"),
    ]


def _print_rows(title: str, rows: Iterable[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table, markup=False)


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else rough_size(nbytes)
