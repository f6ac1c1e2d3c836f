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

from kvtiers.data.copier import CopyBatch, Direction
from kvtiers.data.copier_cuda import CudaTuning
from kvtiers.data.copier_cuda_routes import Route
from kvtiers.data.copier_torch import TorchCopier
from kvtiers.data.cuda_device import CudaDevice
from kvtiers.model.layout import KVLayout

KIB, MIB, GIB = 2**10, 2**20, 2**30
PIECES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 2 * MIB, 4 * MIB)
BATCHES = (1, 4, 16, 64, 256)  # blocks
POOL_NBYTES = 1 * GIB
PAYLOAD_NBYTES = 4 * MIB  # of a block, at most; and 64 pieces at most: 32 layers, K and V
REPEATS = 5
GATHER, SCATTER = Direction.GATHER, Direction.SCATTER


@dataclass(frozen=True)
class Peak:
    """GB/s of one copy of 512 MiB in page-locked memory, each way, and both at once."""

    out: float
    back: float
    both: float

    def of(self, direction: Direction) -> float:
        return self.out if direction is GATHER else self.back


def measured_peak() -> Peak:
    nbytes = 512 * MIB
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    for tensor in (*hosts, *devices):
        tensor.view(torch.int64).random_()
    streams = [torch.cuda.Stream() for _ in range(2)]

    def run(ways: Sequence[int]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for way in ways:
            with torch.cuda.stream(streams[way]):
                target, source = (hosts, devices) if way == 0 else (devices, hosts)
                target[way].copy_(source[way], non_blocking=True)
        torch.cuda.synchronize()
        return len(ways) * nbytes / (time.perf_counter() - start) / 1e9

    best = [max(run(ways) for _ in range(REPEATS)) for ways in ((0,), (1,), (0, 1))]
    return Peak(*best)


def speed(world: World, route: Route, direction: Direction, num_blocks: int) -> float:
    """Return GB/s from the call to the last byte, the median of batches of other blocks."""
    times = [world.copy(route, direction, world.batch(num_blocks)) for _ in range(REPEATS + 1)]
    nbytes = num_blocks * world.layout.groups[0].payload_nbytes
    return nbytes / statistics.median(times[1:]) / 1e9


def layout_of_pieces(piece: int) -> KVLayout:
    num_runs = max(1, min(64, PAYLOAD_NBYTES // piece))
    return flat_layout(POOL_NBYTES // (piece * num_runs), piece, num_runs)


def measure_pieces(device: CudaDevice, peak: Peak) -> Iterator[dict[str, Any]]:
    for piece in PIECES:
        layout = layout_of_pieces(piece)
        (group,) = layout.groups
        world = World(device, layout, min(group.num_blocks, 512))
        for num_blocks, direction in itertools.product(BATCHES, Direction):
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


def measure_thread_blocks(device: CudaDevice, peak: Peak) -> Iterator[dict[str, Any]]:
    """How many SMs a kernel needs, by tile; 16 KiB pieces, 64 MiB a batch."""
    world = World(device, layout_of_pieces(16 * KIB), 256)
    world.copier.close()
    for num, tile in ((2, 4096), (4, 4096), (8, 4096), (12, 2048), (12, 4096), (12, 16384),
                      (16, 4096), (32, 4096)):  # fmt: skip
        world.copier = world.make_copier(CudaTuning(num, tile_nbytes=tile))
        row: dict[str, Any] = {"num_thread_blocks": num, "tile_nbytes": tile}
        for route, direction in itertools.product((Route.DIRECT, Route.STAGED), Direction):
            row[f"{route.value} {direction.value}"] = speed(world, route, direction, 64) / peak.of(
                direction
            )
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


def measure_both_ways(device: CudaDevice, peak: Peak) -> Iterator[dict[str, Any]]:
    for piece, route in ((2 * MIB, Route.DMA), (16 * KIB, Route.STAGED), (16 * KIB, Route.DIRECT)):
        world = World(device, layout_of_pieces(piece), 256)
        payload = world.layout.groups[0].payload_nbytes
        num_blocks = 64 * MIB // payload
        speeds = {}
        for ways in ((GATHER,), (SCATTER,), (GATHER, SCATTER)):
            with Background(world, dict.fromkeys(ways, route), num_blocks) as copies:
                before, start = copies.nbytes, time.perf_counter()
                time.sleep(0.3)
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


def measure_beside_compute(device: CudaDevice) -> Iterator[dict[str, Any]]:
    """A loop of matrix products, bound by arithmetic, and one bound by memory as decoding is."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    thin = torch.randn(16, 8192, dtype=torch.bfloat16, device="cuda")
    thin_out = torch.empty_like(thin)
    loops = {
        "8192^3": (lambda: torch.matmul(a, a, out=out), 40),
        "16x8192x8192": (lambda: torch.matmul(thin, a, out=thin_out), 2000),
    }

    def seconds(name: str) -> float:
        work, count = loops[name]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    for name in loops:
        for _ in range(3):
            seconds(name)  # clocks rise and settle
    for piece, route in ((2 * MIB, Route.DMA), (16 * KIB, Route.STAGED), (16 * KIB, Route.DIRECT)):
        world = World(device, layout_of_pieces(piece), 256)
        num_blocks = 64 * MIB // world.layout.groups[0].payload_nbytes
        for ways in ((GATHER,), (SCATTER,), (GATHER, SCATTER)):
            row: dict[str, Any] = {
                "piece_nbytes": piece,
                "route": route.value,
                "ways": "+".join(way.value for way in ways),
            }
            for name in loops:
                pairs = []
                for _ in range(REPEATS):
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


def measure_submit(device: CudaDevice) -> Iterator[dict[str, Any]]:
    """Microseconds of the calling thread."""
    world = World(device, layout_of_pieces(64 * KIB), 256)
    copier = world.copier
    start = time.perf_counter()
    for _ in range(1000):
        copier.mark()
    yield {"call": "mark", "us": (time.perf_counter() - start) * 1e3}
    for route, num_blocks in itertools.product(Route, (1, 16, 128)):
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
            "call": f"submit {route.value}, {num_blocks} blocks of 64 pieces",
            "us": statistics.median(times) * 1e6,
        }
    world.close()


def measure_start(device: CudaDevice) -> dict[str, Any]:
    world = World(device, layout_of_pieces(64 * KIB), 256)
    start = time.perf_counter()
    world.copier.measure()
    seconds = time.perf_counter() - start
    routes = world.copier.routes.describe()
    world.close()
    return {"seconds": seconds, "routes": routes}


def measure_torch(device: CudaDevice, peak: Peak) -> Iterator[dict[str, Any]]:
    """The stand-in, for comparison."""
    for piece in (16 * KIB, 2 * MIB):
        world = World(device, layout_of_pieces(piece), 256)
        world.copier.close()
        copier = TorchCopier(world.layout, world.memory, world.slab)
        num_blocks = 64 * MIB // world.layout.groups[0].payload_nbytes
        for direction in Direction:
            times = []
            for _ in range(REPEATS + 1):
                start = time.perf_counter()
                ticket = copier.submit(direction, world.batch(num_blocks), None)
                copier.wait(ticket)
                times.append(time.perf_counter() - start)
                copier.done(ticket)
            yield {
                "piece_nbytes": piece,
                "direction": direction.value,
                "of_peak": 64 * MIB / statistics.median(times[1:]) / 1e9 / peak.of(direction),
            }
        copier.close()
        world.slab.close()
