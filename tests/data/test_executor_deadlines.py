"""Deadlines and epochs: what comes too late changes nothing."""

from __future__ import annotations

import pytest
from ranks import (
    OK,
    assert_at_rest,
    memory,
    offloaded,
    rank_with_faulty_store,
    rank_with_held_store,
    release,
)

from kvtiers.data.copier import Direction
from kvtiers.model.messages import DRAM, HBM, RELEASED
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_device import make_layout
from kvtiers.testing.fake_rank import FakeRank, keys_of

LATE, STALE = Outcome.TIMED_OUT, Outcome.STALE


# Deadlines


def test_rows_not_begun_by_the_deadline_are_timed_out_and_leave_their_targets():
    rank = FakeRank(piece_nbytes=1)
    keys = offloaded(rank, 0, 1, 2)
    before = [rank.payload(block) for block in (5, 6, 7)]
    job = rank.submit(rank.orders.reload(keys, [5, 6, 7], [0, 1, 2], deadline=5.0))
    rank.advance()  # a piece is one block
    rank.clock.advance(5.0)
    rank.settle()
    assert rank.outcomes(job) == {HBM: [OK, LATE, LATE]}
    assert rank.holds(5, keys[0])
    assert [(rank.payload(b) == old).all() for b, old in zip((6, 7), before[1:], strict=True)] == [
        True,
        True,
    ]
    assert_at_rest(rank)


def test_deadline_is_not_early():
    rank = FakeRank(None, 8, memory("m"))
    job = rank.submit(rank.orders.reload(keys_of(1), [0], sources=1, window=[], deadline=5.0))
    rank.clock.advance(4.999)
    rank.settle()
    assert rank.outcomes(job) == {}
    rank.clock.advance(0.001)
    rank.settle()
    assert rank.outcomes(job) == {HBM: [LATE]}


def test_offload_not_begun_by_the_deadline_leaves_its_slots():
    rank = FakeRank(None, 8, memory("m"), piece_nbytes=1)
    rank.fill([0, 1], keys_of(1, 2))
    job = rank.submit(rank.orders.offload(keys_of(1, 2), [0, 1], [0, 1], 1, deadline=5.0))
    rank.advance()
    rank.clock.advance(5.0)
    before = bytes(rank.slab.view(1))
    rank.settle()
    assert rank.outcomes(job) == {DRAM: [OK, LATE], "m": [LATE, LATE]}
    assert bytes(rank.slab.view(1)) == before
    assert_at_rest(rank)


def test_copy_that_runs_is_waited_for_past_the_deadline():
    """Its block cannot be given back while a copy may still write it."""
    rank = FakeRank()
    keys = offloaded(rank, 0)
    job = rank.submit(rank.orders.reload(keys, [5], [0], deadline=1.0))
    rank.advance()
    rank.clock.advance(100.0)
    rank.advance(3)
    assert rank.outcomes(job) == {}
    rank.settle()
    assert rank.outcomes(job) == {HBM: [OK]}


def test_frame_that_arrived_but_was_not_copied_by_the_deadline_is_timed_out():
    rank, store = rank_with_held_store(piece_nbytes=1)
    keys = offloaded(rank, 0, 1, 2, targets=1)
    other = rank.submit(rank.orders.reload(keys[:2], [3, 4], [0, 1]))  # keeps the lane busy
    job = rank.submit(rank.orders.reload(keys[2:], [5], sources=1, window=[7], deadline=1.0))
    rank.advance(3)
    store.release()
    rank.clock.advance(1.0)
    before = rank.payload(5)
    rank.settle()
    assert rank.outcomes(job) == {HBM: [LATE]}
    assert rank.outcomes(other) == {HBM: [OK, OK]}
    assert (rank.payload(5) == before).all()


@pytest.mark.parametrize("promoted", [False, True])
def test_hung_get_is_answered_at_the_deadline_and_released_when_it_answers(promoted):
    rank, store = rank_with_held_store()
    keys = offloaded(rank, 0, targets=1)
    place = {"slots": [4]} if promoted else {"window": [4]}
    job = rank.submit(rank.orders.reload(keys, [5], sources=1, deadline=1.0, **place))
    rank.settle()
    before = rank.payload(5)
    rank.clock.advance(1.0)
    rank.settle()
    assert rank.outcomes(job) == {HBM: [LATE]}
    assert [c.last for c in rank.completions(job)] == [False]
    assert store.held_slots == {4}

    store.release()
    rank.settle()
    assert [(c.hop, c.last) for c in rank.completions(job)] == [(HBM, False), (RELEASED, True)]
    assert (rank.payload(5) == before).all()
    again = rank.orders.reload(keys, [6], [4])
    assert rank.run(again) == {HBM: [STALE]}, "a late frame is not to be found in its slot"
    assert_at_rest(rank)


def test_slot_of_a_hung_get_is_not_recycled_within_its_window():
    rank, store = rank_with_held_store()
    keys = offloaded(rank, 0, 1, 2, targets=1)
    rank.submit(rank.orders.reload(keys, [3, 4, 5], sources=1, window=[6, 7]))
    for _ in range(3):
        rank.settle()
        held = [frame.slot for frames in store.held_frames for frame in frames]
        assert len(held) == len(set(held))
        store.release(1, newest_first=True)
    rank.settle()
    release(rank)
    assert all(map(rank.holds, [3, 4, 5], keys))


def test_hung_put_holds_no_load_up():
    rank, store = rank_with_held_store(num_slots=80, layout=make_layout(80, [[64]]))
    keys = keys_of(*range(70))
    rank.fill(range(70), keys)
    offload = rank.submit(rank.orders.offload(keys, range(70), range(70), targets=1))
    rank.settle()
    assert rank.outcomes(offload) == {DRAM: [OK] * 70}
    reload = rank.submit(rank.orders.reload(keys[:1], [75], sources=1, window=[75]))
    rank.settle()
    assert 75 in store.held_slots, "the get waits behind a full queue of puts"
    release(rank)
    assert rank.outcomes(reload) == {HBM: [OK]}


def test_store_has_a_bounded_number_of_frames_to_bring():
    rank, store = rank_with_held_store(num_slots=200, layout=make_layout(200, [[64]]))
    keys = keys_of(*range(100))
    job = rank.submit(rank.orders.reload(keys, range(100), sources=1, window=range(100, 200)))
    rank.settle()
    assert len(store.held_slots) == 64
    release(rank)
    assert rank.outcomes(job) == {HBM: [Outcome.MISSING] * 100}


def test_put_that_has_not_begun_by_the_deadline_is_timed_out():
    rank, _ = rank_with_held_store(num_slots=80, layout=make_layout(80, [[64]]))
    keys = keys_of(*range(70))
    rank.fill(range(70), keys)
    job = rank.submit(rank.orders.offload(keys, range(70), range(70), targets=1, deadline=1.0))
    rank.settle()
    rank.clock.advance(1.0)
    rank.settle()
    release(rank)
    assert rank.outcomes(job)["m"] == [OK] * 64 + [LATE] * 6


# Epochs


def test_reload_of_an_earlier_epoch_is_stale_even_if_its_bytes_arrived():
    rank = FakeRank()
    keys = offloaded(rank, 0)
    job = rank.submit(rank.orders.reload(keys, [5], [0]))
    rank.advance()
    rank.device.settle()
    rank.executor.enter(1, 1)
    rank.settle()
    assert rank.outcomes(job) == {HBM: [STALE]}


def test_reload_in_a_store_when_the_epoch_ends_is_stale_and_released_later():
    rank, store = rank_with_held_store()
    keys = offloaded(rank, 0, targets=1)
    job = rank.submit(rank.orders.reload(keys, [5], [4], 1))
    rank.settle()
    before = rank.payload(5)
    rank.executor.enter(1, 1)
    rank.settle()
    assert rank.outcomes(job) == {HBM: [STALE]}
    store.release()
    rank.settle()
    assert [(c.hop, c.last) for c in rank.completions(job)] == [(HBM, False), (RELEASED, True)]
    assert (rank.payload(5) == before).all()
    assert_at_rest(rank)


def test_frame_that_arrives_with_a_new_epoch_is_stale_and_not_called_corrupt(caplog):
    rank, store = rank_with_held_store()
    keys = offloaded(rank, 0, targets=1)
    job = rank.submit(rank.orders.reload(keys, [5], sources=1, window=[4]))
    rank.settle()
    store.release()
    rank.executor.enter(1, 1)
    rank.settle()
    assert rank.outcomes(job) == {HBM: [STALE]}
    assert "corrupt" not in caplog.text


@pytest.mark.parametrize("turns", range(5))
def test_slot_filled_in_an_earlier_epoch_is_not_served(turns):
    """Weights may have changed: the same key means other bytes now."""
    rank = FakeRank()
    rank.fill([0], keys_of(1))
    rank.submit(rank.orders.offload(keys_of(1), [0], [0]))
    for _ in range(turns):
        rank.advance()
        rank.device.step()
    rank.executor.enter(1, 1)
    reload = rank.submit(rank.orders.reload(keys_of(1), [5], [0], epoch=1))
    rank.settle()
    assert rank.outcomes(reload) == {HBM: [STALE]}
    assert_at_rest(rank)


def test_offload_of_an_earlier_epoch_is_stale_throughout():
    rank = FakeRank(None, 8, memory("m"))
    rank.fill([0], keys_of(1))
    rank.executor.enter(1, 1)
    before = bytes(rank.slab.view(0))
    assert rank.run(rank.orders.offload(keys_of(1), [0], [0], 1)) == {DRAM: [STALE], "m": [STALE]}
    assert rank.stores["m"].keys() == []
    assert bytes(rank.slab.view(0)) == before
    assert_at_rest(rank)


def test_gather_that_runs_into_a_new_epoch_is_stale():
    rank = FakeRank()
    job = rank.submit(rank.orders.offload(keys_of(1), [0], [0]))
    rank.advance()
    rank.executor.enter(1, 1)
    rank.settle()
    assert rank.outcomes(job) == {DRAM: [STALE]}


def test_gather_of_an_earlier_epoch_does_not_pass_for_one_of_this():
    """Same key, same slot, other weights: the reload waits for the new bytes."""
    rank = FakeRank()
    rank.submit(rank.orders.offload(keys_of(1), [0], [0]))  # of whatever block 0 held then
    rank.advance()
    rank.executor.enter(1, 1)
    rank.fill([1], keys_of(1))
    rank.submit(rank.orders.offload(keys_of(1), [1], [0], epoch=1))
    reload = rank.submit(rank.orders.reload(keys_of(1), [5], [0], epoch=1))
    rank.advance()
    rank.device.step(Direction.GATHER)  # the old one
    rank.advance()
    rank.device.step(Direction.SCATTER)
    rank.settle()
    assert rank.outcomes(reload) == {HBM: [OK]}
    assert rank.holds(5, keys_of(1)[0])


def test_new_epoch_empties_stores_and_changes_every_name():
    rank = FakeRank(None, 8, memory("m"))
    [key] = offloaded(rank, 0, targets=1)
    old = rank.name(key)
    assert rank.stores["m"].keys() == [old]
    rank.executor.enter(1, 1)
    rank.settle()
    assert rank.stores["m"].keys() == []
    rank.fill([0], [key])
    rank.run(rank.orders.offload([key], [0], [0], 1, epoch=1))
    assert rank.stores["m"].keys() == [rank.name(key)] != [old]


def test_store_that_cannot_be_emptied_serves_no_earlier_epoch():
    rank, store = rank_with_faulty_store()
    keys = offloaded(rank, 0, targets=1)
    store.fail("clear", OSError("read-only"))
    rank.executor.enter(1, 1)
    order = rank.orders.reload(keys, [5], sources=1, window=[4], epoch=1)
    assert rank.run(order) == {HBM: [Outcome.MISSING]}


def test_earlier_epoch_is_not_entered_again():
    rank = FakeRank()
    rank.executor.enter(2, 2)
    rank.executor.enter(1, 1)
    rank.fill([0], keys_of(1))
    assert rank.run(rank.orders.offload(keys_of(1), [0], [0], epoch=1)) == {DRAM: [STALE]}
