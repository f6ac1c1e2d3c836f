"""Promises that every copier keeps, here over host memory."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
from collections.abc import Callable, Iterator

import fake_driver
import numpy as np
import pytest
from copy_layouts import Bytes, Described, addresses, filled, layouts, sparse, strided
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers import native
from kvtiers.data.copier import Copier, CopyBatch, Direction, Ticket
from kvtiers.data.copier_cuda import CudaTuning
from kvtiers.data.copier_cuda_routes import Route
from kvtiers.data.copier_host import CopyMethod, HostCopier, make_host_copier
from kvtiers.data.copier_portable import PortableCopier
from kvtiers.data.slab import Slab
from kvtiers.model.errors import CapacityError, LayoutError, ProtocolError, TransferError
from kvtiers.model.frame import FrameFormat, slot_nbytes_for
from kvtiers.model.layout import Axis, GroupLayout, KVLayout
from kvtiers.model.messages import int64s

CANARY = 0xA5
Make = Callable[[KVLayout, list[int], Slab], Copier]

needs_native = pytest.mark.skipif(not native.available(), reason="compiled module not built")


def compiled(method: CopyMethod) -> Make:
    return lambda layout, bases, slab: HostCopier(layout, bases, slab, 3, method=method)


def through_torch(layout: KVLayout, bases: list[int], slab: Slab) -> Copier:
    import torch  # noqa: PLC0415

    from kvtiers.data.copier_torch import TorchCopier  # noqa: PLC0415

    flat = [
        torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(base), dtype=torch.uint8)
        for base, nbytes in zip(bases, itertools.cycle(layout.allocations), strict=False)
    ]
    return TorchCopier(layout, flat, slab, staging_nbytes=2**20)


def available_methods() -> list[CopyMethod]:
    return ["auto", *native.load().build_info()["methods"]] if native.available() else ["auto"]


COPIERS = [
    pytest.param(PortableCopier, id="portable"),
    *(
        pytest.param(compiled(method), id=f"native-{method}", marks=needs_native)
        for method in available_methods()
    ),
    *(
        pytest.param(
            # Small tiles and buffers: the layouts here are small, too.
            fake_driver.copier_by(route, CudaTuning(3, 4096, 256)),
            id=f"cuda-{route.value}",
            marks=pytest.mark.skipif(bool(fake_driver.missing), reason=fake_driver.missing or ""),
        )
        for route in Route
    ),
    pytest.param(
        through_torch,
        id="torch",
        marks=pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="no torch"),
    ),
]
each_kind = pytest.mark.parametrize("make", [COPIERS[0], COPIERS[1], *COPIERS[-4:]])
every = pytest.mark.parametrize("make", COPIERS)


def slots_of(slab: Slab) -> Bytes:
    """The slab as [num_slots, slot_nbytes], the same memory."""
    return np.stack([np.frombuffer(slab.view(i), np.uint8) for i in range(slab.num_slots)])


def fill(slab: Slab, value: int = CANARY) -> None:
    for slot in range(slab.num_slots):
        slab.view(slot)[:] = bytes([value]) * slab.slot_nbytes


def copy(copier: Copier, direction: Direction, group: int, blocks: object, slots: object) -> None:
    batch = CopyBatch(group, int64s(blocks), int64s(slots))
    ticket = copier.submit(direction, batch, copier.mark())
    copier.wait(ticket)
    assert copier.done(ticket)


def check_round_trip(make: Make, described: Described, seed: int) -> None:
    """Gather every block, compare with the oracle; scatter to other blocks, compare all bytes."""
    layout = described.layout
    random = np.random.default_rng(seed)
    memory = filled(layout, seed)
    before = [array.copy() for array in memory]
    slab = Slab(8, slot_nbytes_for(layout.groups), pin="off")
    copier = make(layout, addresses(memory), slab)
    for group in layout.groups:
        fill(slab)
        blocks = random.permutation(group.num_blocks)
        slots = random.permutation(slab.num_slots)[: len(blocks)]
        copy(copier, Direction.GATHER, group.group, blocks, slots)
        expected = np.full((slab.num_slots, slab.slot_nbytes), CANARY, np.uint8)
        start = FrameFormat.of(group).header_nbytes
        payloads = [described.payload(before, group.group, int(block)) for block in blocks]
        for slot, payload in zip(slots, payloads, strict=True):
            expected[slot, start : start + len(payload)] = payload
        np.testing.assert_array_equal(slots_of(slab), expected)
        for array, old in zip(memory, before, strict=True):
            np.testing.assert_array_equal(array, old)

        targets = random.permutation(group.num_blocks)
        copy(copier, Direction.SCATTER, group.group, targets, slots)
        for target, payload in zip(targets, payloads, strict=True):
            described.write(before, group.group, int(target), payload)
        for array, wanted in zip(memory, before, strict=True):
            np.testing.assert_array_equal(array, wanted)
    copier.close()
    slab.close()


@each_kind
@settings(deadline=None)
@given(described=layouts(), seed=st.integers(0, 2**32 - 1))
def test_every_layout_round_trips_bit_exact(make: Make, described: Described, seed: int) -> None:
    """R77, R78, R79, R83, R84: padding, mixed pages, axis orders, kernel blocks."""
    check_round_trip(make, described, seed)


def two_tensors(content: int, *, padding: int, offset: int, num_blocks: int = 8) -> Described:
    """K and V in one tensor, V of another size in a second one; nothing is aligned."""
    dims = [(Axis.KV, 2, 0), (Axis.BLOCK, num_blocks, padding), (Axis.CONTENT, content, 0)]
    first, end = strided("a", 0, offset, dims, 1, (1, 0, 2))
    dims = [(Axis.BLOCK, num_blocks, 3), (Axis.CONTENT, content // 3 + 1, 0)]
    second, last = strided("b", 0, end + 5, dims, 1, (0, 1))
    views = (first, second)
    group = GroupLayout.from_views(
        views, group=0, num_blocks=num_blocks, block_size=16, dtype="uint8"
    )
    return Described(KVLayout((last + 1,), (group,)), (views,))


@every
@pytest.mark.parametrize("content", [1, 63, 64, 4095, 4096, 4161, 70_001, 3_000_000])
@pytest.mark.parametrize(("padding", "offset"), [(0, 0), (17, 3)])
def test_large_and_misaligned_pieces_round_trip_bit_exact(
    make: Make, content: int, padding: int, offset: int
) -> None:
    """The largest batch has 56 MB: enough for threads, and for streaming stores."""
    check_round_trip(make, two_tensors(content, padding=padding, offset=offset), seed=content)


@pytest.fixture
def small() -> Iterator[tuple[Described, list[Bytes], Slab]]:
    """4 blocks, 6 slots."""
    described = two_tensors(100, padding=0, offset=0, num_blocks=4)
    slab = Slab(6, slot_nbytes_for(described.layout.groups), pin="off")
    fill(slab)
    yield described, filled(described.layout, 1), slab
    slab.close()


Small = tuple[Described, list[Bytes], Slab]
GATHER, SCATTER = Direction.GATHER, Direction.SCATTER

BAD_BATCHES = [
    (GATHER, [0, -1, 2], [0, 1, 2], r"row 1: block id -1 is not in 0\.\.3"),
    (GATHER, [0, 1, 4], [0, 1, 2], r"row 2: block id 4 is not in 0\.\.3"),
    (SCATTER, [4, 1, 2], [0, 1, 2], r"row 0: block id 4 is not in 0\.\.3"),
    (GATHER, [0, 1], [0, 6], r"row 1: slot 6 is not in 0\.\.5"),
    (SCATTER, [0, 1], [-1, 1], r"row 0: slot -1 is not in 0\.\.5"),
    (GATHER, [2**62, 1], [0, 1], rf"row 0: block id {2**62} is not in"),
    (SCATTER, [0, 1], [0, -(2**63)], rf"row 1: slot {-(2**63)} is not in"),
    (GATHER, [0, 1, 2], [0, 1], "3 block ids but 2 slots"),
    (SCATTER, [], [0], "0 block ids but 1 slots"),
    (GATHER, [0, 1, 2], [5, 3, 5], "row 2: slot 5 is already the target of row 0"),
    (SCATTER, [0, 1, 1], [5, 3, 4], "row 2: block id 1 is already the target of row 1"),
]


@each_kind
@pytest.mark.parametrize(("direction", "blocks", "slots", "complaint"), BAD_BATCHES)
def test_bad_batch_is_refused_whole(
    make: Make,
    small: Small,
    direction: Direction,
    blocks: list[int],
    slots: list[int],
    complaint: str,
) -> None:
    """R09: the row is named, and not even the good rows have moved."""
    described, memory, slab = small
    before = [array.copy() for array in memory]
    copier = make(described.layout, addresses(memory), slab)
    with pytest.raises(TransferError, match=complaint):
        copier.submit(direction, CopyBatch(0, int64s(blocks), int64s(slots)), None)
    assert (slots_of(slab) == CANARY).all()
    np.testing.assert_array_equal(memory[0], before[0])


@each_kind
@pytest.mark.parametrize("group", [-1, 1])
def test_unknown_group_is_refused(make: Make, small: Small, group: int) -> None:
    described, memory, slab = small
    copier = make(described.layout, addresses(memory), slab)
    with pytest.raises(TransferError, match=rf"KV group {group} is not in 0\.\.0"):
        copier.submit(GATHER, CopyBatch(group, int64s([0]), int64s([0])), None)


@each_kind
@pytest.mark.parametrize(
    "column", [np.zeros((2, 1), np.int64), np.zeros(2, np.int32), np.zeros(2, np.float64)]
)
def test_columns_of_another_type_are_refused(make: Make, small: Small, column: Bytes) -> None:
    described, memory, slab = small
    copier = make(described.layout, addresses(memory), slab)
    with pytest.raises(TransferError, match=f"{column.dtype}, expected one int64 column"):
        copier.submit(GATHER, CopyBatch(0, column, int64s([0, 1])), None)  # type: ignore[arg-type]


@each_kind
def test_one_source_may_go_to_several_targets(make: Make, small: Small) -> None:
    described, memory, slab = small
    copier = make(described.layout, addresses(memory), slab)
    copy(copier, GATHER, 0, [2, 2], [0, 5])
    np.testing.assert_array_equal(slots_of(slab)[0], slots_of(slab)[5])
    copy(copier, SCATTER, 0, [0, 3], [5, 5])
    for block in (0, 3):
        got, wanted = (described.payload(memory, 0, b) for b in (block, 2))
        np.testing.assert_array_equal(got, wanted)


@each_kind
def test_columns_may_be_strided_and_read_only(make: Make, small: Small) -> None:
    described, memory, slab = small
    copier = make(described.layout, addresses(memory), slab)
    blocks, slots = int64s([1, 9, 3, 9])[::2], int64s([4, 9, 2, 9])[::2]
    blocks.flags.writeable = False
    copier.submit(GATHER, CopyBatch(0, blocks, slots), None)
    start = FrameFormat.of(described.layout.groups[0]).header_nbytes
    payload = described.payload(memory, 0, 3)
    np.testing.assert_array_equal(slots_of(slab)[2, start : start + len(payload)], payload)


@each_kind
def test_empty_batch_is_done_at_once(make: Make, small: Small) -> None:
    described, memory, slab = small
    copy(make(described.layout, addresses(memory), slab), GATHER, 0, [], [])


@each_kind
def test_a_ticket_is_consumed_once(make: Make, small: Small) -> None:
    described, memory, slab = small
    copier = make(described.layout, addresses(memory), slab)
    batch = CopyBatch(0, int64s([0]), int64s([0]))
    first, second = (copier.submit(GATHER, batch, copier.mark()) for _ in range(2))
    assert first != second
    assert copier.done(second)
    assert copier.done(first)
    with pytest.raises(ProtocolError, match="not pending"):
        copier.done(first)
    copier.wait(first)
    with pytest.raises(ProtocolError, match="never issued"):
        copier.wait(Ticket(99))


@each_kind
def test_closed_copier_copies_no_more(make: Make, small: Small) -> None:
    described, memory, slab = small
    copier = make(described.layout, addresses(memory), slab)
    ticket = copier.submit(GATHER, CopyBatch(0, int64s([0]), int64s([0])), None)
    copier.close()
    copier.close()
    assert copier.done(ticket)
    with pytest.raises(ProtocolError, match="closed"):
        copier.submit(GATHER, CopyBatch(0, int64s([0]), int64s([0])), None)


@each_kind
def test_what_does_not_fit_together_is_refused(make: Make, small: Small) -> None:
    described, memory, slab = small
    with pytest.raises(LayoutError, match="2 addresses for 1 allocations"):
        make(described.layout, addresses(memory) * 2, slab)
    narrow = Slab(4, slab.slot_nbytes - 4096, pin="off")
    with pytest.raises(CapacityError, match=f"slot has {narrow.slot_nbytes} bytes"):
        make(described.layout, addresses(memory), narrow)
    narrow.close()


@each_kind
def test_offsets_beyond_4_gib_are_exact(make: Make) -> None:
    """R86: a stride of 1,002,240 bytes; only the touched pages cost memory."""
    stride, num_blocks = 1_002_240, 6200
    dims = [(Axis.BLOCK, num_blocks, stride - 3 * 4096), (Axis.CONTENT, 3 * 4096, 0)]
    view, end = strided("l", 0, 0, dims, 1, (0, 1))
    group = GroupLayout.from_views([view], group=0, num_blocks=num_blocks, block_size=16, dtype="x")
    mapping, address = sparse(end)
    slab = Slab(3, slot_nbytes_for([group]), pin="off")
    copier = make(KVLayout((end,), (group,)), [address], slab)
    patterns = {block: bytes([block % 251]) * (3 * 4096) for block in (2143, 4290, 6199)}
    assert 2143 * stride > 2**31
    assert 4290 * stride > 2**32
    for block, pattern in patterns.items():
        mapping[block * stride : block * stride + len(pattern)] = pattern
    copy(copier, GATHER, 0, list(patterns), [0, 1, 2])
    for slot, pattern in enumerate(patterns.values()):
        assert bytes(slab.view(slot)[4096 : 4096 + len(pattern)]) == pattern
    copy(copier, SCATTER, 0, [6199, 2143, 4290], [0, 1, 2])
    for block, pattern in zip((6199, 2143, 4290), patterns.values(), strict=True):
        assert mapping[block * stride : block * stride + len(pattern)] == pattern
    copier.close()
    slab.close()
    mapping.close()


def test_modes_choose_the_copier(small: Small) -> None:
    described, memory, slab = small
    off = make_host_copier(described.layout, addresses(memory), slab, mode="off")
    assert isinstance(off, PortableCopier)
    auto = make_host_copier(described.layout, addresses(memory), slab)
    assert isinstance(auto, HostCopier) == native.available()
    with pytest.raises(ValueError, match="'maybe'"):
        make_host_copier(described.layout, addresses(memory), slab, mode="maybe")  # type: ignore[arg-type]
