"""Offloads, reloads and demotions bring every byte where it belongs."""

from __future__ import annotations

import itertools
import random

import pytest
from ranks import LAYOUTS, OK, assert_at_rest, memory

from kvtiers.data.copier import Direction
from kvtiers.data.copier_host import HostCopier
from kvtiers.data.copier_portable import PortableCopier
from kvtiers.model.layout import KVLayout
from kvtiers.model.messages import DRAM, HBM, NO_SLOT
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_device import make_layout
from kvtiers.testing.fake_rank import FakeRank, key_of, keys_of

each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
each_copier = pytest.mark.parametrize(
    "make_copier", [None, PortableCopier, HostCopier], ids=["device", "portable", "host"]
)


def mixed_keys(layout: KVLayout, num: int) -> list[bytes]:
    """Return keys that go through the KV groups in turn."""
    groups = itertools.cycle(range(len(layout.groups)))
    return [key_of(n, group) for n, group in zip(range(num), groups, strict=False)]


@each_layout
@each_copier
def test_offload_and_reload_are_bit_exact(layout, make_copier):
    rank = FakeRank(layout, 8, make_copier=make_copier)
    keys = mixed_keys(layout, 6)
    rank.fill(range(6), keys)
    assert rank.run(rank.orders.offload(keys, range(6), [7, 0, 3, 2, 5, 4])) == {DRAM: [OK] * 6}
    rank.fill(range(6), keys[1:] + keys[:1])
    targets = [5, 3, 0, 7, 1, 2]
    assert rank.run(rank.orders.reload(keys, targets, [7, 0, 3, 2, 5, 4])) == {HBM: [OK] * 6}
    assert all(map(rank.holds, targets, keys))
    assert_at_rest(rank)


@each_layout
@each_copier
def test_chain_through_a_store_is_bit_exact(layout, make_copier):
    rank = FakeRank(layout, 8, memory("m", "n"), make_copier=make_copier)
    keys = mixed_keys(layout, 6)
    rank.fill(range(6), keys)
    answers = rank.run(rank.orders.offload(keys, range(6), range(6), targets=0b11))
    assert answers == {DRAM: [OK] * 6, "m": [OK] * 6, "n": [OK] * 6}
    rank.fill(range(6), keys[::-1])
    for source in (1, 2):
        targets = [(block + source) % 8 for block in range(6)]
        reload = rank.orders.reload(keys, targets, sources=source, window=[6, 7])
        assert rank.run(reload) == {HBM: [OK] * 6}
        assert all(map(rank.holds, targets, keys))
    assert_at_rest(rank)


@each_layout
def test_demotion_writes_what_the_slot_holds(layout):
    rank = FakeRank(layout, 8, memory("m"))
    keys = mixed_keys(layout, 4)
    rank.fill(range(4), keys)
    rank.run(rank.orders.offload(keys, range(4), range(4)))
    rank.fill(range(4), mixed_keys(layout, 8)[4:])
    assert rank.run(rank.orders.demote(keys, range(4))) == {"m": [OK] * 4}
    assert rank.run(rank.orders.reload(keys, range(4), sources=1, window=[7])) == {HBM: [OK] * 4}
    assert all(map(rank.holds, range(4), keys))


def test_rows_go_to_the_stores_that_they_name():
    rank = FakeRank(None, 8, memory("m", "n"))
    keys = keys_of(1, 2, 3, 4)
    rank.fill(range(4), keys)
    order = rank.orders.offload(keys, range(4), range(4))
    order.targets[:] = [0b00, 0b01, 0b10, 0b11]
    assert rank.run(order) == {DRAM: [OK] * 4, "m": [OK] * 4, "n": [OK] * 4}
    assert set(rank.stores["m"].keys()) == {rank.name(keys[1]), rank.name(keys[3])}
    assert set(rank.stores["n"].keys()) == {rank.name(keys[2]), rank.name(keys[3])}


def test_only_the_last_answer_of_a_job_is_the_last():
    rank = FakeRank(None, 8, memory("m", "n"))
    rank.fill([0], keys_of(1))
    job = rank.submit(rank.orders.offload(keys_of(1), [0], [0], targets=0b11))
    rank.settle()
    assert [c.last for c in rank.completions(job)] == [False, False, True]


@pytest.mark.parametrize("kind", ["offload", "reload"])
def test_empty_order_is_answered(kind):
    rank = FakeRank()
    order = getattr(rank.orders, kind)([], [], [])
    [answer] = rank.run(order).values()
    assert answer == []
    assert_at_rest(rank)


# Staging


def stored(rank: FakeRank, num: int) -> list[bytes]:
    """Put frames of `num` blocks into store 1 through slot 0."""
    keys = keys_of(*range(num))
    for key in keys:
        rank.fill([0], [key])
        rank.run(rank.orders.offload([key], [0], [0], targets=1))
    return keys


def test_window_of_one_slot_brings_a_thousand_blocks():
    rank = FakeRank(make_layout(1001, [[64]]), 4, memory("m"))
    keys = stored(rank, 1000)
    order = rank.orders.reload(keys, range(1, 1001), sources=1, window=[2])
    assert rank.run(order) == {HBM: [OK] * 1000}
    assert all(map(rank.holds, range(1, 1001), keys))
    assert_at_rest(rank)


def test_two_jobs_at_once_finish_in_a_slab_of_four_slots():
    rank = FakeRank(make_layout(600, [[64]]), 4, memory("m"))
    keys = stored(rank, 200)
    first = rank.submit(rank.orders.reload(keys, range(1, 201), sources=1, window=[0, 1]))
    second = rank.submit(rank.orders.reload(keys, range(300, 500), sources=1, window=[2, 3]))
    rank.settle()
    assert rank.outcomes(first) == rank.outcomes(second) == {HBM: [OK] * 200}
    assert all(map(rank.holds, range(1, 201), keys))
    assert all(map(rank.holds, range(300, 500), keys))


def test_job_waiting_for_its_window_holds_no_other_job_up():
    rank = FakeRank(None, 4, memory("m"))
    keys = stored(rank, 4)
    waiting = rank.submit(rank.orders.reload(keys[:1], [1], sources=1, window=[]))
    served = rank.submit(rank.orders.reload(keys[1:3], [2, 3], sources=1, window=[3]))
    rank.settle()
    assert rank.outcomes(served) == {HBM: [OK] * 2}
    assert rank.outcomes(waiting) == {}


def test_waiting_for_a_window_is_no_work():
    """The thread sleeps, and the store is not asked for nothing."""
    rank = FakeRank(None, 4, memory("m"))
    rank.submit(rank.orders.reload(keys_of(1), [1], sources=1, window=[]))
    assert rank.advance(3) is False
    assert rank.stores["m"].poll() == []


def test_promoted_row_stays_in_its_slot():
    rank = FakeRank(None, 4, memory("m"))
    keys = stored(rank, 3)
    order = rank.orders.reload(keys, [1, 2, 3], [1, NO_SLOT, 2], [1, 1, 1], window=[3])
    assert rank.run(order) == {HBM: [OK] * 3}
    rank.fill([1, 2, 3], keys_of(7, 8, 9))
    again = rank.orders.reload([keys[0], keys[2]], [4, 5], [1, 2])
    assert rank.run(again) == {HBM: [OK] * 2}
    assert rank.holds(4, keys[0])
    assert rank.holds(5, keys[2])


def test_sources_are_mixed_within_a_job():
    rank = FakeRank(None, 8, memory("m", "n"))
    keys = keys_of(1, 2, 3)
    rank.fill([0, 1, 2], keys)
    order = rank.orders.offload(keys, [0, 1, 2], [0, 1, 2])
    order.targets[:] = [0, 1, 2]
    rank.run(order)
    rank.fill([0, 1, 2], keys_of(4, 5, 6))
    reload = rank.orders.reload(keys, [5, 6, 7], [0, NO_SLOT, NO_SLOT], [0, 1, 2], window=[7])
    assert rank.run(reload) == {HBM: [OK] * 3}
    assert all(map(rank.holds, [5, 6, 7], keys))


# What a slot holds


def test_slot_that_holds_another_key_is_stale():
    rank = FakeRank()
    rank.fill([0, 1], keys_of(1, 2))
    rank.run(rank.orders.offload(keys_of(1, 2), [0, 1], [0, 1]))
    before = rank.payload(5)
    assert rank.run(rank.orders.reload(keys_of(1, 2), [5, 6], [1, 1])) == {HBM: [Outcome.STALE, OK]}
    assert (rank.payload(5) == before).all()
    assert rank.holds(6, key_of(2))


def test_slot_never_filled_is_stale_and_row_without_slot_is_missing():
    rank = FakeRank()
    order = rank.orders.reload(keys_of(1, 2), [0, 1], [3, NO_SLOT])
    assert rank.run(order) == {HBM: [Outcome.STALE, Outcome.MISSING]}


def test_demotion_of_what_the_slot_does_not_hold_is_stale_and_writes_nothing():
    rank = FakeRank(None, 8, memory("m"))
    rank.fill([0], keys_of(1))
    rank.run(rank.orders.offload(keys_of(1), [0], [0]))
    demote = rank.orders.demote(keys_of(2, 1, 3), [0, 0, 4])
    assert rank.run(demote) == {"m": [Outcome.STALE, OK, Outcome.STALE]}
    assert rank.stores["m"].keys() == [rank.name(key_of(1))]
    assert_at_rest(rank)


def test_window_slot_no_longer_holds_what_it_held():
    rank = FakeRank(None, 4, memory("m"))
    keys = stored(rank, 2)
    rank.fill([0], keys_of(50))
    rank.run(rank.orders.offload(keys_of(50), [0], [2]))
    rank.run(rank.orders.reload(keys, [1, 2], sources=1, window=[2]))
    assert rank.run(rank.orders.reload(keys_of(50), [3], [2])) == {HBM: [Outcome.STALE]}


def test_slot_being_filled_anew_is_not_served_as_what_it_was():
    rank = FakeRank()
    rank.fill([0], keys_of(1))
    rank.run(rank.orders.offload(keys_of(1), [0], [0]))
    rank.fill([0], keys_of(2))
    rank.submit(rank.orders.offload(keys_of(2), [0], [0]))
    reload = rank.submit(rank.orders.reload(keys_of(1), [5], [0]))
    rank.settle()
    assert rank.outcomes(reload) == {HBM: [Outcome.STALE]}


def test_slot_ordered_twice_holds_what_was_ordered_last():
    """Which nobody should do; but then the first frame does not pass for the second."""
    rank = FakeRank()
    rank.fill([0, 1], keys_of(1, 2))
    rank.submit(rank.orders.offload(keys_of(1), [0], [0]))
    rank.submit(rank.orders.offload(keys_of(2), [1], [0]))
    reload = rank.submit(rank.orders.reload(keys_of(2), [5], [0]))
    rank.advance(2)
    rank.device.step(Direction.GATHER)
    rank.advance(2)
    rank.device.step(Direction.SCATTER)
    rank.settle()
    assert rank.outcomes(reload) == {HBM: [OK]}
    assert rank.holds(5, key_of(2))


# Chained on what has not landed


@pytest.mark.parametrize("turns", range(6))
def test_reload_chained_on_an_offload_that_has_not_landed_gets_its_bytes(turns):
    rank = FakeRank()
    rank.fill([0, 1], keys_of(1, 2))
    rank.submit(rank.orders.offload(keys_of(1, 2), [0, 1], [0, 1]))
    rank.advance(turns)
    reload = rank.submit(rank.orders.reload(keys_of(1, 2), [5, 6], [0, 1]))
    rank.advance(2)
    assert rank.outcomes(reload) == {}
    rank.settle()
    assert rank.outcomes(reload) == {HBM: [OK] * 2}
    assert rank.holds(5, key_of(1))
    assert rank.holds(6, key_of(2))


def test_reload_chained_on_a_promotion_gets_its_bytes():
    rank = FakeRank(None, 4, memory("m"))
    keys = stored(rank, 1)
    rank.submit(rank.orders.reload(keys, [1], [2], 1))
    chained = rank.submit(rank.orders.reload(keys, [3], [2]))
    rank.settle()
    assert rank.outcomes(chained) == {HBM: [OK]}
    assert rank.holds(3, keys[0])


def test_reload_chained_on_an_offload_that_fails_is_stale():
    rank = FakeRank()
    rank.fill([0], keys_of(1))
    rank.device.fail_copy(OSError("bus error"))
    offload = rank.submit(rank.orders.offload(keys_of(1), [0], [0]))
    reload = rank.submit(rank.orders.reload(keys_of(1), [5], [0]))
    before = rank.payload(5)
    rank.settle()
    assert rank.outcomes(offload) == {DRAM: [Outcome.FAILED]}
    assert rank.outcomes(reload) == {HBM: [Outcome.STALE]}
    assert (rank.payload(5) == before).all()
    assert_at_rest(rank)


# R37: one clean replay proves nothing


@each_copier
@pytest.mark.parametrize("seed", range(2))
def test_five_hundred_random_cycles_swap_no_byte(make_copier, seed):
    chance = random.Random(seed)
    layout = make_layout(12, [[96, 640], [4098]])
    rank = FakeRank(layout, 12, memory("m", capacity=150_000), make_copier=make_copier)
    store = rank.stores["m"]
    in_slot = {}
    for _ in range(500):
        num = chance.randrange(1, 6)
        keys = list({key_of(chance.randrange(40), chance.randrange(2)) for _ in range(num)})
        blocks = chance.sample(range(12), len(keys))
        slots = chance.sample(range(8), len(keys))
        action = chance.choice(["offload", "reload", "from store", "evict"])
        if action == "offload":
            rank.fill(blocks, keys)
            answers = rank.run(rank.orders.offload(keys, blocks, slots, chance.randrange(2)))
            assert answers[DRAM] == [OK] * len(keys)
            in_slot.update(zip(slots, keys, strict=True))
        elif action == "evict":
            store.delete([rank.name(key) for key in keys])
        else:
            source = int(action == "from store")
            window = [8, 9] if source else []
            places = None if source else slots
            order = rank.orders.reload(keys, blocks, places, source, window=window)
            [outcomes] = rank.run(order).values()
            there = {rank.name(key) for key in keys} & set(store.keys())
            for key, block, slot, outcome in zip(keys, blocks, slots, outcomes, strict=True):
                present = rank.name(key) in there if source else in_slot.get(slot) == key
                assert (outcome is OK) == present
                assert not present or rank.holds(block, key)
    assert_at_rest(rank)
