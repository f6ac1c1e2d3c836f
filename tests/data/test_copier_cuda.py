"""What `CudaCopier` asks of the driver, and what it makes of refusals, on a pretended device.

What it copies is tested with the other copiers, in test_copier.py.
"""

from __future__ import annotations

import logging
from concurrent import futures

import fake_driver
import numpy as np
import pytest
from cuda_bench import (
    BLOCK_BY_BLOCK,
    GATHER,
    GROUP,
    LAYOUT,
    SCATTER,
    Bench,
    each_direction,
    each_route,
)
from fake_driver import FakeDriver

from kvtiers import native
from kvtiers.data.copier import CopyBatch, Direction, Ticket
from kvtiers.data.copier_cuda_routes import Route
from kvtiers.data.cuda_device import find_device
from kvtiers.data.slab import Slab
from kvtiers.model.errors import ProtocolError
from kvtiers.model.frame import slot_nbytes_for
from kvtiers.model.messages import int64s

if fake_driver.missing:
    pytest.skip(fake_driver.missing, allow_module_level=True)


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
