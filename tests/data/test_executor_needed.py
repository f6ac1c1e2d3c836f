"""Loads that a forward pass waits for: they go first, and KV groups are settled one by one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.data.memory_store import MemoryStore
from kvtiers.data.portions import Portions
from kvtiers.model.keys import block_key, group_of
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_rank import FakeRank, keys_of, make_layout
from kvtiers.testing.faults import FaultyStore, Flip, HeldStore, LateStore

NUM_SLOTS = 16


def ranges(num_blocks, num_groups):
    """Keys of blocks, range by range, and their engine blocks."""
    hashes = [bytes([i + 1]) * 32 for i in range(num_blocks)]
    keys = [block_key(one, group) for group in range(num_groups) for one in hashes]
    return keys, list(range(num_blocks)) * num_groups


def rank_of(num_groups, make_store, **options):
    layout = make_layout(8, ((96,),) * num_groups)
    return FakeRank(layout, NUM_SLOTS, lambda slab: {"m": make_store(slab)}, **options)


def stored(rank, keys, block_ids):
    """Offload blocks to the store, and let the engine forget them."""
    for first in range(0, len(keys), NUM_SLOTS):
        part, blocks = keys[first : first + NUM_SLOTS], block_ids[first : first + NUM_SLOTS]
        for key, block in zip(part, blocks, strict=True):
            rank.device.fill(block, key, group_of(key))
        rank.run(rank.orders.offload(part, blocks, range(len(part)), targets=1))
    for key, block in zip(keys, block_ids, strict=True):
        rank.device.fill(block, block_key(bytes(32), group_of(key)), group_of(key))


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(1, 5),
    num_groups=st.integers(1, 4),
    window=st.integers(1, NUM_SLOTS),
    polls=st.integers(0, 4),
    seed=st.integers(0, 99),
    fault=st.sampled_from([None, Flip(4096 + 3), Outcome.MISSING, OSError("gone")]),
    fault_on=st.integers(1, 6),
    by_block=st.booleans(),
    deadline_turn=st.integers(0, 60),
    portion=st.integers(1, 4),
)
def test_no_group_is_called_settled_before_its_blocks_are(
    num_blocks, num_groups, window, polls, seed, fault, fault_on, by_block, deadline_turn, portion
):
    """Whatever the order of rows and answers, faults and deadlines: what is settled stays as it
    is, holds the right bytes where it is OK, and comes in the order of the groups."""

    def store(slab):
        return FaultyStore(LateStore(MemoryStore(slab, 2**20), polls, seed), slab)

    rank = rank_of(num_groups, store, portions=Portions(portion))
    keys, block_ids = ranges(num_blocks, num_groups)
    stored(rank, keys, block_ids)
    if fault is not None:
        rank.stores["m"].fail("get", fault, on=rank.stores["m"].calls["get"] + fault_on)
    if by_block:
        order = sorted(range(len(keys)), key=lambda row: block_ids[row])
        keys, block_ids = [keys[row] for row in order], [block_ids[row] for row in order]
    slots = range(NUM_SLOTS - window, NUM_SLOTS)
    job = rank.orders.reload(keys, block_ids, sources=1, window=slots, deadline=1.0)
    rank.submit(job)
    rank.executor.need([job.job_id])
    assert rank.executor.lacks([job.job_id], 0)
    seen = [False] * num_groups
    for turn in range(4000):
        if turn == deadline_turn:
            rank.clock.advance(2.0)
        rank.device.work()
        rank.device.step()
        rank.advance()
        settled = [not rank.executor.lacks([job.job_id], group) for group in range(num_groups)]
        assert settled == sorted(settled, reverse=True)
        assert all(now or not before for now, before in zip(settled, seen, strict=True))
        seen = settled
        (run,) = [r for r in rank.executor._loads._runs if r.transfer is job] or [None]
        for row, key in enumerate(keys):
            if run is not None and settled[group_of(key)]:
                assert run.hbm[row] != 255
                assert run.hbm[row] != Outcome.OK or rank.holds(block_ids[row], key)
        if rank.completions(job.job_id) and rank.executor.idle:
            break
    assert all(seen)
    found = rank.outcomes(job.job_id)["hbm"]
    assert all(
        rank.holds(block, key)
        for key, block, outcome in zip(keys, block_ids, found, strict=True)
        if outcome is Outcome.OK
    )
    if fault is None and turn < deadline_turn:
        assert set(found) == {Outcome.OK}
    assert not rank.executor._needed
    assert not rank.executor._progress
    rank.close()


def test_what_is_needed_goes_before_loads_that_were_there_first():
    rank = rank_of(1, lambda slab: HeldStore(MemoryStore(slab, 2**20)))
    others, mine = keys_of(1, 2, 3), keys_of(4)
    first = rank.orders.reload(others, [1, 2, 3], sources=1, window=[0])
    rank.submit(first)
    rank.advance()  # one frame is on its way: there is one slot to stage in
    needed = rank.orders.reload(mine, [4], sources=1, window=[1])
    rank.submit(needed)
    rank.executor.need([needed.job_id])
    rank.stores["m"].release()
    rank.advance(2)
    asked = [frame.key for frames in rank.stores["m"].held_frames for frame in frames]
    assert asked[0] == rank.name(mine[0])
    rank.stores["m"].release()
    rank.close()


def test_frames_of_two_ranges_are_asked_for_apart():
    """Those that are asked for together come together: the second range must not hold the first."""
    rank = rank_of(2, lambda slab: HeldStore(MemoryStore(slab, 2**20)))
    keys, block_ids = ranges(3, 2)
    rank.submit(rank.orders.reload(keys, block_ids, sources=1, window=range(6)))
    rank.advance()
    assert [len(frames) for frames in rank.stores["m"].held_frames] == [3, 3]
    order = [0, 3, 1, 4, 2, 5]  # block by block, as between steps
    by_block = rank.orders.reload(
        [keys[row] for row in order],
        [block_ids[row] for row in order],
        sources=1,
        window=range(8, 14),
    )
    rank.submit(by_block)
    rank.advance()
    assert [len(frames) for frames in rank.stores["m"].held_frames] == [3, 3, 6]
    rank.stores["m"].release()
    rank.close()
