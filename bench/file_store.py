"""Measure the file store against others on the same disk, in the same run.

    python bench/file_store.py --folder /mnt/nvme0/bench --out bench/results/file_store.json --churn

Every side moves the same frames in batches of 16, four batches at a time, from and to the same
slab, past the page cache. The raw sides know no keys, keep no index and sync nothing: one call a
frame in a preallocated file, on Python threads, on C++ threads, through an io_uring, or by fio.
vLLM's own file tier writes a file a block, under names that are new each time, and syncs nothing.
All sides take turns. Figures are medians. A ratio is that of the paired samples of one turn (its
median, and quartiles): to the raw side that has the best median in the cell; to vLLM's tier given
one job a batch, as vLLM itself has it (a job is one thread's); and to the better one of that and of
the same tier given one job a block, as vLLM never does. `--churn` fills a store and writes ten
times its capacity through it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from facts import command, processor
from file_churn import churn
from file_others import FioSide, VllmSide, has_vllm_tier, lmcache_rates
from file_sides import (
    BATCH,
    UNDER_WAY,
    RawEngine,
    RawPython,
    Side,
    StoreSide,
    busy_thread,
    raw_file,
)
from options import scratch
from quiet import Quiet

from kvtiers.data.file_settings import FILE_HEADER_NBYTES
from kvtiers.data.slab import Slab

KIB, MIB = 2**10, 2**20
SIZES = (128 * KIB, 512 * KIB, 2 * MIB)
SAMPLE_NBYTES, SAMPLE_FRAMES = 256 * MIB, 256  # the more of both
BUSY_SHARE = 4  # of a sample beside a busy thread is one part of so many: it takes long
ENGINES = ("native", "uring", "aiofiles")
VLLM_JOBS = (BATCH, 1)
AS_VLLM = "a job a batch"  # its manager makes one job of what a request stores or loads in a step

Samples = dict[tuple[str, str], list[tuple[float, float]]]


@dataclass(frozen=True)
class Row:
    """One side of one cell: medians; ratios are (first quartile, median, third), None for none."""

    nbytes: int
    direction: str
    busy: bool
    side: str
    gigabytes_per_second: float
    cpu_seconds_per_gigabyte: float | None
    over_raw: tuple[float, float, float]
    over_vllm: tuple[float, float, float] | None
    over_vllm_best: tuple[float, float, float] | None


def cells(nbytes: int, options: argparse.Namespace) -> list[Row]:
    """Measure both directions at one frame size, by themselves and beside a busy thread."""
    folder, num_batches = options.folder, num_batches_of(nbytes)
    num_frames = num_batches * BATCH
    slab = Slab(BATCH * UNDER_WAY, nbytes, pin="off")
    for slot in range(slab.num_slots):
        slab.view(slot)[:] = os.urandom(nbytes)
    fd = raw_file(folder, FILE_HEADER_NBYTES + num_frames * nbytes)
    sides: list[Side] = [RawPython(slab, fd), RawEngine("native", slab, fd)]
    sides.append(RawEngine("uring", slab, fd))
    sides += [StoreSide(io, slab, folder, num_frames) for io in ENGINES]
    if has_vllm_tier():
        sides += [VllmSide(job, slab, folder, num_frames) for job in VLLM_JOBS]
    for side in sides:  # so that every block of every file has been written once
        for _ in range(2):
            side.sample(num_batches, writes=True)
            side.sample(num_batches, writes=False)
    rows = []
    for busy in [False] * (not options.busy_only) + [True] * (not options.idle_only):
        here = list(sides)
        if options.fio is not None and not busy:  # a process of its own: nothing is beside it
            here.append(FioSide(options.fio, folder / "raw", nbytes))
        num = num_batches // BUSY_SHARE if busy else num_batches
        samples = measure(here, num, busy, options)
        rows += rows_of(nbytes, busy, samples, num * BATCH * nbytes / 1e9)
    for side in sides:
        side.close()
    os.close(fd)
    slab.close()
    for name in (*ENGINES, *(f"vllm-{job}" for job in VLLM_JOBS)):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "raw").unlink()
    return rows


def num_batches_of(nbytes: int) -> int:
    """Return how many batches a sample of frames of a size has."""
    return max(SAMPLE_FRAMES, SAMPLE_NBYTES // nbytes) // BATCH


def measure(
    sides: Sequence[Side], num_batches: int, busy: bool, options: argparse.Namespace
) -> Samples:
    """Let all sides take turns, three at least."""
    samples: Samples = {}
    quiet = Quiet(options.patience)
    deadline = time.monotonic() + options.seconds
    for turn in range(options.repeats):
        if turn >= 3 and time.monotonic() > deadline:
            break
        order = [*sides[turn % len(sides) :], *sides[: turn % len(sides)]]
        for writes in (True, False):
            quiet.wait()
            for side in order:
                with busy_thread(busy):
                    found = side.sample(num_batches, writes=writes)
                direction = "write" if writes else "read"
                samples.setdefault((direction, side.name), []).append(found)
    return samples


def rows_of(nbytes: int, busy: bool, samples: Samples, gigabytes: float) -> list[Row]:
    """Return a row per side and direction."""
    rows = []
    for direction in ("write", "read"):
        times = {
            name: [seconds for seconds, _ in found]
            for (way, name), found in samples.items()
            if way == direction
        }
        raw = best_of("raw", times)
        vllm, vllm_best = times.get(f"vLLM, {AS_VLLM}"), best_of("vLLM", times)
        assert raw is not None
        for name, seconds in times.items():
            cpu = statistics.median(cpu for _, cpu in samples[direction, name])
            rows.append(
                Row(
                    nbytes,
                    direction,
                    busy,
                    name,
                    gigabytes / statistics.median(seconds),
                    cpu / gigabytes,
                    ratio(raw, seconds),
                    None if vllm is None else ratio(vllm, seconds),
                    None if vllm_best is None else ratio(vllm_best, seconds),
                )
            )
    return rows


def best_of(kind: str, times: dict[str, list[float]]) -> list[float] | None:
    """Return the seconds of the side of a kind that has the best median."""
    found = [seconds for name, seconds in times.items() if name.startswith(kind)]
    return min(found, key=statistics.median, default=None)


def ratio(base: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return how much faster than a base, turn by turn: quartiles."""
    low, middle, high = statistics.quantiles(
        [b / s for b, s in zip(base, seconds, strict=True)], n=4
    )
    return low, middle, high


def against_lmcache(nbytes: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return GB/s of LMCache's file adapter and of the store in turns: medians."""
    num_batches = num_batches_of(nbytes)
    slab = Slab(BATCH * UNDER_WAY, nbytes, pin="off")
    side = StoreSide("native", slab, options.folder, num_batches * BATCH)
    for writes in (True, False, True, False):
        side.sample(num_batches, writes=writes)
    rates: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.lmcache_repeats):
        found = lmcache_rates(options.lmcache, options.folder, nbytes, num_batches)
        ours = {
            way: num_batches
            * BATCH
            * nbytes
            / 1e9
            / side.sample(num_batches, writes=way == "write")[0]
            for way in ("write", "read")
        }
        for name, ways in {**found, side.name: ours}.items():
            for way, rate in ways.items():
                rates.setdefault(name, {}).setdefault(way, []).append(rate)
    side.close()
    slab.close()
    shutil.rmtree(options.folder / "native")
    return {
        name: {way: statistics.median(found) for way, found in ways.items()}
        for name, ways in rates.items()
    }


def device_facts(options: argparse.Namespace) -> dict[str, object]:
    """Return what a reader needs to know of the machine and the session."""
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": command(),
        "CPU": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "a sample": f"{SAMPLE_NBYTES} bytes, {SAMPLE_FRAMES} frames at least",
        "samples a side at most": options.repeats,
        "load average before": os.getloadavg()[0],
    }


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = ["# File store", "", *__doc__.splitlines()[4:], ""]
    lines.extend(
        "- " + "; ".join(f"{name}: {value}" for name, value in device.items())
        for device in results["devices"]
    )
    lines += ["", "| frame | direction | beside | side | GB/s | CPU s/GB | over raw | over vLLM "]
    lines[-1] += "| over vLLM, better side |"
    lines.append("|---|---|---|---|---|---|---|---|---|")
    lines.extend(
        f"| {row['nbytes'] // KIB} KiB | {row['direction']} "
        f"| {'busy thread' if row['busy'] else ''} | {row['side']} "
        f"| {row['gigabytes_per_second']:.2f} | {row['cpu_seconds_per_gigabyte']:.3f} "
        f"| {quartiles(row['over_raw'])} | {quartiles(row['over_vllm'])} "
        f"| {quartiles(row['over_vllm_best'])} |"
        for row in results["results"]
    )
    for size, rates in results["lmcache"].items():
        lines += ["", f"`lmcache bench l2`, {size}, in turns with the store (GB/s):", ""]
        lines += ["| side | write | read |", "|---|---|---|"]
        lines.extend(f"| {k} | {v['write']:.2f} | {v['read']:.2f} |" for k, v in rates.items())
    if results["churn"]:
        lines += [
            "",
            "Full store: GB/s of each tenth of ten times its capacity, and the last tenth",
        ]
        lines += ["over the second (each repeat), beside the raw engine over a file of that size:"]
        lines += [
            "",
            "| frame, share filled | side | tenths | last over second |",
            "|---|---|---|---|",
        ]
    for name, found in results["churn"].items():
        for side in ("store", "raw"):
            tenths = ", ".join(f"{speed:.2f}" for speed in found[side])
            last = ", ".join(f"{value:.2f}" for value in found[f"{side} ratio"])
            middle = statistics.median(found[f"{side} ratio"])
            lines.append(f"| {name} | {side} | {tenths} | {middle:.2f} ({last}) |")
    return "\n".join(lines) + "\n"


def quartiles(found: Sequence[float] | None) -> str:
    """Return a ratio as a cell of the table."""
    return "" if found is None else f"{found[1]:.2f} ({found[0]:.2f} to {found[2]:.2f})"


def merged(path: Path | None, results: dict[str, Any]) -> dict[str, Any]:
    """Return new results among those of a file, in place of its own of the same cells."""
    if path is None or not path.is_file():
        return results
    old = json.loads(path.read_text())
    new = {(row["nbytes"], row["busy"]) for row in results["results"]}
    kept = [row for row in old["results"] if (row["nbytes"], row["busy"]) not in new]
    rows = sorted([*kept, *results["results"]], key=lambda row: (row["nbytes"], row["busy"]))
    return {
        "devices": [*old["devices"], *results["devices"]],
        "results": rows,
        "lmcache": {**old["lmcache"], **results["lmcache"]},
        "churn": {**old["churn"], **results["churn"]},
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=scratch, required=True, help="on the disk to be measured")
    parser.add_argument("--out", type=Path, help="JSON file; the table goes beside it as .md")
    parser.add_argument("--keep", action="store_true", help="what else is in the file")
    parser.add_argument("--repeats", type=int, default=9, help="0: no table of sides")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="bytes")
    parser.add_argument("--idle-only", action="store_true", help="not beside a busy thread")
    parser.add_argument("--busy-only", action="store_true", help="only beside a busy thread")
    parser.add_argument("--seconds", type=float, default=600, help="of a table, about")
    parser.add_argument("--patience", type=float, default=0, help="seconds to wait for quiet")
    parser.add_argument("--fio", default=shutil.which("fio"), help="program")
    parser.add_argument("--lmcache", help="program, in an environment of its own")
    parser.add_argument("--lmcache-repeats", type=int, default=3)
    parser.add_argument("--churn", action="store_true", help="also ten times the capacity")
    parser.add_argument("--churn-repeats", type=int, default=3)
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)  # of a run that was killed
    options.folder.mkdir()
    results: dict[str, Any] = {"devices": [device_facts(options)]}
    wanted = options.sizes if options.repeats else ()
    results["results"] = [asdict(row) for size in wanted for row in cells(size, options)]
    wanted = options.sizes if options.lmcache else ()
    results["lmcache"] = {f"{size // KIB} KiB": against_lmcache(size, options) for size in wanted}
    results["churn"] = {
        f"{size // KIB} KiB, {share:.0%}": churn(options.folder, size, share, options.churn_repeats)
        for size in (options.sizes if options.churn else ())
        for share in (0.8, 1.0)
    }
    results = merged(options.out if options.keep else None, results)
    shutil.rmtree(options.folder)
    text = table(results)
    print(text)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
