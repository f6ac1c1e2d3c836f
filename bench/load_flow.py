"""Measure loads from a store to an engine's memory against their stages, by portion.

    python bench/load_flow.py --folder /mnt/nvme0/bench --out bench/results/load_flow.json

A rank reloads 256 blocks of 32 layers through the host copier: from the file store past the page
cache, or from the LMDB store; through a window of staging slots, or into slots of their own (0).
`whole` asks a store for all that it may hold at once, which comes together. The others ask for
portions. All sides take turns in one process. A ratio is that of the samples of one turn:
median, and quartiles. The ceiling of a turn is the slower of reading alone (frames to slots, with
64 under way in the same portions) and copying alone (slots to the engine, in portions); it does
not count verification, which is on the thread that copies, and is given for itself.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from facts import command, processor
from file_sides import capacity_of
from options import at_least
from quiet import Quiet

from kvtiers.data.copier import CopyBatch, Direction
from kvtiers.data.copier_host import HostCopier
from kvtiers.data.executor import Executor
from kvtiers.data.file_store import FileStore, FileStoreSettings
from kvtiers.data.key_space import KeySpace
from kvtiers.data.lmdb_settings import LMDBStoreSettings
from kvtiers.data.lmdb_store import LMDBStore
from kvtiers.data.portions import MAX_FRAMES_IN_STORE, Portions
from kvtiers.data.slab import Slab
from kvtiers.data.store import FrameRef, StoreTicket
from kvtiers.data.workshop import Workshop
from kvtiers.model.frame import slot_nbytes_for
from kvtiers.model.keys import Rank, StoreKey
from kvtiers.model.messages import DRAM, HBM, Transfer, int64s
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_device import make_layout
from kvtiers.testing.fake_rank import FINGERPRINT, Orders, keys_of

KIB, MIB = 2**10, 2**20
SIZES = (128 * KIB, 512 * KIB, 2 * MIB)
NUM_BLOCKS, NUM_LAYERS = 256, 32
WINDOW = 64  # the most that control gives a load
STORE = "s"
PAUSES = (0.0002, 0.002)  # of the executor's thread: the first, and where they stop doubling


class Whole(Portions):
    """No portions: all frames that a store may hold come together."""

    def num_frames(self, frame_nbytes: int, window: int | None = None) -> int:  # noqa: ARG002
        return MAX_FRAMES_IN_STORE


@dataclass
class Cell:
    """Samples of one kind of store, block size and window, in seconds, by side."""

    store: str
    nbytes: int
    window: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    disturbed: int = 0

    def add(self, side: str, seconds: float) -> None:
        self.seconds.setdefault(side, []).append(seconds)


class Line:
    """A rank with blocks in a store, and everything warm."""

    def __init__(self, kind: str, folder: Path, payload_nbytes: int) -> None:
        self.layout = make_layout(NUM_BLOCKS, [[payload_nbytes // NUM_LAYERS] * NUM_LAYERS])
        self.payload_nbytes = payload_nbytes
        self.slab = slab = Slab(NUM_BLOCKS, slot_nbytes_for(self.layout.groups), pin="off")
        self.memory = [np.zeros(nbytes, np.uint8) for nbytes in self.layout.allocations]
        generator = np.random.default_rng(payload_nbytes)
        for array in self.memory:
            array[:] = generator.integers(0, 256, len(array), np.uint8)
        copier = HostCopier(self.layout, [array.ctypes.data for array in self.memory], slab)
        self.store = self._store(kind, folder)
        self.names = KeySpace(FINGERPRINT, Rank())
        self.shop = Workshop(slab, copier, self.layout, self.names, {STORE: self.store}, Rank())
        self.orders = Orders(itertools.count(1), (STORE,))
        self.keys = keys_of(*range(NUM_BLOCKS))
        self.blocks = list(range(NUM_BLOCKS))
        # A slab that has served for a while gives slots in no order.
        self.slots = generator.permutation(NUM_BLOCKS).tolist()
        self.in_slots: dict[int, StoreKey] = {}  # what `read` has brought
        self._executors: dict[Portions, Executor] = {}
        self._run(Portions(), self.orders.offload(self.keys, self.blocks, self.slots, targets=1))

    def _store(self, kind: str, folder: Path) -> FileStore | LMDBStore:
        num = NUM_BLOCKS + NUM_BLOCKS // 8 + 8
        if kind == "file":
            nbytes = capacity_of(num, self.slab.slot_nbytes)
            return FileStore(self.slab, FileStoreSettings((folder,), nbytes, direct="on"))
        nbytes = num * (self.slab.slot_nbytes + 2 * 4096)
        return LMDBStore(self.slab, LMDBStoreSettings(folder, nbytes))

    def _run(self, portions: Portions, order: Transfer) -> float:
        executor = self._executors.setdefault(portions, Executor(self.shop, portions=portions))
        pause, start = PAUSES[0], time.perf_counter()
        executor.submit(order, self.shop.copier.mark())
        while not executor.idle:
            if executor.advance():
                pause = PAUSES[0]
            else:
                time.sleep(pause)
                pause = min(2 * pause, PAUSES[1])
        seconds = time.perf_counter() - start
        for answer in executor.poll():
            if answer.hop in (HBM, DRAM, STORE) and (answer.outcomes != Outcome.OK).any():
                raise RuntimeError(f"blocks that did not arrive: {answer}")
        return seconds

    def reload(self, window: int, portions: Portions) -> float:
        """Bring all blocks from the store to the engine; returns seconds."""
        if window:
            slots = self.slots[:window]
            order = self.orders.reload(self.keys, self.blocks, sources=1, window=slots)
        else:
            order = self.orders.reload(self.keys, self.blocks, self.slots, sources=1)
        return self._run(portions, order)

    def read(self, portions: Portions) -> float:
        """Bring all frames to slots, and nothing else; returns seconds."""
        nbytes = self.shop.formats[0].frame_nbytes
        num = portions.num_frames(nbytes, None)
        names = [self.names.name(key) for key in self.keys]
        free = self.slots[: max(num, WINDOW)]
        running: dict[StoreTicket, list[FrameRef]] = {}
        start = time.perf_counter()
        begun = 0
        while begun < NUM_BLOCKS or running:
            while begun < NUM_BLOCKS and len(free) >= num:
                rows = range(begun, min(begun + num, NUM_BLOCKS))
                frames = [FrameRef(names[row], free.pop(), nbytes) for row in rows]
                self.in_slots.update((frame.slot, frame.key) for frame in frames)
                running[self.store.get(frames)] = frames
                begun = rows.stop
            answers = self.store.poll()
            for answer in answers:
                free += [frame.slot for frame in running.pop(answer.ticket)]
                if set(answer.outcomes) != {Outcome.OK}:
                    raise RuntimeError(f"frames that did not arrive: {answer.outcomes}")
            if not answers:
                time.sleep(PAUSES[0])
        return time.perf_counter() - start

    def copy(self, portions: Portions) -> float:
        """Copy all blocks from slots to the engine; returns seconds."""
        num = portions.num_frames(self.shop.formats[0].frame_nbytes, None)
        start = time.perf_counter()
        for first in range(0, NUM_BLOCKS, num):
            blocks = int64s(self.blocks[first : first + num])
            slots = int64s([self.slots[b % WINDOW] for b in blocks.tolist()])
            copier = self.shop.copier
            ticket = copier.submit(Direction.SCATTER, CopyBatch(0, blocks, slots), None)
            copier.wait(ticket)
            copier.done(ticket)
        return time.perf_counter() - start

    def verify(self) -> float:
        """Check as many frames as there are blocks; returns seconds."""
        frames = self.shop.formats[0]
        start = time.perf_counter()
        for slot, name in itertools.islice(itertools.cycle(self.in_slots.items()), NUM_BLOCKS):
            if fault := frames.fault(self.slab.view(slot), name):
                raise RuntimeError(fault)
        return time.perf_counter() - start

    def checked(self, window: int, portions: Portions) -> None:
        """Reload once, and compare all bytes."""
        before = [array.copy() for array in self.memory]
        for array in self.memory:
            array[:] = 0
        self.reload(window, portions)
        for found, expected in zip(self.memory, before, strict=True):
            if not np.array_equal(found, expected):
                raise RuntimeError(f"wrong bytes after a reload, {window}, {portions}")

    def close(self) -> None:
        self.shop.close()


def measure(kind: str, nbytes: int, options: argparse.Namespace) -> Iterator[Cell]:
    """Take turns at one kind of store and frame size."""
    folder = options.folder / f"{kind}-{nbytes}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    quiet = Quiet(options.patience)
    line = Line(kind, folder, nbytes)
    sides = {"whole": Whole(), **{name_of(p): p for p in portions_of(options)}}
    reference = next(reversed(sides.values()))
    cells = [Cell(kind, nbytes, window) for window in options.windows]
    try:
        for window, portions in itertools.product(options.windows, sides.values()):
            line.checked(window, portions)
        deadline = time.monotonic() + options.seconds
        for turn in range(options.repeats):
            if turn >= 3 and time.monotonic() > deadline:
                break
            for cell in cells:
                quiet.wait()
                quiet.restart()
                order = list(sides.items())
                for name, portions in order if turn % 2 else reversed(order):
                    cell.add(name, line.reload(cell.window, portions))
                line.in_slots.clear()
                for name, portions in order:
                    cell.add(f"read, {name}", line.read(portions))
                cell.add("copy", line.copy(reference))
                cell.add("verify", line.verify())
                cell.disturbed += not quiet.held()
    finally:
        line.close()
        with suppress(OSError):
            shutil.rmtree(folder)
    yield from cells


def portions_of(options: argparse.Namespace) -> list[Portions]:
    return [Portions(num, int(mib * MIB)) for num, mib in options.portions] or [Portions()]


def name_of(portions: Portions) -> str:
    return f"{portions.max_frames} frames or {portions.max_nbytes / MIB:g} MiB"


def spread(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def rows_of(cell: Cell) -> Iterator[str]:
    """Yield lines of the table."""
    found, total = cell.seconds, cell.nbytes * NUM_BLOCKS
    for name in found:
        if name.startswith("read, ") or name in ("copy", "verify"):
            continue
        reads = found[f"read, {name}"]
        ceiling = [max(pair) for pair in zip(reads, found["copy"], strict=True)]
        gain = [b / a for a, b in zip(found[name], found["whole"], strict=True)]
        share = [c / a for a, c in zip(found[name], ceiling, strict=True)]
        speeds = [total / statistics.median(s) / 1e9 for s in
                  (found[name], reads, found["copy"], found["verify"])]  # fmt: skip
        yield (
            f"| {cell.store} | {cell.nbytes // KIB} KiB | {cell.window} | {name} | "
            f"{statistics.median(found[name]) * 1e3:.1f} | "
            + " | ".join(f"{speed:.2f}" for speed in speeds)
            + f" | {spread(gain)} | {spread(share)} | {cell.disturbed} of {len(reads)} |"
        )


def write(cells: Sequence[Cell], out: Path) -> None:
    """Keep what was measured so far, as JSON and as a table."""
    facts = {
        "date": datetime.date.today().isoformat(),
        "CPU": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "command": command(),
    }
    data = {"machine": facts, "cells": [asdict(cell) for cell in cells]}
    out.write_text(json.dumps(data, indent=1) + "\n")
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    table = [HEAD, *(row for cell in cells for row in rows_of(cell))]
    text = "\n".join(["# Loads from a store", "", *__doc__.split("\n\n")[2:], *lines, "", *table])
    out.with_suffix(".md").write_text(text + "\n")


HEAD = (
    "| store | block | window | asked for | ms | GB/s | read alone | copy alone | verify alone | "
    "over whole | of the slower stage | disturbed turns |\n" + "|---" * 12 + "|"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--stores", nargs="+", default=["file", "lmdb"], choices=["file", "lmdb"])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--windows", type=int, nargs="+", default=[WINDOW, 16, 0])
    parser.add_argument("--portions", nargs="*", default=[], type=_portion, metavar="FRAMES,MIB")
    parser.add_argument("--repeats", type=at_least(2), default=9)
    parser.add_argument("--seconds", type=float, default=60.0, help="of a store and size")
    parser.add_argument("--patience", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cells: list[Cell] = []
    print(HEAD)
    for kind, nbytes in itertools.product(options.stores, options.sizes):
        for cell in measure(kind, nbytes, options):
            cells.append(cell)
            print("\n".join(rows_of(cell)), flush=True)
        if options.out:
            write(cells, options.out)


def _portion(text: str) -> tuple[int, float]:
    try:
        frames, mib = text.split(",")
        return int(frames), float(mib)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not FRAMES,MIB; write 16,16") from None


if __name__ == "__main__":
    main()
