"""How fast CUDA devices copy, and what it costs the engine beside it."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu_layouts import World, flat_layout
from gpu_machine import KIB, MIB, Machine, scramble

from kvtiers.data.copier import CopyBatch, Direction
from kvtiers.data.copier_cuda import CudaTuning
from kvtiers.data.copier_cuda_check import check_copies
from kvtiers.data.copier_cuda_routes import Route
from kvtiers.data.copier_torch import TorchCopier
from kvtiers.model.layout import KVLayout

GATHER, SCATTER = Direction.GATHER, Direction.SCATTER


@dataclass(frozen=True)
class Peak:
    """GB/s of one copy of 512 MiB in page-locked memory, each way, and both at once."""

    out: float
    back: float
    both: float

    def of(self, direction: Direction) -> float:
        return self.out if direction is GATHER else self.back


def measured_peak(machine: Machine) -> Peak:
    nbytes = machine.sizes.peak_nbytes
    hosts = [machine.pinned(nbytes) for _ in range(2)]
    devices = [machine.empty(nbytes) for _ in range(2)]
    for tensor in (*hosts, *devices):
        scramble(tensor)
    streams = [machine.cuda.Stream() for _ in range(2)]

    def run(ways: Sequence[int]) -> float:
        machine.cuda.synchronize()
        start = time.perf_counter()
        for way in ways:
            with machine.cuda.stream(streams[way]):
                target, source = (hosts, devices) if way == 0 else (devices, hosts)
                target[way].copy_(source[way], non_blocking=True)
        machine.cuda.synchronize()
        return len(ways) * nbytes / (time.perf_counter() - start) / 1e9

    repeats = range(machine.sizes.repeats)
    best = [max(run(ways) for _ in repeats) for ways in ((0,), (1,), (0, 1))]
    return Peak(*best)


def speed(world: World, route: Route, direction: Direction, num_blocks: int) -> float:
    """Return GB/s from the call to the last byte, the median of batches of other blocks."""
    repeats = world.machine.sizes.repeats
    times = [world.copy(route, direction, world.batch(num_blocks)) for _ in range(repeats + 1)]
    nbytes = num_blocks * world.layout.groups[0].payload_nbytes
    return nbytes / statistics.median(times[1:]) / 1e9


def layout_of_pieces(machine: Machine, piece: int) -> KVLayout:
    sizes = machine.sizes
    num_runs = max(1, min(sizes.num_runs, sizes.payload_nbytes // piece))
    num_blocks = sizes.pool_nbytes // (piece * num_runs)
    return flat_layout(min(num_blocks, 2 * max(sizes.batches)), piece, num_runs)


def world_of_pieces(machine: Machine, piece: int) -> tuple[World, int]:
    """Return a world, and the blocks of a batch of usual size."""
    layout = layout_of_pieces(machine, piece)
    (group,) = layout.groups
    num_blocks = max(1, min(machine.sizes.batch_nbytes // group.payload_nbytes,
                            group.num_blocks // 2))  # fmt: skip
    return World(machine, layout, max(8, 2 * num_blocks)), num_blocks


def measure_pieces(machine: Machine, peak: Peak) -> Iterator[dict[str, Any]]:
    for piece in machine.sizes.pieces:
        layout = layout_of_pieces(machine, piece)
        (group,) = layout.groups
        world = World(machine, layout, min(group.num_blocks, max(machine.sizes.batches)))
        for num_blocks, direction in itertools.product(machine.sizes.batches, Direction):
            if num_blocks > min(world.num_slots, group.num_blocks):
                continue
            row: dict[str, Any] = {
                "direction": direction.value,
                "piece_nbytes": piece,
                "num_pieces": num_blocks * len(group.runs),
                "num_blocks": num_blocks,
            }
            for route in Route:
                row[route.value] = speed(world, route, direction, num_blocks) / peak.of(direction)
            yield row
        world.close()


def measure_thread_blocks(machine: Machine, peak: Peak) -> Iterator[dict[str, Any]]:
    """How many SMs a kernel needs, by tile; 16 KiB pieces, 64 MiB a batch."""
    world, num_blocks = world_of_pieces(machine, 16 * KIB)
    world.copier.close()
    for num, tile in ((2, 4096), (4, 4096), (8, 4096), (12, 2048), (12, 4096), (12, 16384),
                      (16, 4096), (32, 4096)):  # fmt: skip
        world.copier = world.make_copier(CudaTuning(num, tile_nbytes=tile))
        row: dict[str, Any] = {"num_thread_blocks": num, "tile_nbytes": tile}
        for route, direction in itertools.product((Route.DIRECT, Route.STAGED), Direction):
            found = speed(world, route, direction, num_blocks)
            row[f"{route.value} {direction.value}"] = found / peak.of(direction)
        world.copier.close()
        yield row
    world.close()


class Background:
    """Copies without end on a thread of its own, two batches in flight a direction."""

    def __init__(self, world: World, routes: dict[Direction, Route], num_blocks: int) -> None:
        self._world = world
        self._routes = routes
        half = min(world.num_slots, world.layout.groups[0].num_blocks) // 2
        ids = world.batch(2 * half)
        self._batches = {
            d: CopyBatch(
                0, ids.block_ids[i * half :][:num_blocks], ids.slots[i * half :][:num_blocks]
            )
            for i, d in enumerate(routes)
        }
        self._stop = threading.Event()
        self.nbytes = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        copier = self._world.copier
        payload = self._world.layout.groups[0].payload_nbytes
        queue: dict[Direction, list[Any]] = {d: [] for d in self._routes}
        while not self._stop.is_set():
            for direction, tickets in queue.items():
                batch = self._batches[direction]
                while len(tickets) < 2:
                    tickets.append(
                        copier.submit_by(self._routes[direction], direction, batch, None)
                    )
                if copier.done(tickets[0]):
                    tickets.pop(0)
                    self.nbytes += len(batch.slots) * payload
            time.sleep(0.00002)
        for ticket in itertools.chain.from_iterable(queue.values()):
            copier.wait(ticket)

    def __enter__(self) -> Background:
        self._thread.start()
        time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure_both_ways(machine: Machine, peak: Peak) -> Iterator[dict[str, Any]]:
    for piece, route in ((2 * MIB, Route.DMA), (16 * KIB, Route.STAGED), (16 * KIB, Route.DIRECT)):
        world, num_blocks = world_of_pieces(machine, piece)
        speeds = {}
        for ways in ((GATHER,), (SCATTER,), (GATHER, SCATTER)):
            with Background(world, dict.fromkeys(ways, route), num_blocks) as copies:
                before, start = copies.nbytes, time.perf_counter()
                time.sleep(machine.sizes.seconds_each)
                speeds[ways] = (copies.nbytes - before) / (time.perf_counter() - start) / 1e9
        one = max(speeds[(GATHER,)], speeds[(SCATTER,)])
        world.close()
        yield {
            "piece_nbytes": piece,
            "route": route.value,
            "out": speeds[(GATHER,)],
            "back": speeds[(SCATTER,)],
            "both": speeds[(GATHER, SCATTER)],
            "both_of_one": speeds[(GATHER, SCATTER)] / one,
            "peak_both_of_one": peak.both / max(peak.out, peak.back),
        }


def measure_beside_compute(machine: Machine) -> Iterator[dict[str, Any]]:
    """A loop of matrix products, bound by arithmetic, and one bound by memory as decoding is."""
    sizes = machine.sizes
    a = machine.numbers(sizes.square, sizes.square)
    out = torch.empty_like(a)
    thin = machine.numbers(16, sizes.square)
    thin_out = torch.empty_like(thin)
    loops = {
        "square": (lambda: torch.matmul(a, a, out=out), sizes.num_products),
        "thin": (lambda: torch.matmul(thin, a, out=thin_out), sizes.num_thin),
    }

    def seconds(name: str) -> float:
        return machine.seconds(*loops[name])

    for name in loops:
        for _ in range(3):
            seconds(name)  # clocks rise and settle
    for piece, route in ((2 * MIB, Route.DMA), (16 * KIB, Route.STAGED), (16 * KIB, Route.DIRECT)):
        world, num_blocks = world_of_pieces(machine, piece)
        for ways in ((GATHER,), (SCATTER,), (GATHER, SCATTER)):
            row: dict[str, Any] = {
                "piece_nbytes": piece,
                "route": route.value,
                "ways": "+".join(way.value for way in ways),
            }
            for name in loops:
                pairs = []
                for _ in range(sizes.repeats):
                    alone = seconds(name)
                    with Background(world, dict.fromkeys(ways, route), num_blocks) as copies:
                        before = copies.nbytes
                        start = time.perf_counter()
                        beside = seconds(name)
                        row["copied_gb_s"] = (
                            (copies.nbytes - before) / (time.perf_counter() - start) / 1e9
                        )
                    pairs.append(beside / min(alone, seconds(name)) - 1)
                row[name] = statistics.median(pairs)
            yield row
        world.close()


def measure_submit(machine: Machine) -> Iterator[dict[str, Any]]:
    """Microseconds of the calling thread."""
    world, most = world_of_pieces(machine, 64 * KIB)
    copier, num_runs = world.copier, len(world.layout.groups[0].runs)
    start = time.perf_counter()
    for _ in range(1000):
        copier.mark()
    yield {"call": "mark", "us": (time.perf_counter() - start) * 1e3}
    for route, num_blocks in itertools.product(Route, (1, min(16, most), most)):
        times = []
        for _ in range(20):
            batch = world.batch(num_blocks)
            marker = copier.mark()
            start = time.perf_counter()
            ticket = copier.submit_by(route, GATHER, batch, marker)
            times.append(time.perf_counter() - start)
            copier.wait(ticket)
            copier.done(ticket)
        yield {
            "call": f"submit {route.value}, {num_blocks} blocks of {num_runs} pieces",
            "us": statistics.median(times) * 1e6,
        }
    world.close()


def measure_start(machine: Machine) -> Iterator[dict[str, Any]]:
    """What an engine's start waits for, and the table that comes of it."""
    for piece in (16 * KIB, 2 * MIB):
        world, _ = world_of_pieces(machine, piece)
        start = time.perf_counter()
        wrong = check_copies(world.copier, world.layout, world.slab)
        checked = time.perf_counter()
        world.copier.measure()
        seconds = time.perf_counter() - checked
        routes = world.copier.routes.describe()
        world.close()
        yield {
            "piece_nbytes": piece,
            "wrong": [wrong] if wrong else [],
            "check_seconds": checked - start,
            "measure_seconds": seconds,
            "routes": routes,
        }


def measure_torch(machine: Machine, peak: Peak) -> Iterator[dict[str, Any]]:
    """The stand-in, for comparison."""
    for piece in (16 * KIB, 2 * MIB):
        world, num_blocks = world_of_pieces(machine, piece)
        world.copier.close()
        copier = TorchCopier(world.layout, world.memory, world.slab)
        nbytes = num_blocks * world.layout.groups[0].payload_nbytes
        for direction in Direction:
            times = []
            for _ in range(machine.sizes.repeats + 1):
                start = time.perf_counter()
                ticket = copier.submit(direction, world.batch(num_blocks), None)
                copier.wait(ticket)
                times.append(time.perf_counter() - start)
                copier.done(ticket)
            yield {
                "piece_nbytes": piece,
                "direction": direction.value,
                "of_peak": nbytes / statistics.median(times[1:]) / 1e9 / peak.of(direction),
            }
        copier.close()
        world.slab.close()
