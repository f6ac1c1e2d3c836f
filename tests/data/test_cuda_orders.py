"""Every order in which host, engine and copies can take their turns gives the right bytes on CUDA
streams, and no event that `CudaCopier` records or waits for can be left out."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import fake_driver
import numpy as np
import pytest
from fake_driver import FakeDriver
from interleavings import endings

from kvtiers.data.copier import CopyBatch, Direction
from kvtiers.data.copier_cuda import CudaTuning
from kvtiers.data.copier_cuda_routes import Route
from kvtiers.data.slab import Slab
from kvtiers.model.frame import FrameFormat, slot_nbytes_for
from kvtiers.model.layout import GroupLayout, KVLayout, Page, Run
from kvtiers.model.messages import int64s

if fake_driver.missing:
    pytest.skip(fake_driver.missing, allow_module_level=True)

NBYTES = 64
GROUP = GroupLayout(0, 2, 16, None, "x", (Page("l", NBYTES),), (Run(0, 0, NBYTES, NBYTES),))
LAYOUT = KVLayout((2 * NBYTES,), (GROUP,))
HEADER = FrameFormat.of(GROUP).header_nbytes
ONE_BLOCK_A_BUFFER = CudaTuning(
    num_thread_blocks=1, staging_nbytes=0, tile_nbytes=64, num_markers=2
)
NUM_STREAMS = 5  # the engine's, and two for each direction
OLD, A, B = 1, 2, 3
USED, LOADED = 0, 1  # engine blocks: filled, stored and used again; reloaded into
each_route = pytest.mark.parametrize("route", Route)
who_waits = pytest.mark.parametrize("held", [False, True], ids=["host waits", "engine waits"])


class Reuse:
    """The engine fills a block, which is offloaded and filled anew; what it held is reloaded into
    a block that the engine has just read, and is read there.

    The host goes on as its contract says: it reuses a block once the offload is done, and uses a
    reloaded one once the reload is, or lets the engine wait for it.

    Args:
        held: whether the engine's stream waits for the reload, and not the host.
        forget_wait, forget_record: which of the copier's events is left out; -1: none.
    """

    def __init__(
        self, route: Route, *, held: bool = False, forget_wait: int = -1, forget_record: int = -1
    ) -> None:
        self.fake = fake = FakeDriver(manual=True)
        self.memory = np.full(2 * NBYTES, OLD, np.uint8)
        self.slab = Slab(1, slot_nbytes_for(LAYOUT.groups), pin="off")
        bases = [self.memory.ctypes.data]
        self.copier = fake.copier(LAYOUT, bases, self.slab, route, tuning=ONE_BLOCK_A_BUFFER)
        self.reads = [np.zeros(NBYTES, np.uint8) for _ in range(2)]
        self.seconds: list[float | None] = []
        fake.lib.fake_forget_wait(forget_wait)
        fake.lib.fake_forget_record(forget_record)
        self.script: list[Callable[[], object]] = [
            lambda: self._fill(USED, A),
            lambda: self._submit(Direction.GATHER, USED),
            self._done,
            lambda: self._fill(USED, B),
            lambda: self._read(LOADED, 0),
            lambda: self._submit(Direction.SCATTER, LOADED),
            *([self._hold] if held else [self._done]),
            lambda: self._read(LOADED, 1),
            *([self._done] if held else []),
        ]

    @property
    def moves(self) -> tuple[Callable[[], object], ...]:
        return (self._next, *(lambda s=s: self.fake.lib.fake_step(s) for s in range(NUM_STREAMS)))

    @property
    def state(self) -> Hashable:
        """Where everybody is, and all bytes."""
        return (
            len(self.script),
            tuple(self.fake.lib.fake_queued(stream) for stream in range(NUM_STREAMS)),
            self.memory.tobytes(),
            bytes(self.slab.view(0)[HEADER : HEADER + NBYTES]),
            *(read.tobytes() for read in self.reads),
            tuple(self.seconds),
        )

    @property
    def right(self) -> bool:
        """Whether everybody has seen what it should, and copies were timed without the engine.

        Nobody may be stuck.
        """
        return (
            not self.script
            and set(self.slab.view(0)[HEADER : HEADER + NBYTES]) == {A}
            and set(self.memory[:NBYTES].tolist()) == {B}
            and [set(read.tolist()) for read in self.reads] == [{OLD}, {A}]
            and all(seconds is not None and 0 < seconds < 0.5 for seconds in self.seconds)
        )

    def _next(self) -> bool:
        """Take the host's next step; False while it waits for a copy."""
        if not self.script or self.script[0]() is False:
            return False
        del self.script[0]
        return True

    def _address(self, block: int) -> int:
        return int(self.memory.ctypes.data) + block * NBYTES

    def _fill(self, block: int, value: int) -> None:
        self.fake.lib.fake_fill(self.fake.engine, self._address(block), value, NBYTES)

    def _read(self, block: int, into: int) -> None:
        to = self.reads[into].ctypes.data
        self.fake.lib.fake_read(self.fake.engine, to, self._address(block), NBYTES)

    def _submit(self, direction: Direction, block: int) -> None:
        batch = CopyBatch(0, int64s([block]), int64s([0]))
        self.ticket = self.copier.submit(direction, batch, self.copier.mark())

    def _hold(self) -> None:
        assert self.copier.hold_engine(self.ticket)

    def _done(self) -> bool:
        if not self.copier.done(self.ticket):
            return False
        self.seconds.append(self.copier.seconds(self.ticket))
        return True


@each_route
@who_waits
def test_every_order_of_turns_gives_right_bytes(route: Route, held: bool) -> None:
    """R02, R07: fill, store, reuse, load and read."""
    ends = list(endings(lambda: Reuse(route, held=held)))
    assert ends
    assert all(play.right for play in ends)


def events_of(route: Route, held: bool) -> tuple[int, int]:
    """Return how many waits and records the scene has."""
    play = Reuse(route, held=held)
    while any(move() for move in play.moves):
        pass
    return play.fake.lib.fake_num_waits(), play.fake.lib.fake_num_records()


@each_route
@who_waits
def test_without_any_one_event_some_order_is_wrong(route: Route, held: bool) -> None:
    num_waits, num_records = events_of(route, held)
    assert num_waits >= 2 + held
    assert num_records >= 6
    needless = [
        *(("wait", n) for n in range(num_waits) if never_wrong(route, held, forget_wait=n)),
        *(("record", n) for n in range(num_records) if never_wrong(route, held, forget_record=n)),
    ]
    # A buffer's second use needs to know that the first is over, and this scene has none: see
    # test_copier_cuda_order.py for that.
    emptied = [("record", 3), ("record", 8)] if route is Route.STAGED else []
    assert needless == emptied


def never_wrong(route: Route, held: bool, **forget: int) -> bool:
    try:
        return all(play.right for play in endings(lambda: Reuse(route, held=held, **forget)))
    except RuntimeError:  # the driver found out
        return False


def test_without_any_wait_the_engine_reads_what_was_there_before() -> None:
    """The wait that `hold_engine` queues is the last one."""
    num_waits, _ = events_of(Route.DMA, held=True)
    ends = list(endings(lambda: Reuse(Route.DMA, held=True, forget_wait=num_waits - 1)))
    assert any(set(play.reads[1].tolist()) == {OLD} for play in ends)
