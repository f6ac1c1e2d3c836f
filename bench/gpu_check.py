"""Check and measure the copies of CUDA devices: run it where there is one, under five minutes.

    python bench/gpu_check.py --out bench/results/gpu.json

Every layout and route is checked byte for byte on random data with poisoned targets; then speeds
are measured against the fastest copy of one large page-locked piece, in this same run. With
`--sanitize` only the checks run, on small layouts, for

    compute-sanitizer --tool memcheck python bench/gpu_check.py --sanitize
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gpu_speed
import torch
from gpu_layouts import World, all_layouts, flat_layout, wrong_copies

from kvtiers import native
from kvtiers.data.copier import Direction
from kvtiers.data.copier_cuda import CudaTuning
from kvtiers.data.copier_cuda_routes import Route
from kvtiers.data.cuda_device import CudaDevice, find_device

MIB, GIB = 2**20, 2**30
GATHER, SCATTER = Direction.GATHER, Direction.SCATTER


# Correctness


def check_layouts(device: CudaDevice, *, small: bool) -> Iterator[dict[str, Any]]:
    """Copy every layout by every route and by every call that a driver may have."""
    version = device.driver.batch_version
    for name, layout in all_layouts().items():
        if small and sum(layout.allocations) > GIB:
            continue
        world = World(device, layout, 40, CudaTuning(staging_nbytes=MIB))
        wrong = []
        for route in Route:
            wrong += [f"{route.value}: {text}" for text in wrong_copies(world, route)]
        world.close()
        yield {"layout": name, "wrong": wrong}
    for older in (12080, 0):
        if older > version:
            continue
        device.driver.limit_batch_version(older)
        world = World(device, all_layouts()["two groups, mixed pages"], 40)
        wrong = [text for route in Route for text in wrong_copies(world, route)]
        world.close()
        yield {"layout": f"copies as of driver {older}", "wrong": wrong}


def check_order(device: CudaDevice) -> dict[str, Any]:
    """Keep the engine's stream busy, then write: a copy must not run ahead."""
    world = World(device, flat_layout(8, MIB), 8)
    wrong = []
    batch = world.batch(8)
    for route, direction in itertools.product(Route, Direction):
        world.copy(route, direction, batch)
        for value in range(1, 4):
            world.memory[0].fill_(0)
            torch.cuda._sleep(50_000_000)
            world.memory[0].fill_(value)
            read = world.memory[0].clone()
            ticket = world.copier.submit_by(route, direction, batch, world.copier.mark())
            if world.copier.done(ticket):
                wrong.append(f"{route.value} {direction.value} did not wait")
                continue
            world.copier.wait(ticket)
            world.copier.done(ticket)
            seen = {world.slab.view(int(slot))[4096 + 77] for slot in batch.slots}
            if direction is GATHER and seen != {value}:
                wrong.append(f"{route.value} gather read {seen}, not {value}")
            if direction is SCATTER and not bool((read == value).all()):
                wrong.append(f"{route.value} scatter overwrote what was still read")
    world.close()
    return {"layout": "order behind a busy stream", "wrong": wrong}


# The report


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return ", ".join(value) or "none" if isinstance(value, list) else str(value)


def table(title: str, rows: Sequence[dict[str, Any]]) -> str:
    columns = list(rows[0])
    lines = [f"\n## {title}\n", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(shown(row.get(c, "")) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write all numbers here, and the table beside it")
    parser.add_argument("--sanitize", action="store_true", help="only check what is small")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to check")
        return 2
    torch.zeros(1, device="cuda")
    found = find_device(0, lambda: int(torch.cuda.current_stream().cuda_stream))
    if isinstance(found, str):
        print(found)
        return 2
    started = time.perf_counter()
    facts = {
        "device": torch.cuda.get_device_name(),
        "driver": found.driver.version,
        "batch_copy": found.driver.batch_version,
        "kernels_nbytes": len(native.kernels()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "when": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    print(facts, flush=True)
    report: dict[str, Any] = {"facts": facts}
    if not arguments.sanitize:
        peak = gpu_speed.measured_peak()
        report["peak_gb_s"] = [vars(peak)]
        sections: dict[str, Callable[[], Any]] = {
            "start-up measurement": lambda: [gpu_speed.measure_start(found)],
            "of the peak, by piece and batch": lambda: gpu_speed.measure_pieces(found, peak),
            "of the peak, by thread blocks": lambda: gpu_speed.measure_thread_blocks(found, peak),
            "both ways at once, GB/s": lambda: gpu_speed.measure_both_ways(found, peak),
            "slowdown of products beside it": lambda: gpu_speed.measure_beside_compute(found),
            "cost of a call": lambda: gpu_speed.measure_submit(found),
            "through torch, of the peak": lambda: gpu_speed.measure_torch(found, peak),
        }
    else:
        sections = {}
    if not arguments.sanitize:
        sections["order"] = lambda: [check_order(found)]
    sections["bytes that differ"] = lambda: check_layouts(found, small=arguments.sanitize)
    text = [f"# CUDA copies on {facts['device']}\n", json.dumps(facts)]
    if "peak_gb_s" in report:
        text.append(table("peak, GB/s", report["peak_gb_s"]))
    for title, run in sections.items():
        begun = time.perf_counter()
        report[title] = list(run())
        text.append(table(title, report[title]))
        print(text[-1], f"\n({time.perf_counter() - begun:.1f} s)", flush=True)
    wrong = [row for row in report["bytes that differ"] if row["wrong"]]
    wrong += [row for row in report.get("order", []) if row["wrong"]]
    report["seconds"] = time.perf_counter() - started
    text.append(f"\n{len(wrong)} checks failed; {report['seconds']:.0f} s in all")
    print(text[-1], flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text("\n".join(text) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
