"""Promotions: store to slot, for reloads that come later, or to see whether the store answers."""

from __future__ import annotations

import pytest
from ranks import OK, assert_at_rest, offloaded, rank_with_faulty_store, rank_with_held_store

from kvtiers.data.load_lane import MAX_FRAMES_PROMOTED
from kvtiers.model.messages import DRAM, HBM, RELEASED
from kvtiers.model.outcome import Outcome
from kvtiers.testing.faults import Flip


def stored(rank, *numbers):
    """Blocks that only the store has."""
    keys = offloaded(rank, *numbers, targets=1)
    for slot in numbers:
        rank.shop.slots.vacate(slot)
    return keys


def test_a_promoted_block_is_reloaded_from_its_slot_without_the_store():
    rank, store = rank_with_faulty_store()
    keys = stored(rank, 0, 1, 2)
    assert rank.run(rank.orders.promote(keys, [5, 3, 4])) == {DRAM: [OK] * 3}
    gets = store.calls["get"]
    assert rank.run(rank.orders.reload(keys, [0, 1, 2], [5, 3, 4])) == {HBM: [OK] * 3}
    assert all(map(rank.holds, [0, 1, 2], keys))
    assert store.calls["get"] == gets
    assert_at_rest(rank)


def test_a_reload_waits_for_the_blocks_that_a_promotion_is_bringing():
    rank, store = rank_with_held_store()
    keys = stored(rank, 0, 1)
    promote = rank.submit(rank.orders.promote(keys, [4, 5]))
    reload = rank.submit(rank.orders.reload(keys, [0, 1], [4, 5]))
    rank.settle()
    assert rank.outcomes(reload) == {}
    assert len(store.held_frames[0]) == 2  # read once, for both
    assert store.num_held == 1
    store.release()
    rank.settle()
    assert rank.outcomes(promote) == {DRAM: [OK] * 2}
    assert rank.outcomes(reload) == {HBM: [OK] * 2}
    assert all(map(rank.holds, [0, 1], keys))
    assert_at_rest(rank)


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (Outcome.MISSING, Outcome.MISSING),
        (OSError("EIO"), Outcome.FAILED),
        (Flip(4096), Outcome.CORRUPT),
    ],
)
def test_a_failed_promotion_fails_the_reload_that_waited_for_it(fault, outcome):
    rank, store = rank_with_faulty_store()
    keys = stored(rank, 0)
    store.fail("get", fault)
    promote = rank.submit(rank.orders.promote(keys, [4]))
    reload = rank.submit(rank.orders.reload(keys, [0], [4]))
    rank.settle()
    assert rank.outcomes(promote) == {DRAM: [outcome]}
    assert rank.outcomes(reload) == {HBM: [Outcome.STALE]}
    assert not rank.holds(0, keys[0])
    assert_at_rest(rank)


def test_what_goes_through_the_window_is_read_verified_and_dropped():
    rank, store = rank_with_faulty_store()
    keys = stored(rank, 0, 1)
    assert rank.run(rank.orders.promote(keys, window=[6])) == {DRAM: [OK] * 2}
    store.fail("get", Flip(4096), on=store.calls["get"] + 1)
    assert rank.run(rank.orders.promote(keys[:1], window=[6])) == {DRAM: [Outcome.CORRUPT]}
    assert_at_rest(rank)


def test_a_reload_overtakes_promotions_in_the_queue_of_a_store():
    rank, store = rank_with_held_store(num_slots=80)
    keys = stored(rank, 0, 1)
    many = [keys[0]] * (3 * MAX_FRAMES_PROMOTED)
    promote = rank.orders.promote(many, list(range(10, 10 + len(many))))
    rank.submit(promote)
    rank.settle()
    assert sum(map(len, store.held_frames)) == MAX_FRAMES_PROMOTED
    reload = rank.submit(rank.orders.reload(keys[1:], [5], [70], 1))
    rank.settle()
    assert [len(frames) for frames in store.held_frames][-1] == 1
    store.release(1, newest_first=True)
    rank.settle()
    assert rank.outcomes(reload) == {HBM: [OK]}
    while store.release():
        rank.settle()
    assert rank.outcomes(promote.job_id) == {DRAM: [OK] * len(many)}
    assert_at_rest(rank)


def test_a_reload_that_comes_with_a_promotion_goes_first():
    rank, store = rank_with_held_store()
    keys = stored(rank, 0, 1)
    rank.submit(rank.orders.promote(keys[:1], [4]))
    rank.submit(rank.orders.reload(keys[1:], [5], [6], 1))
    rank.settle()
    assert [frames[0].slot for frames in store.held_frames] == [6, 4]
    while store.release():
        rank.settle()
    assert_at_rest(rank)


def test_a_store_that_hangs_times_a_promotion_out_and_its_slots_come_back_later():
    rank, store = rank_with_held_store()
    keys = stored(rank, 0)
    job = rank.submit(rank.orders.promote(keys, [4], deadline=1.0))
    rank.settle()
    rank.clock.advance(2.0)
    rank.settle()
    assert rank.outcomes(job) == {DRAM: [Outcome.TIMED_OUT]}
    assert not rank.completions(job)[-1].last
    store.release()
    rank.settle()
    assert [c.hop for c in rank.completions(job)] == [DRAM, RELEASED]
    assert rank.completions(job)[-1].last
    assert_at_rest(rank)


def test_an_epoch_voids_a_promotion():
    rank, store = rank_with_held_store()
    keys = stored(rank, 0)
    job = rank.submit(rank.orders.promote(keys, [4]))
    rank.settle()
    rank.executor.enter(1, 1)
    store.release()
    rank.settle()
    assert rank.outcomes(job) == {DRAM: [Outcome.STALE]}
    assert_at_rest(rank)
