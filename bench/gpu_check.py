"""Check and measure the copies of CUDA devices: run it where there is one, under five minutes.

    python bench/gpu_check.py --out bench/results/gpu.json --scratch /mnt/nvme0

Every layout and route is checked byte for byte on random data with poisoned targets, and the order
of copies behind a busy stream; then speeds are measured against the fastest copy of one large
page-locked piece, in this same run. One table, and all numbers with `--out`, which is written after
each section: what is interrupted keeps what it had. The exit code is 0 where every line holds, 1
where one does not, 2 where nothing could be checked.

The checks alone, on small layouts, for CUDA's own tools; `--sanitizers` runs these four:

    compute-sanitizer --tool memcheck  --error-exitcode 9 python bench/gpu_check.py --sanitize
    compute-sanitizer --tool racecheck --error-exitcode 9 python bench/gpu_check.py --sanitize
    compute-sanitizer --tool synccheck --error-exitcode 9 python bench/gpu_check.py --sanitize
    compute-sanitizer --tool initcheck --error-exitcode 9 python bench/gpu_check.py --sanitize
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_speed
import torch
from gpu_layouts import World, all_layouts, flat_layout, wrong_copies
from gpu_machine import MIB, Machine, Sizes
from gpu_pipeline import Jobs, measure_pipeline
from gpu_prefill import measure_prefill
from gpu_report import lines_of, table

from kvtiers import native
from kvtiers.data.copier import Direction
from kvtiers.data.copier_cuda import CudaTuning
from kvtiers.data.copier_cuda_routes import Route
from kvtiers.data.cuda_device import find_device
from kvtiers.model.errors import KVTiersError

GATHER, SCATTER = Direction.GATHER, Direction.SCATTER
LAST_START_SECONDS = 240.0  # no section begins later: all of it must end within five minutes
LAST_ROW_SECONDS = 280.0  # and none goes on later than this
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
TOOLS_SECONDS = 280.0  # for all of them
SMALL = Sizes(largest_layout=256 * MIB)

# Of a device, a driver, a disk, and of numbers that make no sense.
EXPECTED = (RuntimeError, OSError, AssertionError, ArithmeticError, ValueError, KVTiersError)

Section = Callable[[], Iterable[Mapping[str, Any]]]


def check_layouts(machine: Machine) -> Iterator[dict[str, Any]]:
    """Copy every layout by every route and by every call that a driver may have."""
    driver = machine.device.driver
    version = driver.batch_version
    for name, layout in all_layouts().items():
        if sum(layout.allocations) > machine.sizes.largest_layout:
            continue
        yield _checked(World(machine, layout, 40, CudaTuning(staging_nbytes=MIB)), name)
    for older in (12080, 0):
        if older <= version:
            driver.limit_batch_version(older)
            layout = all_layouts()["two groups, mixed pages"]
            yield _checked(World(machine, layout, 40), f"copies as of driver {older}")
    driver.limit_batch_version(version)


def _checked(world: World, name: str) -> dict[str, Any]:
    wrong = [f"{route.value}: {text}" for route in Route for text in wrong_copies(world, route)]
    world.close()
    return {"layout": name, "wrong": wrong}


def check_order(machine: Machine) -> Iterator[dict[str, Any]]:
    """Keep the engine's stream busy, then write: a copy must not run ahead."""
    world = World(machine, flat_layout(8, MIB), 8)
    batch = world.batch(8)
    for route, direction in itertools.product(Route, Direction):
        world.copy(route, direction, batch)
        wrong = []
        for value in range(1, 4):
            world.memory[0].fill_(0)
            machine.cuda._sleep(50_000_000)
            world.memory[0].fill_(value)
            read = world.memory[0].clone()
            ticket = world.copier.submit_by(route, direction, batch, world.copier.mark())
            if world.copier.done(ticket):
                wrong.append("it did not wait")
                continue
            world.copier.wait(ticket)
            world.copier.done(ticket)
            seen = {world.slab.view(int(slot))[4096 + 77] for slot in batch.slots}
            if direction is GATHER and seen != {value}:
                wrong.append(f"it read {seen}, not {value}")
            if direction is SCATTER and not bool((read == value).all()):
                wrong.append("it overwrote what was still read")
        machine.cuda.synchronize()
        yield {"layout": f"{route.value} {direction.value}", "wrong": wrong}
    world.close()


def run_tools() -> Iterator[dict[str, Any]]:
    """Run the checks under CUDA's tools; see the top of this file."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        raise RuntimeError("not run: compute-sanitizer is not installed")
    deadline = time.perf_counter() + TOOLS_SECONDS
    for done, tool in enumerate(TOOLS):
        seconds = (deadline - time.perf_counter()) / (len(TOOLS) - done)
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__]
        try:
            ran = subprocess.run([*command, "--sanitize"], capture_output=True, text=True,
                                 check=False, timeout=seconds)  # fmt: skip
        except subprocess.TimeoutExpired:
            yield {"tool": tool, "said": f"not over after {seconds:.0f} s", "clean": False}
            continue
        lines = [line for line in (ran.stdout + ran.stderr).splitlines() if "SUMMARY" in line]
        said = lines[-1].strip("= ") if lines else f"exit code {ran.returncode}"
        yield {"tool": tool, "said": said, "clean": ran.returncode == 0}


def sections_of(machine: Machine, scratch: Path, *, sanitize: bool) -> dict[str, Section]:
    """Return what is run, the most telling first: time may run out."""
    checks: dict[str, Section] = {"bytes": lambda: check_layouts(machine)}
    if sanitize:
        return checks
    jobs = Jobs()
    peaks: list[gpu_speed.Peak] = []

    def peak() -> gpu_speed.Peak:
        if not peaks:
            peaks.append(gpu_speed.measured_peak(machine))
        return peaks[0]

    return checks | {
        "order": lambda: check_order(machine),
        "peak": lambda: [dataclasses.asdict(peak())],
        "pieces": lambda: gpu_speed.measure_pieces(machine, peak()),
        "both ways": lambda: gpu_speed.measure_both_ways(machine, peak()),
        "beside compute": lambda: gpu_speed.measure_beside_compute(machine),
        "disk to device": lambda: measure_pipeline(machine, scratch, jobs),
        "prefill": lambda: measure_prefill(machine, jobs),
        "start-up": lambda: gpu_speed.measure_start(machine),
        "calls": lambda: gpu_speed.measure_submit(machine),
        "torch": lambda: gpu_speed.measure_torch(machine, peak()),
        "thread blocks": lambda: gpu_speed.measure_thread_blocks(machine, peak()),
    }


def run(
    machine: Machine, sections: Mapping[str, Section], out: Path | None = None
) -> dict[str, Any]:
    """Run sections; one that fails, or has no time left, is a sentence in the report."""
    started = time.perf_counter()
    report: dict[str, Any] = {"facts": machine.facts(), "sections": {}, "seconds": {"all": 0.0}}
    print(json.dumps(report["facts"]), flush=True)
    stopped = ""
    for name, section in sections.items():
        begun = time.perf_counter()
        if not stopped and begun - started > LAST_START_SECONDS:
            stopped = f"{begun - started:.0f} s have passed"
        if stopped:
            report["sections"][name] = f"not run: {stopped}"
            continue
        try:
            report["sections"][name] = _rows(section, started + LAST_ROW_SECONDS)
        except KeyboardInterrupt:
            stopped = "interrupted"
            report["sections"][name] = "failed: interrupted"
        except EXPECTED as error:
            said = str(error)
            report["sections"][name] = said if said.startswith("not run") else f"failed: {error!r}"
        report["seconds"][name] = time.perf_counter() - begun
        report["seconds"]["all"] = time.perf_counter() - started
        print(f"{name}: {report['seconds'][name]:.1f} s", file=sys.stderr, flush=True)
        if out is not None:
            out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def _rows(section: Section, deadline: float) -> list[dict[str, Any]]:
    """Return a section's rows, as many as time allows; at least one."""
    rows = []
    for row in section():
        rows.append(dict(row))
        if time.perf_counter() > deadline:
            print("the time is over: the section ends here", file=sys.stderr, flush=True)
            break
    return rows


def write(report: Mapping[str, Any], out: Path | None) -> int:
    """Print the table, write both files; returns how many lines do not hold."""
    lines = lines_of(report)
    missed = sum(line.holds is False for line in lines)
    text = table(lines)
    print(text)
    last = f"{missed} of {len(lines)} lines do not hold; {report['seconds']['all']:.0f} s in all"
    print(last, flush=True)
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
        title = f"# CUDA copies on {report['facts']['device']}"
        facts = json.dumps(report["facts"])
        out.with_suffix(".md").write_text(f"{title}\n\n{facts}\n\n{text}\n\n{last}\n")
    return missed


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write all numbers here, and the table beside it")
    parser.add_argument("--scratch", type=Path, help="a folder on the disk to measure")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--sanitize", action="store_true", help="only check what is small")
    only.add_argument("--sanitizers", action="store_true", help="the checks under CUDA's tools")
    return parser.parse_args(arguments)


def find_machine(sizes: Sizes) -> Machine | str:
    """Return the first device, or why there is none."""
    if not torch.cuda.is_available():
        return "no CUDA device: nothing to check"
    torch.zeros(1, device="cuda")
    found = find_device(0, lambda: int(torch.cuda.current_stream().cuda_stream))
    if isinstance(found, str):
        return found
    if not native.kernels():
        return "this build of kvtiers has no CUDA kernels: nothing to check"
    return Machine(found, native.kernels(), sizes=sizes)


def wrong_paths(chosen: argparse.Namespace) -> str | None:
    """Return why results would be lost, or the disk not measured; before minutes are spent."""
    scratch, out = chosen.scratch, chosen.out
    if scratch is not None and not (scratch.is_dir() and os.access(scratch, os.W_OK)):
        return f"--scratch {scratch}: no folder that can be written to"
    if out is not None and (
        out.is_dir() or not out.absolute().parent.is_dir()
        or not os.access(out if out.exists() else out.absolute().parent, os.W_OK)
    ):  # fmt: skip
        return f"--out {out}: no file that can be written"
    return None


def main(arguments: Sequence[str], machine: Machine | str | None = None) -> int:
    chosen = options(arguments)
    wrong = wrong_paths(chosen)
    if wrong is not None:
        print(wrong)
        return 2
    if machine is None:
        machine = find_machine(SMALL if chosen.sanitize else Sizes())
    if isinstance(machine, str):
        print(machine)
        return 2
    with tempfile.TemporaryDirectory(dir=chosen.scratch) as scratch:
        sections = sections_of(machine, Path(scratch), sanitize=chosen.sanitize)
        if chosen.sanitizers:
            sections = {"sanitizers": run_tools}
        report = run(machine, sections, chosen.out)
    return 1 if write(report, chosen.out) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
