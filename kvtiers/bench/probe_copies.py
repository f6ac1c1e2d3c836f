"""Copies between an engine's memory and the slab, timed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import numpy as np

from kvtiers.bench.probe_pace import Pace
from kvtiers.bench.probe_plan import ProbePlan, Shape
from kvtiers.cost.calibration import Cell
from kvtiers.cost.links import offload_link, reload_link
from kvtiers.data.copier import Copier, CopyBatch, Direction
from kvtiers.data.copier_host import make_host_copier
from kvtiers.data.slab import Slab
from kvtiers.model.errors import KVTiersError
from kvtiers.model.messages import DRAM, int64s

HOST: Final = "host"
HBM_LINKS: Final = {Direction.GATHER: offload_link(), Direction.SCATTER: reload_link()}
HOST_LINKS: Final = {Direction.GATHER: f"{HOST}>{DRAM}", Direction.SCATTER: f"{DRAM}>{HOST}"}


class CopySide(Protocol):
    """Engine memory of one kind, for blocks of one size."""

    links: dict[Direction, str]

    def open(self, block_nbytes: int, num_blocks: int) -> tuple[Copier, Slab]:
        """Make memory, slab and copier; whoever asks closes both."""
        ...


class HostSide:
    """Engine memory in DRAM, and the host copier.

    Args:
        links: what its directions are called.
    """

    def __init__(self, plan: ProbePlan, links: dict[Direction, str]) -> None:
        self.links = links
        self._plan = plan
        self._memory: list[Any] = []

    def open(self, block_nbytes: int, num_blocks: int) -> tuple[Copier, Slab]:
        """Make memory, slab and copier."""
        layout = self._plan.layout_of(block_nbytes, num_blocks)
        self._memory = [np.ones(nbytes, np.uint8) for nbytes in layout.allocations]
        slab = Slab(num_blocks, self._plan.format_of(block_nbytes).slot_nbytes, pin="off")
        bases = [memory.ctypes.data for memory in self._memory]
        copying = self._plan.config.copying
        threads = copying.num_threads(len(os.sched_getaffinity(0)))
        return make_host_copier(layout, bases, slab, threads, copying.native), slab


class TorchSide:
    """Engine memory on a torch device, and the copier that engines on it get.

    Args:
        device: as torch names it, such as "cuda".
    """

    def __init__(self, plan: ProbePlan, device: str) -> None:
        self.links = HBM_LINKS
        self._plan = plan
        self._device = device

    def open(self, block_nbytes: int, num_blocks: int) -> tuple[Copier, Slab]:
        """Make memory, slab and copier; the slab is page-locked if the configuration says so."""
        import torch  # noqa: PLC0415 - only where there is a GPU to measure

        from kvtiers.data.copier_device import DeviceMedia  # noqa: PLC0415

        layout = self._plan.layout_of(block_nbytes, num_blocks)
        memory = [
            torch.ones(nbytes, dtype=torch.uint8, device=self._device)
            for nbytes in layout.allocations
        ]
        config = self._plan.config
        media = DeviceMedia(layout, memory, config.copying.native)
        slot_nbytes = self._plan.format_of(block_nbytes).slot_nbytes
        slab = media.make_slab(num_blocks, slot_nbytes, config.dram.pin)
        try:
            return media.make_copier(slab), slab
        except KVTiersError:
            slab.close()
            raise


def measure_copies(
    side: CopySide, plan: ProbePlan, pace: Pace, on_shape: Callable[[str, Shape], None]
) -> Iterator[Cell]:
    """Copy random blocks from and to random slots, both ways in turn; yields a cell a way."""
    random = np.random.default_rng(0)
    for size, shapes in plan.by_size():
        if pace.exhausted:
            return
        num_blocks = plan.num_slots(size)
        copier, slab = side.open(size, num_blocks)
        try:
            for slot in range(num_blocks):  # so that no page fault falls into a measurement
                slab.view(slot)[::4096] = bytes(len(range(0, slab.slot_nbytes, 4096)))
            payload = plan.format_of(size).payload_nbytes
            for shape in shapes:
                times: dict[Direction, list[float]] = {way: [] for way in Direction}
                for _ in pace.repeats():
                    for way in Direction:
                        picked = [random.permutation(num_blocks)[: shape.depth] for _ in "bs"]
                        batch = CopyBatch(0, *map(int64s, picked))
                        times[way].append(_seconds(copier, way, batch))
                on_shape(side.links[Direction.SCATTER], shape)
                for way, seconds in times.items():
                    yield _cell(side.links[way], shape.depth, shape.depth * payload, seconds)
        finally:
            copier.close()
            slab.close()


def _seconds(copier: Copier, way: Direction, batch: CopyBatch) -> float:
    started = time.perf_counter()
    ticket = copier.submit(way, batch, None)
    copier.wait(ticket)
    seconds = time.perf_counter() - started
    copier.done(ticket)
    return seconds


def _cell(link: str, num_blocks: int, nbytes: int, seconds: list[float]) -> Cell:
    """Return a cell without the first job of several, which warms caches up."""
    kept = seconds[1:] or seconds
    return Cell(link=link, num_blocks=num_blocks, nbytes=nbytes, seconds=tuple(kept))
