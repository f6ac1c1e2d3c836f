"""A malformed order is refused whole, before anything is queued: R09."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from ranks import OK, assert_at_rest, memory

from kvtiers.model.errors import ProtocolError, TransferError
from kvtiers.model.keys import pack_keys
from kvtiers.model.messages import HBM, NO_SLOT, Forget, TransferKind, int64s
from kvtiers.testing.fake_device import make_layout
from kvtiers.testing.fake_rank import FakeRank, keys_of

NUM_BLOCKS, NUM_SLOTS = 8, 6
KEYS = keys_of(1, 2, 3)


def uint8s(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def make_rank() -> FakeRank:
    return FakeRank(make_layout(NUM_BLOCKS, [[64], [96]]), NUM_SLOTS, memory("m", "n"))


def good(rank: FakeRank, kind: TransferKind):
    """Return an order in which nothing is wrong."""
    if kind is TransferKind.OFFLOAD:
        return rank.orders.offload(KEYS, [0, 1, 2], [0, 1, 2], 0b11)
    if kind is TransferKind.RELOAD:
        return rank.orders.reload(KEYS, [0, 1, 2], [0, 1, NO_SLOT], [0, 1, 2], window=[4, 5])
    if kind is TransferKind.PROMOTE:
        return rank.orders.promote(KEYS, [0, 1, NO_SLOT], [1, 2, 1], window=[4, 5])
    return rank.orders.demote(KEYS, [0, 1, 2])


EVERY = tuple(TransferKind)
COPIES = (TransferKind.OFFLOAD, TransferKind.RELOAD)
OFFLOAD, RELOAD, DEMOTE, PROMOTE = [(kind,) for kind in TransferKind]

FLAWS = {
    "torn key column": (EVERY, {"keys": pack_keys(KEYS)[:-1]}),
    "fewer keys than rows": (EVERY, {"keys": pack_keys(KEYS[:2])}),
    "more keys than rows": (EVERY, {"keys": pack_keys([*KEYS, KEYS[0]])}),
    "no such KV group": (EVERY, {"keys": pack_keys([*KEYS[:2], *keys_of(3, group=2)])}),
    "too few blocks": (EVERY, {"block_ids": int64s([0, 1])}),
    "too few slots": (EVERY, {"slots": int64s([0, 1])}),
    "too few sources": (EVERY, {"sources": uint8s(0, 0)}),
    "too few targets": (EVERY, {"targets": uint8s(1, 1)}),
    "blocks of another type": (EVERY, {"block_ids": np.array([0, 1, 2], np.int32)}),
    "slots of another type": (EVERY, {"slots": np.array([0.0, 1.0, 2.0])}),
    "slots of two dimensions": (EVERY, {"slots": int64s([[0], [1], [2]])}),
    "targets of another type": (EVERY, {"targets": np.array([1, 1, 1], np.int64)}),
    "window of another type": (EVERY, {"window": np.array([4], np.int32)}),
    "block one too large": (COPIES, {"block_ids": int64s([0, 1, NUM_BLOCKS])}),
    "no block": (COPIES, {"block_ids": int64s([0, -1, 2])}),
    "slot one too large": (EVERY, {"slots": int64s([0, 1, NUM_SLOTS])}),
    "slot far below": (EVERY, {"slots": int64s([0, -2, 2])}),
    "block without a slot": ((OFFLOAD + DEMOTE), {"slots": int64s([0, NO_SLOT, 2])}),
    "two blocks into one slot": (OFFLOAD, {"slots": int64s([0, 1, 0])}),
    "two rows into one block": (RELOAD, {"block_ids": int64s([0, 1, 0])}),
    "landing where another row reads": (RELOAD, {"slots": int64s([1, 1, NO_SLOT])}),
    "landing where another row lands": (
        RELOAD,
        {"slots": int64s([1, 1, 2]), "sources": uint8s(1, 1, 1)},
    ),
    "landing in the window": ((RELOAD + PROMOTE), {"slots": int64s([0, 4, NO_SLOT])}),
    "reading from the window": (RELOAD, {"slots": int64s([5, 1, NO_SLOT])}),
    "window slot one too large": ((RELOAD + PROMOTE), {"window": int64s([4, NUM_SLOTS])}),
    "window slot that is none": (RELOAD, {"window": int64s([4, NO_SLOT])}),
    "window slot twice": (RELOAD, {"window": int64s([4, 4])}),
    "no such source": ((RELOAD + PROMOTE), {"sources": uint8s(1, 1, 3)}),
    "promotion of what is in no store": (PROMOTE, {"sources": uint8s(1, 2, 0)}),
    "two promotions into one slot": (PROMOTE, {"slots": int64s([1, 1, NO_SLOT])}),
    "no such target": ((OFFLOAD + DEMOTE), {"targets": uint8s(0b11, 0b100, 0)}),
    "no such store": (EVERY, {"stores": ("m", "x")}),
    "store twice": (EVERY, {"stores": ("m", "m")}),
    "too many stores": (EVERY, {"stores": tuple("mnopqrstu")}),
    "demotion to nowhere": (DEMOTE, {"targets": uint8s(0, 0, 0)}),
    "deadline that is no number": (EVERY, {"deadline": math.nan}),
    "deadline in the past": (EVERY, {"deadline": -1.0}),
    "kind that is none": (EVERY, {"kind": 7}),
}
CASES = [
    pytest.param(kind, change, id=f"{kind.name.lower()}: {name}")
    for name, (kinds, change) in FLAWS.items()
    for kind in kinds
]


@pytest.mark.parametrize("kind", EVERY)
def test_good_order_is_taken(kind):
    """So that what the other tests refuse is refused for its flaw."""
    rank = make_rank()
    rank.submit(good(rank, kind))
    assert not rank.executor.idle


@pytest.mark.parametrize(("kind", "change"), CASES)
def test_malformed_order_is_refused_and_nothing_moves(kind, change):
    rank = make_rank()
    order = replace(good(rank, kind), **change)
    memory_before = [array.copy() for array in rank.device.memory]
    slab_before = [bytes(rank.slab.view(slot)) for slot in range(NUM_SLOTS)]
    with pytest.raises(TransferError, match=f"job {order.job_id}: "):
        rank.submit(order)
    assert rank.executor.idle
    assert not rank.advance()
    rank.settle()
    assert rank.answers == []
    assert_at_rest(rank)
    assert [bytes(rank.slab.view(slot)) for slot in range(NUM_SLOTS)] == slab_before
    for array, before in zip(rank.device.memory, memory_before, strict=True):
        np.testing.assert_array_equal(array, before)


def test_block_is_checked_against_its_own_kv_group():
    small, large = make_layout(4, [[64]]).groups[0], make_layout(8, [[64], [64]])
    layout = replace(large, groups=(small, large.groups[1]))
    rank = FakeRank(layout, 8)
    fits = rank.orders.offload(keys_of(1, group=1), [7], [0])
    rank.submit(fits)
    with pytest.raises(TransferError, match=r"row 1: block 4 is not in 0\.\.3"):
        rank.submit(rank.orders.offload(keys_of(1, 2), [3, 4], [1, 2]))


def test_one_block_id_in_two_kv_groups_is_two_blocks():
    rank = make_rank()
    keys = keys_of(1) + keys_of(1, group=1)
    rank.fill([3, 3], keys)
    rank.run(rank.orders.offload(keys, [3, 3], [0, 1]))
    assert rank.run(rank.orders.reload(keys, [5, 5], [0, 1])) == {HBM: [OK, OK]}
    assert rank.holds(5, keys[0])
    assert rank.holds(5, keys[1])


def test_two_rows_may_read_one_slot():
    rank = make_rank()
    rank.fill([0], KEYS[:1])
    rank.run(rank.orders.offload(KEYS[:1], [0], [0]))
    order = rank.orders.reload([KEYS[0], KEYS[0]], [5, 6], [0, 0])
    assert rank.run(order) == {HBM: [OK, OK]}


def test_message_names_row_value_and_range():
    rank = make_rank()
    order = replace(good(rank, TransferKind.OFFLOAD), slots=int64s([0, 1, 6]))
    with pytest.raises(TransferError, match=r"row 2: slot 6 is not in 0\.\.5"):
        rank.submit(order)


def test_running_job_is_not_submitted_twice():
    rank = make_rank()
    order = good(rank, TransferKind.OFFLOAD)
    rank.submit(order)
    with pytest.raises(TransferError, match="running already"):
        rank.submit(order)
    rank.settle()
    assert len(rank.completions(order.job_id)) == 3


def test_deletion_from_no_store_is_refused():
    rank = make_rank()
    with pytest.raises(TransferError, match="no store 'x'"):
        rank.executor.forget(Forget.of("x", KEYS))
    with pytest.raises(TransferError, match="multiple"):
        rank.executor.forget(Forget("m", b"torn"))
    assert rank.executor.idle


def test_forgotten_keys_leave_their_store_only():
    rank = make_rank()
    rank.fill([0, 1, 2], KEYS)
    rank.run(rank.orders.offload(KEYS, [0, 1, 2], [0, 1, 2], 0b11))
    rank.executor.forget(Forget.of("m", KEYS[:2]))
    rank.settle()
    assert rank.stores["m"].keys() == [rank.name(KEYS[2])]
    assert len(rank.stores["n"].keys()) == 3


def test_closed_executor_takes_no_order():
    rank = make_rank()
    order = good(rank, TransferKind.OFFLOAD)
    rank.close()
    with pytest.raises(ProtocolError, match="closed"):
        rank.executor.submit(order, None)
