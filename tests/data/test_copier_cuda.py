"""What `CudaCopier` asks of the driver, and in what order it copies, on a pretended device.

What it copies is tested with the other copiers, in test_copier.py.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from concurrent import futures

import fake_driver
import numpy as np
import pytest
from fake_driver import FakeDriver
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers import native
from kvtiers.data.copier import CopyBatch, Direction, Marker, Ticket
from kvtiers.data.copier_cuda import CudaCopier, CudaTuning
from kvtiers.data.copier_cuda_check import check_copies
from kvtiers.data.copier_cuda_make import make_cuda_copier
from kvtiers.data.copier_cuda_routes import (
    MAX_MEASURE_SECONDS,
    Route,
    expected_routes,
    measured_routes,
)
from kvtiers.data.copier_portable import PortableCopier
from kvtiers.data.cuda_device import CudaDevice, find_device
from kvtiers.data.slab import Slab
from kvtiers.model.errors import ProtocolError
from kvtiers.model.frame import FrameFormat, slot_nbytes_for
from kvtiers.model.messages import int64s
from kvtiers.testing.fake_device import make_layout

if fake_driver.missing:
    pytest.skip(fake_driver.missing, allow_module_level=True)

GATHER, SCATTER = Direction.GATHER, Direction.SCATTER
NUM_BLOCKS = 10
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


# What the driver is asked

DRIVERS = [(12040, 0, "cuMemcpyAsync"), (12080, 12080, "cuMemcpyBatchAsync 12.8"),
           (13000, 13000, "cuMemcpyBatchAsync 13.0")]  # fmt: skip


@pytest.mark.parametrize(("version", "batch_version", "call"), DRIVERS)
@pytest.mark.parametrize("route", [Route.DMA, Route.STAGED])
def test_batches_go_by_the_call_that_the_driver_has(
    version: int, batch_version: int, call: str, route: Route
) -> None:
    bench = Bench(route, version=version, manual=False)
    assert bench.fake.driver.batch_version == batch_version
    bench.fill_block(3, 7)
    bench.submit(GATHER, [3, 4], [0, 1], bench.copier.mark())
    assert bench.slot(0) == {7}
    copies = 2 * (len(GROUP.runs) if route is Route.DMA else 1)
    batches = 1 if route is Route.DMA else 2  # the buffers hold one block
    assert bench.fake.calls(call) == (batches if batch_version else copies)


def test_a_newer_driver_can_be_used_as_an_older_one() -> None:
    bench = Bench(Route.DMA, manual=False)
    for version in (12080, 0):
        bench.fake.driver.limit_batch_version(version)
        assert bench.fake.driver.batch_version == version
        bench.submit(GATHER, [3], [0])
    assert bench.fake.calls("cuMemcpyBatchAsync 12.8") == 1
    assert bench.fake.calls("cuMemcpyAsync") == len(GROUP.runs)


def test_what_is_no_driver_says_so(tmp_path: object) -> None:
    with pytest.raises(RuntimeError, match=r"no CUDA driver: .*nowhere\.so"):
        native.load().CudaDriver(f"{tmp_path}/nowhere.so")
    assert "no CUDA driver" in str(find_device(0, int, f"{tmp_path}/nowhere.so"))
    with pytest.raises(RuntimeError, match=r"version 11\.8, needed is 12\.0"):
        FakeDriver(11080)


def test_a_device_that_is_not_there_is_named() -> None:
    FakeDriver()
    found = find_device(3, int, str(fake_driver.library()))
    assert found == "there is no CUDA device 3, only 1"


@each_route
def test_closing_waits_and_leaves_nothing_behind(route: Route) -> None:
    bench = Bench(route)
    bench.fill_block(0, 9)
    ticket = bench.submit(GATHER, [0], [0], bench.copier.mark())
    bench.copier.close()
    assert bench.slot(0) == {9}
    assert bench.copier.done(ticket)
    assert bench.fake.lib.fake_live() == 0
    assert bench.fake.lib.fake_depth() == 0
    assert bench.fake.calls("cuModuleUnload") == 1
    waits = bench.fake.calls("cuStreamSynchronize")
    bench.copier.close()
    assert bench.fake.calls("cuStreamSynchronize") == waits
    with pytest.raises(RuntimeError, match="closed"):
        bench.copier.mark()
    column, route_of = int64s([0]), bench.copier._native_routes
    with pytest.raises(RuntimeError, match="closed"):
        bench.copier._native.submit(True, 0, column, column, 0, route_of[route])


def test_what_fails_while_closing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(Route.DMA, manual=False)
    bench.fake.fail("cuStreamSynchronize")
    with caplog.at_level(logging.ERROR, "kvtiers"):
        bench.copier.close()
    assert "the last copies failed: cuStreamSynchronize" in caplog.text
    assert bench.fake.lib.fake_live() == 0


def test_a_closed_copier_holds_and_delays_nobody() -> None:
    bench = Bench(Route.DMA)
    ticket = bench.submit(SCATTER, [0], [0])
    bench.copier.close()
    waits = bench.fake.calls("cuStreamWaitEvent")
    assert bench.copier.hold_engine(ticket)
    bench.copier.wait(ticket)
    assert bench.fake.calls("cuStreamWaitEvent") == waits
    assert not bench.fake.calls("cuEventSynchronize")
    assert bench.copier.done(ticket)


def test_without_kernels_every_route_is_dma() -> None:
    bench = Bench(Route.STAGED, manual=False)
    copier = bench.fake.copier(LAYOUT, bench.bases, bench.slab, Route.STAGED, kernels=b"")
    assert not copier.has_kernels
    copier.measure()
    bench.fill_block(1, 5)
    copier.submit(GATHER, CopyBatch(0, int64s([1]), int64s([2])), copier.mark())
    assert bench.slot(2) == {5}
    assert not bench.fake.calls("cuLaunchKernel")


def test_a_stream_under_capture_gives_no_marker() -> None:
    bench = Bench(Route.DMA)
    bench.fake.lib.fake_capturing(1)
    with pytest.raises(RuntimeError, match="captured"):
        bench.copier.mark()
    bench.fake.lib.fake_capturing(0)
    assert bench.copier.mark() == 1


def test_a_stream_under_capture_cannot_be_held() -> None:
    bench = Bench(Route.DMA)
    ticket = bench.submit(SCATTER, [0], [0])
    bench.fake.lib.fake_capturing(1)
    assert bench.copier.hold_engine(ticket) is False
    bench.fake.lib.fake_capturing(0)
    assert not bench.fake.calls("cuStreamWaitEvent")
    assert bench.copier.hold_engine(ticket) is True
    assert bench.fake.calls("cuStreamWaitEvent") == 1


def test_what_is_over_holds_nobody() -> None:
    bench = Bench(Route.DMA)
    ticket = bench.submit(SCATTER, [0], [0])
    bench.run_copies()
    assert bench.copier.done(ticket)
    assert bench.copier.hold_engine(ticket) is True
    assert not bench.fake.calls("cuStreamWaitEvent")


@pytest.mark.parametrize("ticket", [-1, 0, 2])
def test_a_ticket_that_was_never_issued_holds_nobody(ticket: int) -> None:
    bench = Bench(Route.DMA)
    bench.submit(SCATTER, [0], [0])
    with pytest.raises(ProtocolError, match=f"ticket {ticket} was never issued"):
        bench.copier.hold_engine(Ticket(ticket))


def test_an_event_serves_no_other_batch_while_the_engine_is_about_to_wait_for_it() -> None:
    bench = Bench(Route.DMA)
    ticket = bench.submit(SCATTER, [0], [0])
    bench.run_copies()
    with futures.ThreadPoolExecutor(2) as pool:
        bench.fake.lib.fake_hold_up(1)
        hold = pool.submit(bench.copier.hold_engine, ticket)
        while not bench.fake.lib.fake_num_held_up():
            pass
        done = pool.submit(bench.copier.done, ticket)
        early = futures.wait([done], 0.05).done
        bench.fake.lib.fake_hold_up(0)
        assert hold.result()
        assert done.result()
    assert not early
    assert bench.fake.calls("cuStreamWaitEvent") == 1


@each_route
def test_the_event_of_a_batch_may_serve_another_while_the_engine_still_waits(route: Route) -> None:
    bench = Bench(route)
    bench.write_slot(0, 7)
    first = bench.submit(SCATTER, [0], [0])
    assert bench.copier.hold_engine(first)
    read = np.zeros(GROUP.payload_nbytes, np.uint8)
    bench.read_block(0, read)
    bench.run_copies()
    assert bench.copier.done(first)
    later = bench.submit(SCATTER, [1], [1])  # takes the event over; its copies do not run
    bench.run(0)
    assert set(read.tolist()) == {7}
    assert not bench.copier.done(later)


# What the driver refuses

REFUSALS = [
    (Route.DMA, "cuMemcpyBatchAsync 13.0", 0),
    (Route.DIRECT, "cuLaunchKernel", 0),
    *((Route.STAGED, "cuMemcpyBatchAsync 13.0", after) for after in range(3)),
    *((Route.STAGED, "cuLaunchKernel", after) for after in range(3)),
    *((Route.STAGED, "cuEventRecord", after) for after in range(6)),
    *((Route.STAGED, "cuStreamWaitEvent", after) for after in range(6)),
]


@each_direction
@pytest.mark.parametrize(("route", "call", "after"), REFUSALS)
def test_when_the_driver_refuses_nothing_of_the_batch_runs_on(
    route: Route, call: str, after: int, direction: Direction
) -> None:
    bench = Bench(route)
    earlier = bench.submit(direction, [5], [5])
    marker = bench.copier.mark()
    bench.fake.fail(call, after=after)
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_PRETENDED \(719\)"):
        bench.submit(direction, [0, 1, 2, 3], [0, 1, 2, 3], marker)
    assert not any(bench.step(stream) for stream in range(1, 5))
    assert bench.copier.done(earlier)
    bench.fill_block(0, 3)
    bench.write_slot(0, 4)
    later = bench.submit(direction, [0], [0], bench.copier.mark())
    bench.copier.wait(later)
    assert bench.copier.done(later)
    assert bench.block(0) == bench.slot(0) == ({3} if direction is GATHER else {4})


def test_a_wait_of_the_engine_that_the_driver_refuses_is_an_error() -> None:
    bench = Bench(Route.DMA)
    ticket = bench.submit(SCATTER, [0], [0])
    bench.fake.fail("cuStreamWaitEvent")
    with pytest.raises(RuntimeError, match="cuStreamWaitEvent"):
        bench.copier.hold_engine(ticket)
    bench.run_copies()
    assert bench.copier.done(ticket)


def test_an_error_of_the_device_ends_a_batch_once() -> None:
    bench = Bench(Route.DMA)
    ticket = bench.submit(GATHER, [0], [0])
    bench.fake.fail("cuEventQuery", code=700)
    with pytest.raises(RuntimeError, match=r"cuEventQuery: CUDA_ERROR_PRETENDED \(700\)"):
        bench.copier.done(ticket)
    with pytest.raises(ProtocolError, match="not pending"):
        bench.copier.done(ticket)


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuMemAlloc", "cuMemcpyHtoD", "cuEventCreate",
                                  "cuStreamCreate"])  # fmt: skip
def test_a_copier_that_cannot_be_made_leaves_nothing(call: str) -> None:
    fake = FakeDriver()
    fake.fail(call)
    slab = Slab(4, slot_nbytes_for(LAYOUT.groups), pin="off")
    memory = [np.zeros(n, np.uint8) for n in LAYOUT.allocations]
    with pytest.raises(RuntimeError, match=call):
        fake.copier(LAYOUT, [array.ctypes.data for array in memory], slab)
    assert fake.lib.fake_live() == 0
    assert fake.lib.fake_depth() == 0


def test_a_copier_that_gets_only_some_of_its_events_leaves_none() -> None:
    bench = Bench(Route.DMA)
    num_events = bench.fake.calls("cuEventCreate")
    assert num_events > 100
    for after in range(num_events):
        bench.fake.fail("cuEventCreate", after=after)
        live = bench.fake.lib.fake_live()
        with pytest.raises(RuntimeError, match="cuEventCreate"):
            bench.fake.copier(LAYOUT, bench.bases, bench.slab, tuning=BLOCK_BY_BLOCK)
        assert bench.fake.lib.fake_live() == live


def test_a_slab_is_page_locked_in_chunks_through_the_driver() -> None:
    fake = FakeDriver()
    slab = Slab(4, 4096, pin="on", registrar=fake.registrar(), pin_chunk_nbytes=4096)
    assert slab.pinned
    assert fake.lib.fake_num_registered() == 4
    with pytest.raises(OSError, match=r"cuMemHostRegister: .*ALREADY_REGISTERED"):
        fake.registrar().register(slab.address, 4096)
    slab.close()
    assert fake.lib.fake_num_registered() == 0
    with pytest.raises(OSError, match=r"cuMemHostUnregister: .*\(713\)"):
        fake.registrar().unregister(slab.address)


def test_a_chunk_that_is_refused_undoes_the_others() -> None:
    fake = FakeDriver()
    fake.fail("cuMemHostRegister", after=2, code=2)
    slab = Slab(4, 4096, pin="auto", registrar=fake.registrar(), pin_chunk_nbytes=4096)
    assert not slab.pinned
    assert fake.lib.fake_num_registered() == 0
    slab.close()


# The stand-in


@pytest.fixture
def pinned() -> Iterator[tuple[FakeDriver, Slab, list[np.ndarray]]]:
    fake = FakeDriver()
    slab = Slab(NUM_BLOCKS, slot_nbytes_for(LAYOUT.groups), pin="on", registrar=fake.registrar())
    yield fake, slab, [np.arange(n, dtype=np.uint64).astype(np.uint8) for n in LAYOUT.allocations]
    slab.close()


Pinned = tuple[FakeDriver, Slab, list[np.ndarray]]


def make(pinned: Pinned, device: CudaDevice | str | None = None, kernels: bytes = b"x") -> object:
    fake, slab, memory = pinned
    bases = [array.ctypes.data for array in memory]
    return make_cuda_copier(
        LAYOUT,
        bases,
        slab,
        fake.device if device is None else device,
        lambda: PortableCopier(LAYOUT, bases, slab),
        kernels={"of this build": lambda: kernels, "of another": bytes},
    )


def test_measuring_gives_a_table_and_keeps_the_blocks(pinned: Pinned) -> None:
    before = [array.copy() for array in pinned[2]]
    copier = make(pinned)
    assert isinstance(copier, CudaCopier)
    for direction in Direction:
        row = copier.routes.rows[0, direction]
        assert row[0][0] == 1
        assert row == tuple(sorted(row, key=lambda entry: entry[0]))
    for array, old in zip(pinned[2], before, strict=True):
        np.testing.assert_array_equal(array, old)
    copier.close()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("", "of this build: none in this build of kvtiers; of another: none"),
        ("cuModuleLoadData", "cuModuleLoadData: "),
        ("cuLaunchKernel", "checking and measuring the copies failed: cuLaunchKernel"),
        ("none", "there is no device"),
    ],
)
def test_what_does_not_fit_falls_back_with_one_warning(
    pinned: Pinned, call: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    if call.startswith("cu"):
        pinned[0].fail(call)
    with caplog.at_level(logging.WARNING):
        device = "there is no device" if call == "none" else None
        copier = make(pinned, device, b"x" if call else b"")
    assert isinstance(copier, PortableCopier)
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert pinned[0].lib.fake_live() == 0


def test_kernels_that_do_not_fit_give_way_to_the_next(pinned: Pinned) -> None:
    fake, slab, memory = pinned
    fake.fail("cuModuleLoadData", code=209)
    bases = [array.ctypes.data for array in memory]
    makers = {"a fatbin": lambda: b"x", "a compiler": lambda: b"y"}
    copier = make_cuda_copier(
        LAYOUT, bases, slab, fake.device, lambda: PortableCopier(LAYOUT, bases, slab),
        kernels=makers,
    )  # fmt: skip
    assert isinstance(copier, CudaCopier)
    assert fake.calls("cuModuleLoadData") == 2
    copier.close()


@pytest.mark.parametrize("what", [1, 2, 3, 4], ids=["gather", "scatter", "copies", "stray"])
def test_a_device_that_copies_wrongly_is_found_out_before_it_is_used(
    pinned: Pinned, what: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A byte flipped by a kernel or by a copy, or one written behind a payload."""
    pinned[0].lib.fake_spoil(what)
    copier = make(pinned)
    assert isinstance(copier, PortableCopier)
    assert "its copies failed their check: KV group 0: what" in caplog.text
    assert pinned[0].lib.fake_live() == 0


def test_the_check_keeps_the_blocks(pinned: Pinned) -> None:
    fake, slab, memory = pinned
    before = [array.copy() for array in memory]
    copier = fake.copier(LAYOUT, [array.ctypes.data for array in memory], slab)
    assert check_copies(copier, LAYOUT, slab) is None
    for array, old in zip(memory, before, strict=True):
        np.testing.assert_array_equal(array, old)


def test_the_check_waits_for_the_engine_to_have_made_its_blocks() -> None:
    """An engine's zeroing of new memory is work in its queue like any other."""
    bench = Bench(Route.DMA)
    for block in ALL:
        bench.fill_block(block, block + 1)
    assert check_copies(bench.copier, LAYOUT, bench.slab) is None
    assert [bench.block(block) for block in ALL] == [{block + 1} for block in ALL]


def test_without_room_to_check_there_is_no_trust() -> None:
    fake = FakeDriver()
    slab = Slab(2, slot_nbytes_for(LAYOUT.groups), pin="on", registrar=fake.registrar())
    memory = [np.zeros(n, np.uint8) for n in LAYOUT.allocations]
    assert isinstance(make((fake, slab, memory)), PortableCopier)
    slab.close()


def test_on_insists_and_off_does_without(pinned: Pinned) -> None:
    fake, slab, memory = pinned
    bases = [array.ctypes.data for array in memory]

    def chosen(mode: str, device: CudaDevice | str = fake.device) -> object:
        return make_cuda_copier(
            LAYOUT, bases, slab, device, lambda: PortableCopier(LAYOUT, bases, slab), mode,
            {"of this build": lambda: b"x"},
        )  # fmt: skip

    before = fake.calls("cuModuleLoadData")
    assert isinstance(chosen("off"), PortableCopier)
    assert fake.calls("cuModuleLoadData") == before
    with pytest.raises(native.NativeModuleError, match=r"copy\.native: on.*there is no driver"):
        chosen("on", "there is no driver")
    copier = chosen("on")
    assert isinstance(copier, CudaCopier)
    copier.close()


class SlowCopies:
    """Copies that take a second for each of some kind, by a clock of their own."""

    def __init__(self, seconds: dict[Route, float]) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.num_submitted = 0

    def mark(self) -> Marker:
        return Marker(1)

    def submit_by(self, route: Route, direction: object, batch: object, after: object) -> Ticket:
        self.now += self.seconds[route]
        self.num_submitted += 1
        return Ticket(self.num_submitted)

    def wait(self, ticket: Ticket) -> None:
        pass

    def done(self, ticket: Ticket) -> bool:
        return True


def test_measuring_ends_in_time_on_a_slow_link(caplog: pytest.LogCaptureFixture) -> None:
    layout = make_layout(512, [[96, 640]] * 3)
    for seconds in (0.2, 5.0):
        slow = SlowCopies(dict.fromkeys(Route, seconds))
        table = measured_routes(slow, layout, 512, lambda slow=slow: slow.now)
        assert slow.now < MAX_MEASURE_SECONDS + seconds + 0.001
        assert "cut short" in caplog.text
        assert table.rows == expected_routes(layout).rows
        caplog.clear()


def test_what_was_measured_in_time_counts(caplog: pytest.LogCaptureFixture) -> None:
    quick = {Route.DMA: 0.03, Route.DIRECT: 0.02, Route.STAGED: 0.01}
    slow = SlowCopies(quick)
    table = measured_routes(slow, LAYOUT, NUM_BLOCKS, lambda: slow.now)
    assert all(row == ((1, Route.STAGED),) for row in table.rows.values())
    assert not caplog.records
    slow = SlowCopies(quick | {Route.DIRECT: 0.0099})
    table = measured_routes(slow, LAYOUT, NUM_BLOCKS, lambda: slow.now)
    assert all(row == ((1, Route.DIRECT),) for row in table.rows.values())
    slow = SlowCopies(dict.fromkeys(Route, 0.01) | {Route.DMA: 0.0109})
    table = measured_routes(slow, LAYOUT, NUM_BLOCKS, lambda: slow.now)
    assert all(row == ((1, Route.DMA),) for row in table.rows.values())


def test_a_pageable_slab_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    slab = Slab(NUM_BLOCKS, slot_nbytes_for(LAYOUT.groups), pin="off")
    memory = [np.zeros(n, np.uint8) for n in LAYOUT.allocations]
    assert isinstance(make((FakeDriver(), slab, memory)), PortableCopier)
    assert "not page-locked" in caplog.text


# In what order

ORDERS = list(itertools.permutations(range(5)))[::5]
ALL = list(range(NUM_BLOCKS))
BACKWARDS = ALL[::-1]


def gather_all(
    route: Route, order: tuple[int, ...], forget: int = -1, forget_record: int = -1
) -> tuple[bool, int]:
    """Offload what the engine is about to write; return whether it is right, and how many waits."""
    bench = Bench(route)
    for block in ALL:
        bench.fill_block(block, block + 1)
    marker = bench.copier.mark()
    bench.fake.lib.fake_forget_wait(forget)
    bench.fake.lib.fake_forget_record(forget_record)
    ticket = bench.submit(GATHER, ALL, BACKWARDS, marker)
    num_waits = bench.fake.lib.fake_num_waits()
    while not bench.copier.done(ticket):
        assert any(bench.step(stream) for stream in order), "deadlock"
    right = all(bench.slot(9 - block) == {block + 1} for block in ALL)
    bench.copier.close()
    return right, num_waits


def scatter_all(
    route: Route, order: tuple[int, ...], forget: int = -1, forget_record: int = -1
) -> tuple[bool, int]:
    """Reload into what the engine is about to read a last time."""
    bench = Bench(route)
    read = [np.full(GROUP.payload_nbytes, 255, np.uint8) for _ in ALL]
    for block in ALL:
        bench.write_slot(block, block + 1)
        bench.read_block(block, read[block])
    marker = bench.copier.mark()
    bench.fake.lib.fake_forget_wait(forget)
    bench.fake.lib.fake_forget_record(forget_record)
    ticket = bench.submit(SCATTER, ALL, BACKWARDS, marker)
    num_waits = bench.fake.lib.fake_num_waits()
    while not bench.copier.done(ticket):
        assert any(bench.step(stream) for stream in order), "deadlock"
    bench.fake.lib.fake_run()
    right = all(bench.block(block) == {10 - block} for block in ALL)
    right = right and all((values == 0).all() for values in read)
    bench.copier.close()
    return right, num_waits


@each_route
@pytest.mark.parametrize("play", [gather_all, scatter_all])
def test_every_wait_is_needed_and_together_they_suffice(route: Route, play: object) -> None:
    """A stream that comes first in an order runs as far as it can before the next moves."""
    assert callable(play)
    right, num_waits = zip(*(play(route, order, -1) for order in ORDERS), strict=True)
    assert all(right)
    expected = 1 if route is not Route.STAGED else 1 + NUM_BLOCKS + (NUM_BLOCKS - 4)
    assert set(num_waits) == {expected}
    for wait in range(expected):
        outcomes = [play(route, order, wait)[0] for order in ORDERS]
        assert not all(outcomes), f"nothing is lost without wait {wait}"


def right_without(
    play: Callable[..., tuple[bool, int]], route: Route, order: tuple[int, ...], record: int
) -> bool:
    try:
        return play(route, order, forget_record=record)[0]
    except RuntimeError:  # the driver found out
        return False


@each_route
@pytest.mark.parametrize("play", [gather_all, scatter_all])
def test_every_record_is_needed(route: Route, play: object) -> None:
    """But for what is there to be timed, and that the last buffers are empty, which nobody asks."""
    assert callable(play)
    num_records = 2 if route is not Route.STAGED else 2 + 2 * NUM_BLOCKS
    needless = {
        record
        for record in range(num_records)
        if all(right_without(play, route, order, record) for order in ORDERS)
    }
    emptied = {2 + 2 * block for block in ALL[-4:]} if route is Route.STAGED else set()
    assert needless == {0} | emptied


@each_direction
@pytest.mark.parametrize(("first", "second"), list(itertools.product(Route, Route)))
@pytest.mark.parametrize("order", ORDERS[::6])
def test_batches_of_one_direction_keep_their_order(
    first: Route, second: Route, direction: Direction, order: tuple[int, ...]
) -> None:
    """Two batches to the same places: what stays is the second one's."""
    bench = Bench(first)
    for i in range(3):
        bench.fill_block(i, i + 1)
        bench.write_slot(i + 3, i + 11)
    bench.run(0)
    one, other = ([0, 1], [4, 3]), ([1, 2], [3, 4])  # 1 goes to 3, and 2 to 4
    if direction is SCATTER:
        one, other = ([0, 1], [3, 4]), ([1, 0], [5, 3])  # 5 to 1, and 3 to 0
    tickets = []
    for route, (blocks, slots) in ((first, one), (second, other)):
        batch = CopyBatch(0, int64s(blocks), int64s(slots))
        tickets.append(bench.copier.submit_by(route, direction, batch, bench.copier.mark()))
    bench.run(*order)
    assert all(bench.copier.done(ticket) for ticket in tickets)
    if direction is GATHER:
        assert (bench.slot(3), bench.slot(4)) == ({2}, {3})
    else:
        assert (bench.block(0), bench.block(1)) == ({11}, {13})


@each_route
@each_direction
def test_a_batch_is_done_only_behind_its_last_byte(route: Route, direction: Direction) -> None:
    bench = Bench(route)
    for i in range(4):
        bench.fill_block(i, i + 1)
        bench.write_slot(i, i + 11)
    ticket = bench.submit(direction, [0, 1, 2, 3], [3, 2, 1, 0], bench.copier.mark())
    bench.run(0)
    while not bench.copier.done(ticket):
        assert any([bench.step(stream) for stream in range(1, 5)])  # noqa: C419
    if direction is GATHER:
        assert all(bench.slot(3 - i) == {i + 1} for i in range(4))
    else:
        assert all(bench.block(i) == {14 - i} for i in range(4))


@each_route
@each_direction
def test_an_old_marker_still_orders(route: Route, direction: Direction) -> None:
    bench = Bench(route)
    bench.write_slot(0, 7)
    bench.fill_block(0, 9)
    old = bench.copier.mark()
    for _ in range(50):
        bench.copier.mark()
    ticket = bench.submit(direction, [0], [0], old)
    bench.run_copies()
    assert not bench.copier.done(ticket)
    bench.copier.wait(ticket)
    assert bench.slot(0) == bench.block(0) == ({9} if direction is GATHER else {7})


@each_route
@each_direction
def test_a_copys_time_is_its_own_and_not_its_wait_for_the_engine(
    route: Route, direction: Direction
) -> None:
    """The engine's work takes a second here, a copy or a kernel a millisecond."""
    bench = Bench(route)
    bench.submit(direction, [7], [7])  # in the same streams, and not to be counted
    bench.fill_block(5, 1)
    ticket = bench.submit(direction, [0, 1, 2], [3, 4, 5], bench.copier.mark())
    bench.run(4, 3, 2, 1)  # what need not wait goes ahead
    bench.run(4, 3, 2, 1, 0)
    assert bench.copier.done(ticket)
    pieces = {Route.DMA: 3 * len(GROUP.runs), Route.DIRECT: 1, Route.STAGED: 6}
    assert bench.copier.seconds(ticket) == pytest.approx(pieces[route] / 1e3, rel=0.4)


def test_work_behind_the_marker_is_not_waited_for() -> None:
    bench = Bench(Route.DMA)
    marker = bench.copier.mark()
    bench.fill_block(0, 1)
    ticket = bench.submit(GATHER, [0], [0], marker)
    bench.step(0)  # up to the marker
    bench.run_copies()
    assert bench.copier.done(ticket)


@each_route
def test_neither_direction_waits_for_the_other(route: Route) -> None:
    bench = Bench(route)
    bench.fill_block(0, 1)
    offload = bench.submit(GATHER, [0], [0], bench.copier.mark())
    reload = bench.submit(SCATTER, [1], [1])
    bench.run_copies()
    assert bench.copier.done(reload)
    assert not bench.copier.done(offload)


@pytest.mark.parametrize("marker", [-1, 0, 2])
def test_a_marker_that_was_never_issued_is_refused(marker: int) -> None:
    bench = Bench(Route.DMA)
    bench.copier.mark()
    with pytest.raises(ProtocolError, match=f"marker {marker} was never issued"):
        bench.submit(GATHER, [0], [0], Marker(marker))


def test_the_compiled_copier_takes_no_negative_marker() -> None:
    bench = Bench(Route.DMA)
    bench.copier.mark()
    column, route = int64s([0]), bench.copier._native_routes[Route.DMA]
    with pytest.raises(IndexError, match="marker -1 was never issued"):
        bench.copier._native.submit(True, 0, column, column, -1, route)


@settings(deadline=None)
@given(data=st.data())
def test_however_the_queues_move_copies_keep_to_their_markers(data: st.DataObject) -> None:
    """Each block is computed, gathered, read a last time, then overwritten from another's slot."""
    bench = Bench(data.draw(st.sampled_from(Route)))

    def move() -> None:
        for _ in range(data.draw(st.integers(0, 6))):
            bench.step(data.draw(st.integers(0, 4)))

    blocks = data.draw(st.permutations(ALL))
    gathers = []
    for block in blocks:
        bench.fill_block(block, block + 1)
        gathers.append(bench.submit(GATHER, [block], [block], bench.copier.mark()))
        move()
    for ticket, block in zip(gathers, blocks, strict=True):
        bench.copier.wait(ticket)
        assert bench.copier.done(ticket)
        assert bench.slot(block) == {block + 1}
    read = {block: np.zeros(GROUP.payload_nbytes, np.uint8) for block in blocks}
    for block in blocks:
        bench.read_block(block, read[block])
        ticket = bench.submit(SCATTER, [block], [NUM_BLOCKS - 1 - block], bench.copier.mark())
        move()
    bench.copier.wait(ticket)
    for block in blocks:
        assert set(read[block].tolist()) == {block + 1}
        assert bench.block(block) == {NUM_BLOCKS - block}
    bench.copier.close()
