"""Measure the compiled host copier against one memcpy a block, over piece and batch sizes.

    python bench/host_copy.py --out bench/results/host_copy.json

Both sides run in turn in one process, on the same memory, with fresh random blocks for every
call; each pair gives one ratio, and the median and the quartiles of the ratios are reported.
The reference is a compiled loop of one memcpy a block on one thread. The ceiling is the fastest
way found to copy the same bytes as one contiguous piece.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from facts import command
from quiet import Quiet

from kvtiers import native
from kvtiers.data.copier import CopyBatch, Direction
from kvtiers.data.copier_host import CopyMethod, HostCopier, default_num_threads
from kvtiers.data.slab import Slab
from kvtiers.model.frame import FrameFormat
from kvtiers.model.layout import GroupLayout, KVLayout, Page, Run
from kvtiers.model.messages import int64s

KIB, MIB = 2**10, 2**20
PIECES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 2 * MIB)
BATCHES = (1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 256 * MIB)
POOL_NBYTES = 512 * MIB  # of each side, so that few sources are in a cache when their turn comes
SAMPLE_NBYTES = 256 * MIB  # small batches repeat until a sample has this many bytes


@dataclass(frozen=True)
class Result:
    """One cell of the table; speeds are medians in GB/s, ratios ours over the reference."""

    direction: str
    piece_nbytes: int
    batch_nbytes: int
    reference: float
    ours: float
    ceiling: float
    ratio: float
    ratio_low: float
    ratio_high: float
    disturbed: int  # pairs during which other processes used the machine


class Arena:
    """An engine's memory and a slab, cut into pieces of one size."""

    def __init__(self, memory: npt.NDArray[np.uint8], piece_nbytes: int) -> None:
        self.piece_nbytes = piece_nbytes
        self.num_blocks = memory.nbytes // piece_nbytes
        pages = (Page("layer", piece_nbytes),)
        runs = (Run(0, 0, piece_nbytes, piece_nbytes),)
        group = GroupLayout(0, self.num_blocks, 16, None, "uint8", pages, runs)
        self._layout = KVLayout((memory.nbytes,), (group,))
        self._bases = [memory.ctypes.data]
        self._slab = Slab(self.num_blocks, FrameFormat.of(group).slot_nbytes, pin="off")
        for slot in range(self.num_blocks):  # so that no page fault falls into a measurement
            view = np.frombuffer(self._slab.view(slot), np.uint8)
            view[:: 4 * KIB] = 1
        self._random = np.random.default_rng(piece_nbytes)

    def copier(self, method: CopyMethod, num_threads: int) -> HostCopier:
        """Return a copier over this memory."""
        return HostCopier(self._layout, self._bases, self._slab, num_threads, method=method)

    def batches(self, batch_nbytes: int) -> Iterator[CopyBatch]:
        """Yield batches of random blocks and slots without end."""
        rows = batch_nbytes // self.piece_nbytes
        while True:
            blocks, slots = (self._random.permutation(self.num_blocks)[:rows] for _ in "bs")
            yield CopyBatch(0, int64s(blocks), int64s(slots))

    def seconds(self, copier: HostCopier, direction: Direction, batch_nbytes: int) -> float:
        """Return the mean time of a batch."""
        calls = max(1, SAMPLE_NBYTES // batch_nbytes)
        batches = list(itertools.islice(self.batches(batch_nbytes), calls))
        start = time.perf_counter()
        for batch in batches:
            copier.done(copier.submit(direction, batch, None))
        return (time.perf_counter() - start) / calls

    def close(self) -> None:
        """Release the slab."""
        self._slab.close()


@dataclass
class Pairs:
    """Seconds per batch of both sides, pair by pair."""

    theirs: list[float]
    ours: list[float]
    disturbed: int


def measure(arena: Arena, direction: Direction, batch_nbytes: int, session: Session) -> Pairs:
    """Time reference and ours in turn; a disturbed pair is repeated while patience lasts."""
    sides = (arena.copier("memcpy", 1), arena.copier("auto", session.num_threads))
    for copier in sides:
        arena.seconds(copier, direction, batch_nbytes)
    pairs = Pairs([], [], 0)
    while len(pairs.ours) < session.pairs:
        session.quiet.wait()
        session.quiet.restart()
        times = [0.0, 0.0]
        for side in (0, 1) if len(pairs.ours) % 2 == 0 else (1, 0):
            times[side] = arena.seconds(sides[side], direction, batch_nbytes)
        held = session.quiet.held()
        if not held and session.quiet.patience_seconds > 0:
            continue
        pairs.disturbed += not held
        pairs.theirs.append(times[0])
        pairs.ours.append(times[1])
    return pairs


def ceiling(memory: npt.NDArray[np.uint8], batch_nbytes: int, session: Session) -> float:
    """Return the GB/s of the fastest contiguous copy of as many bytes, over all methods."""
    arena = Arena(memory, batch_nbytes)
    best = 0.0
    for method in native.load().build_info()["methods"]:
        for threads in sorted({1, session.num_threads}):
            copier = arena.copier(method, threads)
            times = []
            for _ in range(5):
                session.quiet.wait()
                times.append(arena.seconds(copier, Direction.GATHER, batch_nbytes))
            best = max(best, batch_nbytes / statistics.median(times) / 1e9)
    arena.close()
    return best


@dataclass(frozen=True)
class Session:
    """How to measure."""

    pairs: int
    num_threads: int
    quiet: Quiet

    def results(self, pieces: Sequence[int], batches: Sequence[int]) -> list[Result]:
        """Measure all cells and return them."""
        memory = np.ones(POOL_NBYTES, np.uint8)
        ceilings = {nbytes: ceiling(memory, nbytes, self) for nbytes in batches}
        results = []
        for piece in pieces:
            arena = Arena(memory, piece)
            for direction in Direction:
                results += [
                    result_of(
                        direction,
                        piece,
                        batch,
                        ceilings[batch],
                        measure(arena, direction, batch, self),
                    )
                    for batch in batches
                    if batch >= piece
                ]
            arena.close()
        return results

    def improved(self, results: Sequence[Result]) -> list[Result]:
        """Measure disturbed cells again while patience lasts; keep the less disturbed figures."""
        memory = np.ones(POOL_NBYTES, np.uint8)
        improved = []
        for piece, cells in itertools.groupby(results, key=lambda result: result.piece_nbytes):
            arena = Arena(memory, piece)
            for old in cells:
                best = old
                if old.disturbed and self.quiet.patience_seconds > 0:
                    direction, batch = Direction(old.direction), old.batch_nbytes
                    pairs = measure(arena, direction, batch, self)
                    new = result_of(direction, piece, batch, old.ceiling, pairs)
                    best = new if new.disturbed <= old.disturbed else old
                improved.append(best)
            arena.close()
        return improved


def result_of(direction: Direction, piece: int, batch: int, top: float, pairs: Pairs) -> Result:
    """Return the figures of one cell."""
    ratios = [a / b for a, b in zip(pairs.theirs, pairs.ours, strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    reference, ours = (batch / statistics.median(t) / 1e9 for t in (pairs.theirs, pairs.ours))
    return Result(
        direction.value, piece, batch, reference, ours, top, ratio, low, high, pairs.disturbed
    )


def table(results: Sequence[Result], device: dict[str, object]) -> str:
    """Return the results as Markdown."""
    lines = [
        "# Host copies",
        "",
        "Ours over one memcpy a block on one thread, cold random blocks; GB/s of payload "
        "(10^9 bytes, each read once and written once). Ceiling: the fastest contiguous copy "
        "of the same bytes, all methods and threads. Disturbed: pairs during which other "
        "processes used the machine.",
        "",
        *(f"- {name}: {value}" for name, value in device.items()),
        "",
        "| direction | piece | batch | memcpy a block | ours | ceiling | ratio (quartiles) "
        "| disturbed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines.extend(
        f"| {r.direction} | {_size(r.piece_nbytes)} | {_size(r.batch_nbytes)} "
        f"| {r.reference:.1f} | {r.ours:.1f} | {r.ceiling:.1f} "
        f"| {r.ratio:.2f} ({r.ratio_low:.2f} to {r.ratio_high:.2f}) | {r.disturbed} |"
        for r in results
    )
    lines += ["", *reach(results)]
    return "\n".join(lines) + "\n"


def reach(results: Sequence[Result]) -> list[str]:
    """Say how near the ceiling the largest pieces come, and what ratio it allows at most."""
    large = [r for r in results if r.piece_nbytes == 2 * MIB and r.batch_nbytes >= 64 * MIB]
    if not large:
        return []
    near = [r.ours / r.ceiling for r in large]
    most = [r.ceiling / r.reference for r in large]
    return [
        f"At 2 MiB pieces and batches of 64 MiB and more, ours runs at {min(near):.2f} to "
        f"{max(near):.2f} of the ceiling; the ceiling is {min(most):.2f} to {max(most):.2f} times "
        "the reference, and no way to copy was found here that has a higher ratio."
    ]


def device_facts(pairs: int, num_threads: int) -> dict[str, object]:
    """Return what a reader needs to know of the machine and the session."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in info if ":" in line)
    facts = {name.strip(): value.strip() for name, value in fields.items()}
    names = ("model name", "cpu family", "model")
    built = native.load().build_info()
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": command(),
        "CPU": ", ".join(f"{n} {facts[n]}" for n in names if n in facts),
        "cores": len(os.sched_getaffinity(0)),
        "last-level cache": _size(built["last_level_cache_nbytes"]),
        "copy threads": num_threads,
        "compiler": built["compiler"],
        "Python": platform.python_version(),
        "pairs a cell": pairs,
    }


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file; the table goes beside it as .md")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--patience", type=float, default=0, help="seconds to wait for quiet")
    parser.add_argument(
        "--again", action="store_true", help="only cells of --out that others disturbed"
    )
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--pieces", type=int, nargs="*", default=PIECES, help="bytes")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, help="bytes")
    args = parser.parse_args()
    if args.pairs < 7:
        parser.error("fewer than 7 pairs say nothing on a shared machine")
    if args.again and (args.out is None or not args.out.is_file()):
        parser.error("--again: measures cells of an earlier run anew; name its file with --out")
    session = Session(args.pairs, args.threads, Quiet(args.patience))
    if args.again:
        rows = json.loads(args.out.read_text())["results"]
        results = session.improved([Result(**row) for row in rows])
    else:
        results = session.results(args.pieces, args.batches)
    device = device_facts(args.pairs, args.threads)
    text = table(results, device)
    print(text)
    if args.out is not None:
        rows = [asdict(result) for result in results]
        args.out.write_text(json.dumps({"device": device, "results": rows}, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
