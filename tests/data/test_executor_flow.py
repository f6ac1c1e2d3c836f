"""Loads flow: what a store has brought goes on to HBM while it brings the rest."""

from __future__ import annotations

import pytest

from kvtiers.data.memory_store import MemoryStore
from kvtiers.data.portions import MAX_FRAMES_IN_STORE, PORTIONS, Portions
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_device import make_layout
from kvtiers.testing.fake_rank import FakeRank, keys_of
from kvtiers.testing.faults import HeldStore

OK = Outcome.OK
NUM_BLOCKS = 2 * MAX_FRAMES_IN_STORE


def rank_with(num_slots, page_nbytes=96, num_blocks=NUM_BLOCKS, **options):
    """A rank whose held store has all blocks; the engine's are wiped."""
    layout = make_layout(num_blocks, [[page_nbytes]])
    rank = FakeRank(
        layout, num_slots, lambda slab: {"m": HeldStore(MemoryStore(slab, 2**28))}, **options
    )
    keys, blocks = keys_of(*range(num_blocks)), list(range(num_blocks))
    rank.fill(blocks, keys)
    for first in range(0, num_blocks, num_slots):
        part = slice(first, first + num_slots)
        slots = range(len(keys[part]))
        rank.submit(rank.orders.offload(keys[part], blocks[part], slots, targets=1))
        rank.settle()
        while rank.stores["m"].release():
            rank.settle()
    rank.fill(blocks, keys_of(*(1000 + n for n in blocks)))
    rank.answers.clear()
    return rank, rank.stores["m"], keys


def arrived(rank, keys):
    """The blocks that HBM holds."""
    return [block for block, key in enumerate(keys) if rank.holds(block, key)]


def held(store):
    return [len(frames) for frames in store.held_frames]


@pytest.mark.parametrize("staged", [False, True])
def test_the_first_blocks_are_in_hbm_before_the_last_are_read(staged):
    """One portion is let go at a time: its blocks are in HBM before the next is, and the store
    always has as many under way as it may have."""
    rank, store, keys = rank_with(NUM_BLOCKS)
    blocks = list(range(NUM_BLOCKS))
    slots, window = (None, range(MAX_FRAMES_IN_STORE)) if staged else (blocks, ())
    job = rank.submit(rank.orders.reload(keys, blocks, slots, 1, window=window))
    rank.settle()
    portion = PORTIONS.max_frames
    assert portion <= MAX_FRAMES_IN_STORE // 4
    assert held(store) == [portion] * (MAX_FRAMES_IN_STORE // portion)
    for done in range(portion, NUM_BLOCKS + 1, portion):
        assert store.release(1) == 1
        rank.settle()
        assert arrived(rank, keys) == blocks[:done]
        assert sum(held(store)) == min(MAX_FRAMES_IN_STORE, NUM_BLOCKS - done)
    assert rank.outcomes(job)["hbm"] == [OK] * NUM_BLOCKS
    rank.close()


def test_a_small_window_is_filled_again_while_the_rest_of_it_is_read():
    rank, store, keys = rank_with(8, 300_000, num_blocks=12)
    rank.submit(rank.orders.reload(keys, range(12), sources=1, window=range(8)))
    rank.settle()
    assert held(store) == [4, 4]
    store.release(1)
    rank.settle()
    assert arrived(rank, keys) == [0, 1, 2, 3]
    assert held(store) == [4, 4]
    assert len(store.held_slots) == 8  # none twice
    while store.release(1, newest_first=True):
        rank.settle()
    assert arrived(rank, keys) == list(range(12))
    rank.close()


def test_a_portion_is_bounded_in_bytes():
    rank, store, keys = rank_with(10, 2**20, num_blocks=10)
    rank.submit(rank.orders.reload(keys, range(10), range(10), sources=1))
    rank.settle()
    assert held(store) == [7, 3]  # a frame is larger than its payload
    store.release()
    rank.settle()
    rank.close()


@pytest.mark.parametrize(
    ("frame_nbytes", "window", "num"),
    [
        (2**12, None, 16),  # by number
        (2**12, 4, 16),  # a small window does not cut what is small already
        (2**18, None, 16),
        (2**18, 64, 16),
        (2**18, 16, 8),
        (2**18, 4, 4),
        (2**20, None, 8),  # by bytes
        (2**20, 4, 2),
        (2**23, None, 1),  # one at least
        (2**23, 1, 1),
    ],
)
def test_how_large_a_portion_is(frame_nbytes, window, num):
    assert Portions(16, 2**23, 2**20).num_frames(frame_nbytes, window) == num


def test_what_is_under_way_at_a_deadline_is_given_up_and_what_came_is_kept():
    rank, store, keys = rank_with(NUM_BLOCKS)
    blocks = list(range(NUM_BLOCKS))
    job = rank.submit(rank.orders.reload(keys, blocks, blocks, sources=1, deadline=1.0))
    rank.settle()
    store.release(1)
    rank.settle()
    rank.clock.advance(2.0)
    rank.settle()
    portion = PORTIONS.max_frames
    late = NUM_BLOCKS - portion
    assert rank.outcomes(job)["hbm"] == [OK] * portion + [Outcome.TIMED_OUT] * late
    assert not rank.executor.idle  # the store still works on slots
    store.release()
    rank.settle()
    assert rank.completions(job)[-1].last
    assert rank.executor.idle
    assert arrived(rank, keys) == blocks[:portion]
    rank.close()


def test_portions_of_an_earlier_epoch_are_stale_even_if_some_came_before_it():
    rank, store, keys = rank_with(NUM_BLOCKS)
    blocks = list(range(NUM_BLOCKS))
    job = rank.submit(rank.orders.reload(keys, blocks, blocks, sources=1))
    rank.settle()
    store.release(1)
    rank.settle()
    rank.executor.enter(1, 0)
    rank.settle()
    assert rank.outcomes(job)["hbm"] == [Outcome.STALE] * NUM_BLOCKS
    store.release()
    rank.settle()
    assert rank.executor.idle
    assert not rank.shop.slots._landing
    rank.close()
