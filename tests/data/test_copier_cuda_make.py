"""Which copier a device gets, and what becomes of one that is not to be trusted."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import fake_driver
import numpy as np
import pytest
from cuda_bench import ALL, LAYOUT, NUM_BLOCKS, Bench
from fake_driver import FakeDriver

from kvtiers import native
from kvtiers.data.copier import Direction, Marker, Ticket
from kvtiers.data.copier_cuda import CudaCopier
from kvtiers.data.copier_cuda_check import check_copies
from kvtiers.data.copier_cuda_make import make_cuda_copier
from kvtiers.data.copier_cuda_routes import (
    MAX_MEASURE_SECONDS,
    Route,
    expected_routes,
    measured_routes,
)
from kvtiers.data.copier_portable import PortableCopier
from kvtiers.data.cuda_device import CudaDevice
from kvtiers.data.slab import Slab
from kvtiers.model.frame import slot_nbytes_for
from kvtiers.testing.fake_device import make_layout

if fake_driver.missing:
    pytest.skip(fake_driver.missing, allow_module_level=True)


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
