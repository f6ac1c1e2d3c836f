"""From a disk into the device's memory, beside each stage alone."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from file_sides import capacity_of
from gpu_layouts import World, flat_layout
from gpu_machine import KIB, Machine, scramble

from kvtiers.data.copier import CopyBatch, Direction
from kvtiers.data.executor import Executor
from kvtiers.data.file_store import FileStore, FileStoreSettings
from kvtiers.data.key_space import KeySpace
from kvtiers.data.store import FrameRef
from kvtiers.data.workshop import Workshop
from kvtiers.model.keys import Rank
from kvtiers.model.messages import DRAM, HBM, Link, Transfer, int64s
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_rank import FINGERPRINT, Orders, keys_of

STORE = "nvme"
FRAMES_TOGETHER = 16
UNDER_WAY = 4  # batches: as many frames as a load has in a store
WINDOW = FRAMES_TOGETHER * UNDER_WAY


@dataclass
class Jobs:
    """What links were measured to do, for the cost model."""

    reload: list[Link] = field(default_factory=list)
    read: list[Link] = field(default_factory=list)


class Line:
    """Blocks of an 8B model, 2 MiB in 64 pieces, on a disk and a device, and a rank between."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        sizes = machine.sizes
        self.num_blocks = num = sizes.pipeline_blocks
        layout = flat_layout(num, min(32 * KIB, sizes.payload_nbytes // 64), 64)
        self.world = world = World(machine, layout, min(num, 2 * WINDOW))
        world.copier.measure()
        self.payload_nbytes = layout.groups[0].payload_nbytes
        nbytes = capacity_of(num + num // 8 + 8, world.slab.slot_nbytes)
        self.store = FileStore(world.slab, FileStoreSettings((folder,), nbytes))
        self.names = KeySpace(FINGERPRINT, Rank())
        stores = {STORE: self.store}
        self.shop = Workshop(world.slab, world.copier, layout, self.names, stores, Rank())
        self.executor = Executor(self.shop)
        self.orders = Orders(itertools.count(1), (STORE,))
        self.keys = keys_of(*range(num))

    def run(self, order: Transfer) -> float:
        """Carry an order out; returns seconds."""
        start = time.perf_counter()
        self.executor.submit(order, self.world.copier.mark())
        while not self.executor.idle:
            if not self.executor.advance():
                time.sleep(0.00002)
        seconds = time.perf_counter() - start
        hops = {c.hop: c.outcomes for c in self.executor.poll() if c.hop in (HBM, DRAM, STORE)}
        wrong = {hop: sum(o != Outcome.OK for o in found.tolist()) for hop, found in hops.items()}
        if any(wrong.values()) or not hops:
            raise RuntimeError(f"blocks that did not arrive: {wrong or 'all'}")
        return seconds

    def offload(self) -> None:
        """Bring all blocks to the disk."""
        num_slots = self.world.num_slots
        for first in range(0, self.num_blocks, num_slots):
            blocks = range(first, min(self.num_blocks, first + num_slots))
            keys = [self.keys[block] for block in blocks]
            self.run(self.orders.offload(keys, list(blocks), list(range(len(keys))), targets=1))

    def reload(self) -> float:
        """Bring all blocks from the disk to the device; returns seconds."""
        window = list(range(min(WINDOW, self.world.num_slots)))
        blocks = list(range(self.num_blocks))
        return self.run(self.orders.reload(self.keys, blocks, sources=1, window=window))

    def read(self, num_blocks: int) -> float:
        """Read blocks to slots as a load does, and nothing else; returns seconds."""
        frame_nbytes = self.shop.formats[0].frame_nbytes
        start = time.perf_counter()
        begun = ended = 0
        while ended < num_blocks:
            while begun < num_blocks and begun - ended < min(WINDOW, self.world.num_slots):
                together = range(begun, min(begun + FRAMES_TOGETHER, num_blocks))
                self.store.get([
                    FrameRef(self.names.name(self.keys[i]), i % self.world.num_slots, frame_nbytes)
                    for i in together
                ])  # fmt: skip
                begun = together.stop
            for answer in self.store.poll():
                ended += len(answer.outcomes)
                if set(answer.outcomes) != {Outcome.OK}:
                    raise RuntimeError(f"frames that did not arrive: {answer.outcomes}")
        return time.perf_counter() - start

    def copy_in(self, num_blocks: int) -> float:
        """Copy blocks from slots to the device, as many together as a load does."""
        copier, num_slots = self.world.copier, self.world.num_slots
        start = time.perf_counter()
        tickets = []
        for first in range(0, num_blocks, WINDOW):
            blocks = int64s(range(first, min(first + WINDOW, num_blocks)))
            batch = CopyBatch(0, blocks, int64s(blocks % num_slots))
            tickets.append(copier.submit(Direction.SCATTER, batch, None))
        for ticket in tickets:
            copier.wait(ticket)
        seconds = time.perf_counter() - start
        assert all(copier.done(ticket) for ticket in tickets)
        return seconds

    def close(self) -> None:
        self.executor.close()
        self.world.memory = []


def measure_pipeline(machine: Machine, folder: Path, jobs: Jobs) -> Iterator[dict[str, Any]]:
    """Reload from disk, checked, against the slower of its stages, all of them in turn."""
    line = Line(machine, folder)
    nbytes = line.num_blocks * line.payload_nbytes
    try:
        line.offload()
        before = [flat.clone() for flat in line.world.memory]
        wrong = 0
        times: dict[str, list[float]] = {"disk": [], "copies": [], "pipeline": []}
        for _ in range(3):
            times["disk"].append(line.read(line.num_blocks))
            times["copies"].append(line.copy_in(line.num_blocks))
            for flat in line.world.memory:
                scramble(flat)
            machine.cuda.synchronize()
            times["pipeline"].append(line.reload())
            wrong += sum(
                int(not torch.equal(a, b)) for a, b in zip(before, line.world.memory, strict=True)
            )
        speeds = {name: nbytes / statistics.median(found) / 1e9 for name, found in times.items()}
        jobs.read += list(_jobs(line, "read", line.read))
        jobs.reload += list(_jobs(line, "reload", line.copy_in))
        yield {
            "path": str(folder),
            "num_blocks": line.num_blocks,
            "payload_nbytes": line.payload_nbytes,
            **{f"{name}_gb_s": speed for name, speed in speeds.items()},
            "of_slower_stage": speeds["pipeline"] / min(speeds["disk"], speeds["copies"]),
            "wrong": [f"{wrong} allocations"] if wrong else [],
        }
    finally:
        line.close()


def _jobs(line: Line, name: str, run: Callable[[int], float]) -> Iterator[Link]:
    """Yield what jobs of several depths took, the middle of three each."""
    for num in (1, 4, 16, 64, 256):
        if num <= line.num_blocks:
            seconds = statistics.median(run(num) for _ in range(3))
            yield Link(name, num, num * line.payload_nbytes, seconds)
