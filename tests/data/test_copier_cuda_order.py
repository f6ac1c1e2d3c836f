"""In what order `CudaCopier` copies on a pretended device: every wait is needed, and enough."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import fake_driver
import numpy as np
import pytest
from cuda_bench import ALL, GATHER, GROUP, NUM_BLOCKS, SCATTER, Bench, each_direction, each_route
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.data.copier import CopyBatch, Direction, Marker
from kvtiers.data.copier_cuda_routes import Route
from kvtiers.model.errors import ProtocolError
from kvtiers.model.messages import int64s

if fake_driver.missing:
    pytest.skip(fake_driver.missing, allow_module_level=True)


ORDERS = list(itertools.permutations(range(5)))[::5]
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
