"""Corrupt frames and failing parts: time may be lost, bytes may not."""

from __future__ import annotations

import pytest
from ranks import (
    OK,
    ROOMY,
    assert_at_rest,
    memory,
    offloaded,
    rank_with_faulty_store,
    rank_with_held_store,
    release,
)

from kvtiers.data.memory_store import MemoryStore
from kvtiers.model.frame import FrameFormat
from kvtiers.model.messages import DRAM, HBM, RELEASED, Forget
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_device import make_layout
from kvtiers.testing.fake_rank import FakeRank, key_of, keys_of
from kvtiers.testing.faults import Flip
from kvtiers.testing.pattern import block_pattern

FAILED, STALE = Outcome.FAILED, Outcome.STALE


# Corruption

FORMAT = FrameFormat.of(make_layout().groups[0])


@pytest.mark.parametrize(
    "offset",
    [0, 4, 8, 12, 16, 24, 55, 56, 63, 64, 79, FORMAT.header_nbytes, FORMAT.frame_nbytes - 1],
)
@pytest.mark.parametrize("promoted", [False, True])
def test_flipped_byte_of_a_frame_is_corrupt_and_dropped(offset, promoted):
    rank, store = rank_with_faulty_store()
    keys = offloaded(rank, 0, 1, targets=1)
    before = rank.payload(5)
    store.fail("get", Flip(offset))
    place = {"slots": [4]} if promoted else {"window": [4]}
    assert rank.run(rank.orders.reload(keys[:1], [5], sources=1, **place)) == {
        HBM: [Outcome.CORRUPT]
    }
    assert (rank.payload(5) == before).all()
    assert store.keys() == [rank.name(keys[1])]
    assert rank.run(rank.orders.reload(keys[:1], [5], [4])) == {HBM: [STALE]}
    assert_at_rest(rank)


@pytest.mark.parametrize("offset", [80, FORMAT.header_nbytes - 1])
def test_padding_of_the_header_carries_no_meaning(offset):
    rank, store = rank_with_faulty_store()
    keys = offloaded(rank, 0, targets=1)
    store.fail("get", Flip(offset))
    assert rank.run(rank.orders.reload(keys, [5], sources=1, window=[4])) == {HBM: [OK]}
    assert rank.holds(5, keys[0])


def test_corrupt_frame_stops_nobody_else():
    rank, store = rank_with_faulty_store(num_slots=4)
    keys = offloaded(rank, 0, 1, 2, targets=1)
    store.fail("get", Flip(FORMAT.header_nbytes), on=2)
    order = rank.orders.reload(keys, [3, 4, 5], sources=1, window=[3])  # a get per block
    assert rank.run(order) == {HBM: [OK, Outcome.CORRUPT, OK]}


def test_frame_of_another_key_is_corrupt():
    rank = FakeRank(make_stores=lambda slab: {"m": MisfilingStore(slab, ROOMY)})
    keys = offloaded(rank, 0, 1, targets=1)
    rank.stores["m"].swap = dict(zip(map(rank.name, keys), map(rank.name, keys[::-1]), strict=True))
    before = rank.payload(5)
    order = rank.orders.reload(keys[:1], [5], sources=1, window=[4])
    assert rank.run(order) == {HBM: [Outcome.CORRUPT]}
    assert (rank.payload(5) == before).all()


class MisfilingStore(MemoryStore):
    """Brings the frame of another key."""

    swap: dict = {}

    def get(self, frames):
        swapped = [type(f)(self.swap.get(f.key, f.key), f.slot, f.nbytes) for f in frames]
        return super().get(swapped)


def test_store_that_claims_to_have_brought_what_it_did_not_is_not_believed():
    """R33: a failed load counted as loaded; the slot holds an earlier frame."""
    rank, store = rank_with_faulty_store()
    keys = offloaded(rank, 0, 1, targets=1)
    rank.run(rank.orders.reload(keys[:1], [5], sources=1, window=[4]))
    store.fail("get", OK)
    before = rank.payload(6)
    order = rank.orders.reload(keys[1:], [6], sources=1, window=[4])
    assert rank.run(order) == {HBM: [Outcome.CORRUPT]}
    assert (rank.payload(6) == before).all()


def test_frame_of_another_size_is_dropped():
    rank, store = rank_with_faulty_store()
    keys = offloaded(rank, 0, targets=1)
    store.fail("get", Outcome.CORRUPT)
    order = rank.orders.reload(keys, [5], sources=1, window=[4])
    assert rank.run(order) == {HBM: [Outcome.CORRUPT]}
    assert store.keys() == []


@pytest.mark.parametrize("offset", [24, FORMAT.header_nbytes, FORMAT.frame_nbytes - 1])
@pytest.mark.parametrize("verify", [False, True])
def test_flip_in_the_slab_is_seen_where_all_is_verified(offset, verify):
    rank = FakeRank(verify_dram=verify)
    keys = offloaded(rank, 0, 1)
    rank.slab.view(0)[offset] ^= 1
    before = rank.payload(5)
    order = rank.orders.reload(keys, [5, 6], [0, 1])
    assert rank.run(order) == {HBM: [Outcome.CORRUPT if verify else OK, OK]}
    assert rank.holds(6, keys[1])
    if verify:
        assert (rank.payload(5) == before).all()
        assert rank.run(rank.orders.reload(keys[:1], [5], [0])) == {HBM: [STALE]}


def test_flip_in_the_slab_of_a_verified_block_does_not_reach_hbm_through_a_store():
    rank = FakeRank(None, 8, memory("m"), verify_dram=True)
    keys = offloaded(rank, 0)
    rank.slab.view(0)[FORMAT.header_nbytes] ^= 1
    rank.run(rank.orders.demote(keys, [0]))
    order = rank.orders.reload(keys, [5], sources=1, window=[4])
    assert rank.run(order) == {HBM: [Outcome.CORRUPT]}


# Parts that fail


@pytest.mark.parametrize("error", [OSError(28, "no space"), ValueError("bug"), MemoryError()])
@pytest.mark.parametrize("verb", ["put", "get"])
def test_store_that_raises_fails_one_batch(verb, error):
    """R60, R33: an exception of any kind in the 3rd of 100 batches."""
    rank, store = rank_with_faulty_store()
    num = 100
    puts, gets = [], []
    store.fail(verb, error, on=3)
    for n in range(num):
        rank.fill([0], keys_of(n))
        puts.append(rank.run(rank.orders.offload(keys_of(n), [0], [0], 1))["m"][0])
    for n in range(num):
        order = rank.orders.reload(keys_of(n), [5], sources=1, window=[4])
        gets.append(rank.run(order)[HBM][0])
        assert (gets[-1] is OK) == rank.holds(5, key_of(n))
    failed = FAILED if verb == "get" else Outcome.MISSING
    assert puts == [OK, OK, FAILED if verb == "put" else OK] + [OK] * (num - 3)
    assert gets == [OK, OK, failed] + [OK] * (num - 3)
    assert_at_rest(rank)


def test_batches_after_a_failed_one_are_tried():
    """R61: 4 batches of one job, the 2nd fails."""
    rank, store = rank_with_faulty_store(num_slots=256, layout=make_layout(256, [[64]]))
    keys = keys_of(*range(256))
    rank.fill(range(256), keys)
    store.fail("put", OSError(5, "EIO"), on=2)
    outcomes = rank.run(rank.orders.offload(keys, range(256), range(256), 1))["m"]
    assert store.calls["put"] == 4
    assert outcomes == [OK] * 64 + [FAILED] * 64 + [OK] * 128
    assert set(store.keys()) == {
        rank.name(k) for k, o in zip(keys, outcomes, strict=True) if o is OK
    }


@pytest.mark.parametrize("outcome", [Outcome.FULL, FAILED])
def test_failed_put_is_reported_and_its_block_stays_in_dram(outcome):
    rank, store = rank_with_faulty_store()
    rank.fill([0], keys_of(1))
    store.fail("put", outcome)
    answers = rank.run(rank.orders.offload(keys_of(1), [0], [0], 1))
    assert answers == {DRAM: [OK], "m": [outcome]}
    assert rank.run(rank.orders.reload(keys_of(1), [5], [0])) == {HBM: [OK]}


@pytest.mark.parametrize("verb", ["poll", "delete", "clear", "close"])
def test_store_that_raises_elsewhere_holds_nothing_up(verb):
    rank, store = rank_with_faulty_store()
    store.fail(verb, RuntimeError("bug"))
    keys = offloaded(rank, 0, targets=1)
    rank.executor.forget(Forget.of("m", keys_of(77)))
    assert rank.run(rank.orders.reload(keys, [5], [0])) == {HBM: [OK]}
    rank.executor.enter(1, 1)
    rank.settle()
    rank.close()


@pytest.mark.parametrize("error", [OSError("bus error"), RuntimeError("launch failure")])
@pytest.mark.parametrize("when", ["submit", "copy"])
def test_failed_copy_fails_its_rows_and_no_other(when, error):
    """R33: an H2D error is a failed block."""
    rank = FakeRank()
    keys = offloaded(rank, 0, 1)
    fail = rank.device.fail_submit if when == "submit" else rank.device.fail_copy
    fail(error)
    assert rank.run(rank.orders.reload(keys, [5, 6], [0, 1])) == {HBM: [FAILED] * 2}
    assert rank.run(rank.orders.reload(keys, [5, 6], [0, 1])) == {HBM: [OK] * 2}
    fail(error)
    rank.fill([2], keys_of(2))
    assert rank.run(rank.orders.offload(keys_of(2), [2], [2])) == {DRAM: [FAILED]}
    assert rank.run(rank.orders.reload(keys_of(2), [7], [2])) == {HBM: [STALE]}
    assert_at_rest(rank)


# An error that nobody foresaw


def test_fail_all_answers_everything_and_drains_copies():
    rank, store = rank_with_held_store(num_slots=16, layout=make_layout(16, [[64]]))
    keys = offloaded(rank, 0, 1, targets=1)
    ready = offloaded(rank, 2)
    fetching = rank.submit(rank.orders.reload(keys[:1], [8], [9], 1))
    waiting = rank.submit(rank.orders.reload(keys[1:], [10], sources=1, window=[]))
    copying = rank.submit(rank.orders.reload(ready, [11], [2]))
    rank.advance(4)
    reading = rank.submit(rank.orders.offload(keys_of(4), [4], [4], 1))
    rank.advance(1)
    jobs = fetching, waiting, copying, reading
    assert [rank.outcomes(job) for job in jobs] == [{}] * 4
    assert rank.device.num_tickets == 2

    rank.executor.fail_all()
    rank.advance(2)
    assert [rank.outcomes(job) for job in jobs[:3]] == [{HBM: [FAILED]}] * 3
    assert rank.outcomes(reading) == {DRAM: [FAILED], "m": [FAILED]}
    assert rank.device.num_tickets == 0
    assert store.held_slots == {9}
    assert not rank.executor.idle, "the store still owns a slot"
    release(rank)
    assert rank.completions(fetching)[-1].hop == RELEASED
    assert_at_rest(rank)
    assert rank.run(rank.orders.reload(ready, [12], [2])) == {HBM: [OK]}


def test_error_before_the_store_was_asked_leaves_no_slot_behind(monkeypatch):
    rank, store = rank_with_faulty_store()
    keys = offloaded(rank, 0, targets=1)
    job = rank.submit(rank.orders.reload(keys, [5], [4], 1))
    monkeypatch.setattr(rank.key_space, "name", lambda key: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        rank.advance()
    monkeypatch.undo()
    rank.executor.fail_all()
    rank.settle()
    assert store.calls["get"] == 0
    assert [(c.hop, c.last) for c in rank.completions(job)] == [(HBM, True)]
    assert_at_rest(rank)


def test_fail_all_leaves_a_write_with_its_store():
    rank, _ = rank_with_held_store()
    rank.fill([0], keys_of(1))
    job = rank.submit(rank.orders.offload(keys_of(1), [0], [0], 1))
    rank.settle()
    rank.executor.fail_all()
    rank.settle()
    assert rank.outcomes(job) == {DRAM: [OK]}
    release(rank)
    assert rank.outcomes(job) == {DRAM: [OK], "m": [OK]}
    assert_at_rest(rank)


def test_close_answers_what_is_left_and_releases_the_parts():
    rank, store = rank_with_faulty_store()
    keys = offloaded(rank, 0)
    running = rank.submit(rank.orders.reload(keys, [5], [0]))
    rank.advance()
    queued = rank.submit(rank.orders.offload(keys_of(1), [1], [1]))
    rank.close()
    rank.answers += rank.executor.poll()
    assert rank.outcomes(running) == {HBM: [FAILED]}
    assert rank.outcomes(queued) == {DRAM: [FAILED]}
    assert rank.holds(5, keys[0]), "the copy that ran was waited for"
    assert store.calls["close"] == 1
    rank.close()
    assert store.calls["close"] == 1


def test_patterns_of_two_blocks_layers_and_ranks_differ():
    """Else no test here could see a swap."""
    group = make_layout(8, [[96, 96]]).groups[0]
    first = block_pattern(key_of(1), group)
    assert not (first == block_pattern(key_of(2), group)).all()
    assert not (first[:96] == first[96:]).all()
