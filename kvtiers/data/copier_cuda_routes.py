"""Which way a batch crosses between device and host, by its group, direction and size."""

from __future__ import annotations

import bisect
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

import numpy as np

from kvtiers.data.copier import CopyBatch, Direction, Marker, Ticket
from kvtiers.model.layout import GroupLayout, KVLayout
from kvtiers.model.messages import int64s

logger = logging.getLogger(__name__)


class Route(Enum):
    """How a batch crosses."""

    DMA = "dma"  # the copy engines, one copy a piece: leaves all SMs to the engine
    DIRECT = "direct"  # a kernel reads or writes the slots themselves
    STAGED = "staged"  # a kernel to or from a buffer of the device, one DMA copy a payload


# A piece from which one DMA copy is as fast as the link (H100, published: 39.5 of 50 GB/s at
# 512 KiB). Below, copies of whole payloads are better.
_DMA_PIECE_NBYTES: Final = 512 * 2**10
# Below this even a whole payload is a small copy.
_SMALL_PAYLOAD_NBYTES: Final = 32 * 2**10
# A kernel must be this much faster to be worth the SMs that it takes.
_WORTH_IT: Final = 1.1

_MAX_MEASURED_NBYTES: Final = 64 * 2**20
_STEPS: Final = 8  # between the batch sizes that are measured
_REPEATS: Final = 3
MAX_MEASURE_SECONDS: Final = 1.0  # then one more batch at most: the engine waits to start


@dataclass(frozen=True, slots=True)
class RouteTable:
    """The route of every batch.

    Attributes:
        rows: by group and direction: (blocks, route) in ascending order; a batch takes the
            route of the largest entry that does not exceed it, or the first.
    """

    rows: Mapping[tuple[int, Direction], tuple[tuple[int, Route], ...]]

    def route(self, group: int, direction: Direction, num_blocks: int) -> Route:
        """Return how a batch goes; a group that does not exist is for the copier to refuse."""
        row = self.rows.get((group, direction))
        if row is None:
            return Route.DMA
        found = bisect.bisect_right(row, num_blocks, key=lambda entry: entry[0])
        return row[max(0, found - 1)][1]

    def describe(self) -> str:
        """Return the table in one line."""
        return "; ".join(
            f"group {group} {direction.value}: "
            + ", ".join(f"from {num} {route.value}" for num, route in row)
            for (group, direction), row in self.rows.items()
        )


class RoutedCopier(Protocol):
    """What checks and measurements need."""

    def mark(self) -> Marker:
        """Capture the present end of the engine's queue."""
        ...

    def submit_by(
        self, route: Route, direction: Direction, batch: CopyBatch, after: Marker | None
    ) -> Ticket:
        """Queue a batch by this route."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """Block until a batch is over."""
        ...

    def done(self, ticket: Ticket) -> bool:
        """Consume a ticket."""
        ...


def expected_routes(layout: KVLayout) -> RouteTable:
    """Return what sizes alone suggest, where nothing is measured."""
    return RouteTable(
        {
            (group.group, direction): ((1, _expected(group)),)
            for group in layout.groups
            for direction in Direction
        }
    )


def measured_routes(
    copier: RoutedCopier,
    layout: KVLayout,
    num_slots: int,
    clock: Callable[[], float] = time.perf_counter,
) -> RouteTable:
    """Time every route at batch sizes a factor of 8 apart; see `CudaCopier.measure`.

    Groups of one geometry are measured once. What `MAX_MEASURE_SECONDS` do not suffice for takes
    the route of the next smaller size, or what sizes suggest.
    """
    started = clock()
    watch = _Watch(clock, started + MAX_MEASURE_SECONDS)
    rows = dict(expected_routes(layout).rows)
    known: dict[object, int] = {}
    for group in layout.groups:
        twin = known.setdefault(geometry(group), group.group)
        if twin != group.group:
            rows |= {(group.group, d): rows[twin, d] for d in Direction}
            continue
        found: dict[Direction, list[tuple[int, Route]]] = {d: [] for d in Direction}
        for num_blocks in _batch_sizes(group, num_slots):
            # Out first: what comes back in are the blocks' own bytes.
            for direction in (Direction.GATHER, Direction.SCATTER):
                best = _fastest(copier, direction, group, num_blocks, watch)
                if best is not None:
                    found[direction].append((num_blocks, best))
        rows |= {(group.group, d): _merged(found[d]) for d in Direction if found[d]}
    table = RouteTable(rows)
    if watch.over:
        logger.warning(
            "measuring the copies was cut short after %.1f s; routes: %s",
            clock() - started,
            table.describe(),
        )
    return table


@dataclass(frozen=True, slots=True)
class _Watch:
    """How long measuring may go on."""

    clock: Callable[[], float]
    deadline: float

    @property
    def over(self) -> bool:
        return self.clock() >= self.deadline


def _merged(row: Sequence[tuple[int, Route]]) -> tuple[tuple[int, Route], ...]:
    """Leave out entries that change nothing."""
    return tuple(
        entry for idx, entry in enumerate(row) if not idx or row[idx - 1][1] is not entry[1]
    )


def _fastest(
    copier: RoutedCopier,
    direction: Direction,
    group: GroupLayout,
    num_blocks: int,
    watch: _Watch,
) -> Route | None:
    """Return the route to take, a kernel only where it gains enough; None if time is over."""
    ids = int64s(np.arange(num_blocks) * (group.num_blocks // num_blocks))
    batch = CopyBatch(group.group, ids, int64s(np.arange(num_blocks)))
    seconds: dict[Route, float] = {}
    for route in Route:
        times = []
        for _ in range(_REPEATS + 1):
            if watch.over:
                return None
            started = watch.clock()
            ticket = copier.submit_by(route, direction, batch, None)
            copier.wait(ticket)
            times.append(watch.clock() - started)
            copier.done(ticket)
        seconds[route] = statistics.median(times[1:])
    best = min(seconds, key=lambda route: seconds[route])
    return best if seconds[Route.DMA] > _WORTH_IT * seconds[best] else Route.DMA


def _batch_sizes(group: GroupLayout, num_slots: int) -> list[int]:
    """Return the numbers of blocks to measure, ascending; at least one."""
    most = min(group.num_blocks, num_slots, _MAX_MEASURED_NBYTES // group.payload_nbytes)
    sizes = [1]
    while sizes[-1] * _STEPS <= most:
        sizes.append(sizes[-1] * _STEPS)
    return sizes


def _expected(group: GroupLayout) -> Route:
    if group.payload_nbytes // len(group.runs) >= _DMA_PIECE_NBYTES:
        return Route.DMA
    return Route.DIRECT if group.payload_nbytes < _SMALL_PAYLOAD_NBYTES else Route.STAGED


def geometry(group: GroupLayout) -> object:
    """Return what makes two groups alike to a copier."""
    return group.num_blocks, tuple((run.nbytes, run.block_stride) for run in group.runs)
