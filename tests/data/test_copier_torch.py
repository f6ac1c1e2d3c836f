"""In what order `TorchCopier` copies, seen on a device that moves only when a test says so.

What it copies is tested with the other copiers, in test_copier.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

if not importlib.util.find_spec("torch"):
    pytest.skip("no torch", allow_module_level=True)

import torch
from fake_cuda import FakeCuda
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.data import copier_torch
from kvtiers.data.copier import CopyBatch, Direction, Marker, Ticket
from kvtiers.data.copier_torch import TorchCopier
from kvtiers.data.slab import Slab
from kvtiers.model.errors import LayoutError, ProtocolError
from kvtiers.model.frame import FrameFormat, slot_nbytes_for
from kvtiers.model.messages import int64s
from kvtiers.testing.fake_device import make_layout

GATHER, SCATTER = Direction.GATHER, Direction.SCATTER
LAYOUT = make_layout(6, [[96, 640], [40]])
NUM_SLOTS = 6


class Bench:
    """A copier over CPU tensors with a fake device; block and slot contents are one number."""

    def __init__(self, **options: Any) -> None:
        self.cuda = FakeCuda()
        self.memory = [torch.zeros(n, dtype=torch.uint8) for n in LAYOUT.allocations]
        self.slab = Slab(NUM_SLOTS, slot_nbytes_for(LAYOUT.groups), pin="off")
        self.copier = TorchCopier(LAYOUT, self.memory, self.slab, cuda=self.cuda, **options)

    def block(self, block: int, group: int = 0) -> set[int]:
        """The values of a block's bytes."""
        found: set[int] = set()
        for run in LAYOUT.groups[group].runs:
            start = run.offset + block * run.block_stride
            found |= set(self.memory[run.allocation][start : start + run.nbytes].tolist())
        return found

    def write_block(self, block: int, value: int, group: int = 0) -> None:
        for run in LAYOUT.groups[group].runs:
            start = run.offset + block * run.block_stride
            self.memory[run.allocation][start : start + run.nbytes] = value

    def slot(self, slot: int, group: int = 0) -> set[int]:
        """The values of a payload's bytes in a slot."""
        start = FrameFormat.of(LAYOUT.groups[group]).header_nbytes
        return set(self.slab.view(slot)[start : start + LAYOUT.groups[group].payload_nbytes])

    def write_slot(self, slot: int, value: int, group: int = 0) -> None:
        start = FrameFormat.of(LAYOUT.groups[group]).header_nbytes
        nbytes = LAYOUT.groups[group].payload_nbytes
        self.slab.view(slot)[start : start + nbytes] = bytes([value]) * nbytes

    def submit(
        self,
        direction: Direction,
        blocks: list[int],
        slots: list[int],
        after: Marker | None = None,
        group: int = 0,
    ) -> Ticket:
        return self.copier.submit(direction, CopyBatch(group, int64s(blocks), int64s(slots)), after)

    def engine(self, work: Callable[[], object]) -> None:
        """Queue work of the engine."""
        self.cuda.engine.put(work)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_gather_reads_what_the_engine_had_queued_before_the_marker(bench: Bench) -> None:
    bench.write_block(2, 1)
    bench.engine(lambda: bench.write_block(2, 9))
    ticket = bench.submit(GATHER, [2], [4], bench.copier.mark())
    bench.cuda.run_copies()
    assert not bench.copier.done(ticket)
    assert bench.slot(4) == {0}
    bench.cuda.engine.run()
    bench.cuda.run_copies()
    assert bench.copier.done(ticket)
    assert bench.slot(4) == {9}


def test_a_scatter_overwrites_nothing_that_the_engine_still_reads(bench: Bench) -> None:
    bench.write_block(2, 1)
    bench.write_slot(4, 5)
    read: list[set[int]] = []
    bench.engine(lambda: read.append(bench.block(2)))
    ticket = bench.submit(SCATTER, [2], [4], bench.copier.mark())
    bench.cuda.run_copies()
    assert not bench.copier.done(ticket)
    assert bench.block(2) == {1}
    bench.cuda.engine.run()
    bench.cuda.run_copies()
    assert read == [{1}]
    assert bench.copier.done(ticket)
    assert bench.block(2) == {5}


def test_the_engine_reads_what_a_scatter_brings_where_it_is_held(bench: Bench) -> None:
    bench.write_block(2, 1)
    bench.write_slot(4, 5)
    read: list[set[int]] = []
    ticket = bench.submit(SCATTER, [2], [4], bench.copier.mark())
    assert bench.copier.hold_engine(ticket)
    bench.engine(lambda: read.append(bench.block(2)))
    bench.cuda.engine.run()
    assert read == [], "the copy has not run"
    bench.cuda.run_copies()
    assert bench.copier.done(ticket)
    bench.cuda.engine.run()
    assert read == [{5}]
    assert bench.copier.hold_engine(ticket), "over: nobody is held"
    assert bench.cuda.engine.idle
    with pytest.raises(ProtocolError, match="never issued"):
        bench.copier.hold_engine(Ticket(ticket + 1))


def test_a_stream_that_is_captured_cannot_be_held(bench: Bench) -> None:
    """A graph cannot wait for what is outside of it; to try ends the capture."""
    ticket = bench.submit(SCATTER, [2], [4])
    bench.cuda.capturing = True
    assert bench.copier.hold_engine(ticket) is False
    assert bench.cuda.engine.idle
    bench.cuda.capturing = False
    assert bench.copier.hold_engine(ticket) is True
    assert not bench.cuda.engine.idle


def test_work_behind_the_marker_is_not_waited_for(bench: Bench) -> None:
    marker = bench.copier.mark()
    bench.engine(lambda: None)
    ticket = bench.submit(GATHER, [0], [0], marker)
    bench.cuda.engine.step()  # up to the marker
    bench.cuda.run_copies()
    assert bench.copier.done(ticket)
    assert not bench.cuda.engine.idle


def test_without_a_marker_nothing_is_waited_for(bench: Bench) -> None:
    bench.engine(lambda: None)
    ticket = bench.submit(GATHER, [0], [0])
    bench.cuda.run_copies()
    assert bench.copier.done(ticket)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("staging_nbytes", [1, 2**20], ids=["block by block", "at once"])
def test_a_batch_is_done_only_behind_its_last_byte(
    direction: Direction, staging_nbytes: int
) -> None:
    bench = Bench(staging_nbytes=staging_nbytes)
    for i in range(4):
        bench.write_block(i, i + 1)
        bench.write_slot(i, i + 11)
    ticket = bench.submit(direction, [0, 1, 2, 3], [3, 2, 1, 0], bench.copier.mark())
    bench.cuda.engine.run()

    def complete() -> bool:
        if direction is GATHER:
            return all(bench.slot(3 - i) == {i + 1} for i in range(4))
        return all(bench.block(i) == {14 - i} for i in range(4))

    num_unfinished = 0
    while not bench.copier.done(ticket):
        num_unfinished += not complete()
        assert bench.cuda.step_copies()
    assert complete()
    assert num_unfinished >= 4


def test_neither_direction_waits_for_the_other(bench: Bench) -> None:
    bench.engine(lambda: None)
    offload = bench.submit(GATHER, [0], [0], bench.copier.mark())
    reload = bench.submit(SCATTER, [1], [1])
    bench.cuda.run_copies()
    assert bench.copier.done(reload)
    assert not bench.copier.done(offload)


def test_submitting_runs_nothing(bench: Bench) -> None:
    bench.write_block(0, 7)
    ticket = bench.submit(GATHER, [0], [0])
    assert bench.slot(0) == {0}
    assert not bench.copier.done(ticket)
    bench.copier.wait(ticket)
    assert bench.slot(0) == {7}
    assert bench.copier.done(ticket)


def test_a_caller_may_change_its_columns_at_once(bench: Bench) -> None:
    for i in range(3):
        bench.write_block(i, i + 1)
    blocks, slots = int64s([2]), int64s([0])
    ticket = bench.copier.submit(GATHER, CopyBatch(0, blocks, slots), None)
    blocks[0], slots[0] = 1, 1
    bench.copier.wait(ticket)
    assert bench.slot(0) == {3}
    assert bench.slot(1) == {0}


def test_the_table_of_markers_is_bounded_and_an_old_marker_still_orders() -> None:
    bench = Bench(num_markers=4)
    bench.engine(lambda: bench.write_block(0, 9))
    old = bench.copier.mark()
    for _ in range(50):
        bench.copier.mark()
    ticket = bench.submit(GATHER, [0], [0], old)
    bench.cuda.run_copies()
    assert not bench.copier.done(ticket)
    bench.copier.wait(ticket)
    assert bench.slot(0) == {9}
    assert len(bench.copier._markers._events) == 4


@pytest.mark.parametrize("marker", [-1, 0, 2])
def test_a_marker_that_was_never_issued_is_refused(bench: Bench, marker: int) -> None:
    bench.copier.mark()
    with pytest.raises(ProtocolError, match=f"marker {marker} was never issued"):
        bench.submit(GATHER, [0], [0], Marker(marker))


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("num_queued", range(6))
def test_when_the_device_refuses_nothing_of_the_batch_runs_on(
    bench: Bench, direction: Direction, num_queued: int
) -> None:
    """The slots are somebody else's at once: a copy that ran on would fill them later."""
    earlier = bench.submit(direction, [5], [5])
    bench.cuda.fail_after = num_queued
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.submit(direction, [0, 1, 2, 3], [0, 1, 2, 3], bench.copier.mark())
    assert all(stream.idle for stream in bench.cuda.copying)
    bench.cuda.fail_after = None
    assert bench.copier.done(earlier)
    later = bench.submit(direction, [0], [0])
    bench.copier.wait(later)
    assert bench.copier.done(later)


def test_an_error_of_the_device_ends_a_batch_once(bench: Bench) -> None:
    ticket = bench.submit(GATHER, [0], [0])
    bench.cuda.events[-1].error = RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        bench.copier.done(ticket)
    with pytest.raises(ProtocolError, match="not pending"):
        bench.copier.done(ticket)


def test_closing_waits_for_what_is_queued(bench: Bench) -> None:
    bench.engine(lambda: bench.write_block(0, 9))
    bench.submit(GATHER, [0], [0], bench.copier.mark())
    bench.copier.close()
    assert bench.slot(0) == {9}


@settings(deadline=None)
@given(data=st.data())
def test_however_the_queues_move_copies_keep_to_their_markers(data: st.DataObject) -> None:
    """Each block is computed, gathered, read a last time, then overwritten from another's slot."""
    bench = Bench(staging_nbytes=data.draw(st.sampled_from([1, 2000, 2**20])), num_markers=3)
    blocks = data.draw(st.permutations(range(NUM_SLOTS)))

    def move() -> None:
        for _ in range(data.draw(st.integers(0, 6))):
            data.draw(st.sampled_from(bench.cuda.streams)).step()

    gathers = []
    for block in blocks:
        bench.engine(lambda block=block: bench.write_block(block, block + 1))
        gathers.append(bench.submit(GATHER, [block], [block], bench.copier.mark()))
        move()
    for ticket, block in zip(gathers, blocks, strict=True):
        bench.copier.wait(ticket)
        assert bench.copier.done(ticket)
        assert bench.slot(block) == {block + 1}

    read: list[set[int]] = []
    for block in blocks:
        bench.engine(lambda block=block: read.append(bench.block(block)))
        slot = NUM_SLOTS - 1 - block
        ticket = bench.submit(SCATTER, [block], [slot], bench.copier.mark())
        move()
    bench.copier.wait(ticket)
    assert read == [{block + 1} for block in blocks]
    assert [bench.block(block) for block in range(NUM_SLOTS)] == [
        {NUM_SLOTS - block} for block in range(NUM_SLOTS)
    ]


def test_staging_is_bounded() -> None:
    bench = Bench(staging_nbytes=1500)
    largest = max(group.payload_nbytes for group in LAYOUT.groups)
    assert all(len(lane.staging) == 1500 for lane in bench.copier._lanes.values())
    assert copier_torch.STAGING_NBYTES * len(Direction) <= 64 * 2**20
    tight = Bench(staging_nbytes=1)
    assert all(len(lane.staging) == largest for lane in tight.copier._lanes.values())


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda flat: flat.view(torch.int8), "allocation 0 is torch.int8"),
        (lambda flat: flat[1:], f"expected {LAYOUT.allocations[0]} bytes in a row"),
        (lambda flat: flat.view(-1, 2), f"expected {LAYOUT.allocations[0]} bytes in a row"),
        (lambda flat: flat.to("meta"), "expected one device"),
    ],
    ids=["type", "size", "shape", "devices"],
)
def test_allocations_of_another_form_are_refused(
    bench: Bench, spoil: Callable[[torch.Tensor], torch.Tensor], complaint: str
) -> None:
    memory = [spoil(bench.memory[0]), *bench.memory[1:]]
    with pytest.raises(LayoutError, match=complaint):
        TorchCopier(LAYOUT, memory, bench.slab)


def test_allocations_may_begin_anywhere_in_their_storage() -> None:
    slab = Slab(NUM_SLOTS, slot_nbytes_for(LAYOUT.groups), pin="off")
    memory = [torch.zeros(n + 3, dtype=torch.uint8)[3:] for n in LAYOUT.allocations]
    for flat in memory:
        flat[:] = torch.arange(len(flat)) % 251
    copier = TorchCopier(LAYOUT, memory, slab)
    copier.submit(GATHER, CopyBatch(1, int64s([4]), int64s([2])), None)
    start = FrameFormat.of(LAYOUT.groups[1]).header_nbytes
    expected = np.concatenate(
        [
            memory[run.allocation][run.offset + 4 * run.block_stride :][: run.nbytes].numpy()
            for run in LAYOUT.groups[1].runs
        ]
    )
    np.testing.assert_array_equal(
        np.frombuffer(slab.view(2), np.uint8)[start : start + len(expected)], expected
    )


@pytest.mark.parametrize("direction", Direction)
def test_a_copys_time_is_its_own_and_not_its_wait_for_the_engine(
    bench: Bench, direction: Direction
) -> None:
    """An item of a queue is a millisecond here."""
    for _ in range(100):
        bench.engine(lambda: None)
    marker = bench.copier.mark()
    ticket = bench.submit(direction, [0, 1], [2, 3], marker)
    assert not bench.copier.done(ticket)
    assert bench.copier.seconds(ticket) is None
    bench.copier.wait(ticket)
    assert bench.cuda.milliseconds > 100
    assert bench.copier.done(ticket)
    seconds = bench.copier.seconds(ticket)
    assert seconds is not None
    assert 0.002 <= seconds < 0.02


def test_on_the_cpu_the_callers_clock_knows_what_a_copy_took() -> None:
    memory = [torch.zeros(n, dtype=torch.uint8) for n in LAYOUT.allocations]
    slab = Slab(NUM_SLOTS, slot_nbytes_for(LAYOUT.groups), pin="off")
    copier = TorchCopier(LAYOUT, memory, slab)
    ticket = copier.submit(GATHER, CopyBatch(0, int64s([0]), int64s([0])), copier.mark())
    assert copier.done(ticket)
    assert copier.seconds(ticket) is None


def test_an_engine_of_another_library_is_waited_for_on_its_own_stream() -> None:
    bench = Bench()
    other = bench.cuda.Stream()
    bench.cuda.ExternalStream = lambda handle, device: {77: other}[handle]
    copier = TorchCopier(
        LAYOUT, bench.memory, bench.slab, cuda=bench.cuda, engine_stream=lambda: 77
    )
    other.put(lambda: bench.write_block(2, 9))
    ticket = copier.submit(GATHER, CopyBatch(0, int64s([2]), int64s([4])), copier.mark())
    for stream in bench.cuda.streams:
        if stream is not other:
            stream.run()
    assert not copier.done(ticket)
    copier.wait(ticket)
    assert bench.slot(4) == {9}
