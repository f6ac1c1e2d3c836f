"""A copier on a pretended device, whose streams a test moves item by item."""

from __future__ import annotations

import numpy as np
import pytest
from fake_driver import FakeDriver

from kvtiers.data.copier import CopyBatch, Direction, Marker, Ticket
from kvtiers.data.copier_cuda import CudaTuning
from kvtiers.data.copier_cuda_routes import Route
from kvtiers.data.slab import Slab
from kvtiers.model.frame import FrameFormat, slot_nbytes_for
from kvtiers.model.messages import int64s
from kvtiers.testing.fake_device import make_layout

GATHER, SCATTER = Direction.GATHER, Direction.SCATTER
NUM_BLOCKS = 10
ALL = list(range(NUM_BLOCKS))
LAYOUT = make_layout(NUM_BLOCKS, [[96, 640]])
GROUP = LAYOUT.groups[0]
HEADER = FrameFormat.of(GROUP).header_nbytes
BLOCK_BY_BLOCK = CudaTuning(num_thread_blocks=2, staging_nbytes=0, tile_nbytes=64, num_markers=4)
each_route = pytest.mark.parametrize("route", Route)
each_direction = pytest.mark.parametrize("direction", Direction)


class Bench:
    """A copier on a pretended device; block and slot contents are one number."""

    def __init__(self, route: Route, *, version: int = 13000, manual: bool = True) -> None:
        self.fake = FakeDriver(version, manual=manual)
        self.memory = [np.zeros(n, np.uint8) for n in LAYOUT.allocations]
        self.bases = [array.ctypes.data for array in self.memory]
        self.slab = Slab(NUM_BLOCKS, slot_nbytes_for(LAYOUT.groups), pin="off")
        self.copier = self.fake.copier(LAYOUT, self.bases, self.slab, route, tuning=BLOCK_BY_BLOCK)

    def block(self, block: int) -> set[int]:
        found: set[int] = set()
        for run in GROUP.runs:
            start = run.offset + block * run.block_stride
            found |= set(self.memory[run.allocation][start : start + run.nbytes].tolist())
        return found

    def fill_block(self, block: int, value: int) -> None:
        """Queue the engine's work that fills a block."""
        for run in GROUP.runs:
            address = self.bases[run.allocation] + run.offset + block * run.block_stride
            self.fake.lib.fake_fill(self.fake.engine, address, value, run.nbytes)

    def read_block(self, block: int, into: np.ndarray) -> None:
        """Queue the engine's work that reads a block."""
        to = into.ctypes.data
        for run in GROUP.runs:
            address = self.bases[run.allocation] + run.offset + block * run.block_stride
            self.fake.lib.fake_read(self.fake.engine, to, address, run.nbytes)
            to += run.nbytes

    def slot(self, slot: int) -> set[int]:
        return set(self.slab.view(slot)[HEADER : HEADER + GROUP.payload_nbytes])

    def write_slot(self, slot: int, value: int) -> None:
        nbytes = GROUP.payload_nbytes
        self.slab.view(slot)[HEADER : HEADER + nbytes] = bytes([value]) * nbytes

    def submit(
        self, direction: Direction, ids: list[int], slots: list[int], after: Marker | None = None
    ) -> Ticket:
        return self.copier.submit(direction, CopyBatch(0, int64s(ids), int64s(slots)), after)

    def step(self, stream: int) -> bool:
        """Run one item: stream 0 is the engine's."""
        return bool(self.fake.lib.fake_step(stream))

    def run(self, *streams: int) -> None:
        """Run all that can run, an earlier stream's items before a later one's."""
        while any(self.step(stream) for stream in streams):
            pass

    def run_copies(self) -> None:
        self.run(1, 2, 3, 4)
