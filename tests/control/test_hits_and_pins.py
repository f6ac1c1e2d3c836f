"""Between a hit and its load: pins, eviction, ranks that disagree, blocks that do not come."""

from __future__ import annotations

import numpy as np
import pytest

from kvtiers.control.reload import LoadRequest
from kvtiers.control.tier import Residence
from kvtiers.model.errors import ProtocolError
from kvtiers.model.messages import HBM, NO_BLOCK, Completion, Presence
from kvtiers.model.outcome import Outcome
from kvtiers.testing.invariants import check_quiet

from .scenes import DISK, SHARED, Scene, chain, dram, reloads, resident, windowed

A, B, C = chain("a", 3), chain("b", 10), chain("c", 10)


def test_store_pending_at_readmission_is_a_hit_that_waits():
    """R10: a preempted request comes back while its offload still runs."""
    scene = Scene(dram(8))
    scene.offload(A, settle=False)
    scene.controller.preempted("a")
    scene.controller.hold_before()
    assert scene.hits(A) == 3
    scene.load(A)
    offload, reload = scene.step().before
    assert reload.request_id != offload.request_id
    assert scene.ranks[0].answerable() == [offload.job_id]
    scene.answer(offload.job_id)
    assert scene.answer(reload.job_id).num_loaded == 3


def test_a_full_tier_refuses_and_the_cursor_stays():
    """R15: 8 slots, a request of 40 blocks, all pinned."""
    scene = Scene(dram(8))
    long = chain("long", 40)
    assert scene.offload(long, settle=False) == 8
    assert scene.controller.computed(long, range(40), 8, 40) == 8
    scene.settle()
    assert scene.controller.computed(long, range(40), 8, 40) == 8  # its own head never leaves
    assert scene.hits(long) == 8


def test_a_hit_that_was_evicted_before_its_load_is_recomputed():
    """R16, R23: never an assertion; exactly the block that is gone fails."""
    scene = Scene(dram(4))
    scene.offload(A)
    assert scene.hits(A) == 3
    scene.offload(chain("x", 2))
    assert resident(scene, A) == [0, 1]
    scene.load(A)
    (order,) = reloads(scene.step())
    assert order.slots[:2].min() >= 0
    assert order.slots[2] == -1
    done = scene.answer(order.job_id)
    assert (done.num_loaded, done.num_failed) == (2, 1)
    assert scene.hits(A) == 0  # it does not loop; other requests may load what is there
    assert scene.hits(A, request="b") == 2


def test_a_started_load_cannot_be_evicted():
    """R16: pinned from the allocation on."""
    scene = Scene(dram(4))
    scene.offload(A)
    scene.load(A)
    assert scene.offload(chain("x", 4), settle=False) == 1
    assert [done.num_loaded for done in scene.settle()] == [3]


def test_a_load_pins_all_it_reads_before_it_makes_room():
    """R16, R29: promoting the first blocks must not evict the last ones."""
    scene = Scene(dram(8, DISK))
    scene.offload(B[:4])
    for key in reversed(B[:2]):  # as if another rank had lost them
        scene.controller.dram.doom(scene.controller.dram.get(key))
    scene.offload(chain("x", 5))
    assert resident(scene, B[:4]) == [2, 3]
    assert scene.hits(B[:4]) == 4
    scene.load(B[:4])
    assert [(done.num_loaded, done.num_failed) for done in scene.settle()] == [(4, 0)]


@pytest.mark.parametrize("late", [0, 1, 2, 3])
def test_the_worst_rank_decides_a_hit(late):
    """R24: 4 ranks, one misses block 5 of 10; whoever answers last."""
    scene = Scene(dram(16), num_ranks=4)
    scene.offload(B)
    scene.load(B)
    (order,) = reloads(scene.step())
    answers = []
    for idx in sorted(range(4), key=lambda idx: idx == late):
        faults = {5: Outcome.STALE} if idx == 2 else None
        answers.append(scene.answer(order.job_id, faults, rank=idx))
    assert answers[:3] == [None] * 3
    assert (answers[3].num_loaded, answers[3].num_failed) == (9, 1)
    assert scene.hits(B, request="b") == 5  # the block is dropped everywhere
    check_quiet(scene.controller)


def test_a_block_is_served_only_when_every_rank_has_it():
    """R24: until then nobody counts on it, after one failure nobody does."""
    scene = Scene(dram(8), num_ranks=2)
    scene.offload(A, settle=False)
    (order,) = scene.step().after
    scene.answer(order.job_id, rank=0)
    assert scene.controller.dram.get(A[0]).residence is Residence.RESERVED
    scene.answer(order.job_id, {1: Outcome.FAILED}, rank=1)
    assert resident(scene, A) == [0, 2]
    assert scene.hits(A) == 1


def test_lookups_pin_nothing():
    """R25, R20: 10,000 lookups without a load, for prompts that HBM has and that it has not."""
    scene = Scene(dram(8))
    scene.offload(A)
    for number in range(10_000):
        scene.hits(A, request=f"r{number}", start=number % 4)
        scene.controller.finished(f"r{number}")
    check_quiet(scene.controller)
    assert scene.offload(chain("x", 8)) == 8


def test_a_load_that_ends_twice_is_a_mistake_and_changes_nothing():
    """R26: exactly one release, whether the load ends or is cancelled first."""
    scene = Scene(dram(4), num_ranks=2)
    scene.offload(A)
    for cancelled in (False, True) * 100:
        job_id = scene.load(A)
        scene.step()
        if cancelled:
            scene.controller.finished("a")
        scene.answer(job_id)
        again = Completion(job_id, 0, scene.ranks[0].rank, HBM, np.zeros(3, np.uint8), last=True)
        with pytest.raises(ProtocolError, match="not running"):
            scene.controller.completed(again, 0.0)
        check_quiet(scene.controller)


def test_one_rank_that_answers_twice_does_not_count_as_two():
    """R26: the pins stay until the other rank has answered."""
    scene = Scene(dram(4), num_ranks=2)
    scene.offload(A)
    job_id = scene.load(A)
    scene.step()
    scene.answer(job_id, rank=0)
    again = Completion(job_id, 0, scene.ranks[0].rank, HBM, np.zeros(3, np.uint8), last=True)
    with pytest.raises(ProtocolError, match="twice"):
        scene.controller.completed(again, 0.0)
    assert scene.controller.dram.num_pins == 3


@pytest.mark.parametrize("pieces", [(3,), (1, 3), (2, 3), (1, 2, 3)])
def test_eviction_takes_the_tail_of_a_chain(pieces):
    """R28: capacity 3; whole, and in pieces; then one block of another chain."""
    scene = Scene(dram(3))
    for num in pieces:
        scene.offload(A[:num])
    scene.offload(chain("x", 1))
    assert resident(scene, A) == [0, 1]
    assert scene.hits(A) == 2


def test_forks_lose_their_twigs_first():
    """R28: two prompts share two blocks."""
    scene = Scene(dram(6))
    left, right = [*A[:2], *chain("l", 2)], [*A[:2], *chain("r", 2)]
    scene.offload(left)
    scene.offload(right)
    scene.offload(chain("x", 4))
    assert resident(scene, A[:2]) == [0, 1]


def test_only_what_hbm_lacks_is_read():
    """R31: local 2 blocks of 10."""
    scene = Scene(dram(16))
    scene.offload(B)
    assert scene.hits(B, start=2) == 8
    scene.load(B, start=2)
    (order,) = reloads(scene.step())
    assert order.block_keys() == B[2:]


def test_a_missing_block_is_a_miss_from_then_on():
    """R36: a shared store believed to hold what it does not; exactly one failed load."""
    scene = Scene(dram(8, SHARED))
    packed = b"".join(A)
    scene.controller.answered(Presence("shared", packed, np.ones(3, np.uint8)))
    assert scene.hits(A) == 3
    scene.load(A)
    assert [done.num_failed for done in scene.settle()] == [3]
    for number in range(5):
        assert scene.hits(A, request=f"again {number}") == 0


def test_a_corrupt_block_is_dropped_and_the_prefix_stays():
    """R32, R36: in DRAM, block 1 of 3."""
    scene = Scene(dram(8))
    scene.offload(A)
    job_id = scene.load(A)
    scene.step()
    scene.answer(job_id, {1: Outcome.CORRUPT})
    assert resident(scene, A) == [0, 2]
    assert scene.hits(A, request="b") == 1


def test_a_load_that_came_late_says_nothing_about_the_block():
    """A deadline is no fault of what was to be loaded."""
    scene = Scene(dram(8))
    scene.offload(A)
    job_id = scene.load(A)
    scene.step()
    scene.answer(job_id, {1: Outcome.TIMED_OUT})
    assert scene.hits(A, request="b") == 3


def test_a_request_that_ended_bars_nobody_of_its_name():
    """R13: aborted in its load, which then fails; nothing is remembered of it."""
    scene = Scene(dram(8))
    scene.offload(A)
    job_id = scene.load(A)
    scene.step()
    scene.controller.finished("a")
    scene.answer(job_id, {2: Outcome.TIMED_OUT})
    assert scene.hits(A) == 3


def test_ranks_forget_what_only_some_of_them_stored():
    """A write that failed on one rank must not fill the other's store for ever."""
    scene = Scene(dram(8, DISK), num_ranks=2)
    scene.offload(A, settle=False)
    (order,) = scene.step().after
    scene.answer(order.job_id)  # all in DRAM
    scene.answer(order.job_id, rank=0)
    scene.answer(order.job_id, {0: Outcome.FAILED, 1: Outcome.FAILED}, rank=1)
    (forget,) = scene.step().forgets
    assert set(forget.block_keys()) == set(A[:2])
    assert {key for _, _, key in scene.ranks[0].stores["disk"].frames} == {A[2]}


def test_window_groups_need_only_what_attention_sees():
    """R89: window 2 blocks, 10 stored, of the window group only the last two."""
    scene = Scene(windowed(32, None, 8))
    full, slid = chain("f", 10, 0), chain("s", 10, 1)
    scene.offload(full, settle=True)
    for position in (7, 8, 9):
        entry = scene.controller.dram.reserve(slid[position], slid[position - 1])
        scene.controller.dram.commit(entry)
        for rank in scene.ranks:
            rank.slots[entry.slot] = slid[position]
    assert scene.hits(full, slid) == 10
    scene.load(full, slid)
    (order,) = reloads(scene.step())
    assert order.num_blocks == 12
    assert scene.answer(order.job_id).num_failed == 0


def test_blocks_for_which_the_engine_keeps_no_place_are_not_loaded():
    """R89: it may give up more of a window than attention needs."""
    scene = Scene(windowed(32, None, 8))
    full, slid = chain("f", 10, 0), chain("s", 10, 1)
    scene.offload(full, slid)
    block_ids = [list(range(200, 210)), [NO_BLOCK] * 9 + [211]]
    job_id = scene.controller.allocated(LoadRequest("a", (full, slid), block_ids, 0, 10), 0.0)
    (order,) = reloads(scene.step())
    assert order.block_keys() == [*full, slid[9]]
    assert order.block_ids.tolist() == [*range(200, 210), 211]
    assert scene.answer(job_id).num_failed == 0


def test_a_hole_in_a_window_cuts_the_hit_for_all_groups():
    """R35, R82: block 6 of the window group is missing; a prefix of 8 would need it."""
    scene = Scene(windowed(32, None, 8))
    full, slid = chain("f", 10, 0), chain("s", 10, 1)
    scene.offload(full, slid)
    scene.controller.dram.doom(scene.controller.dram.get(slid[9]))
    assert scene.hits(full, slid) == 9
    scene.controller.finished("a")
    scene.controller.dram.doom(scene.controller.dram.get(slid[7]))
    assert scene.hits(full, slid) == 7


def test_reset_serves_nothing_and_believes_no_late_answer():
    """Jobs of the old epoch only give back what they held."""
    scene = Scene(dram(8, SHARED))
    scene.offload(A, settle=False)
    (order,) = scene.step().after
    scene.answer(order.job_id)
    scene.controller.reset()
    assert scene.hits(A) is None  # the shared store is asked anew
    (completion,) = [rank.answer(order.job_id) for rank in scene.ranks]  # it was written before
    assert completion.outcomes.tolist() == [0, 0, 0]
    scene.controller.completed(completion, 0.0)
    scene.controller.answered(Presence("shared", b"".join(A), np.ones(3, np.uint8), epoch=0))
    scene.now = 1.0
    assert scene.hits(A) == 0
    check_quiet(scene.controller)
    assert scene.controller.dram.num_free == 8


def test_a_question_is_asked_once_and_answered_by_a_deadline():
    """R112: a shared store that never answers costs one lookup and 50 ms."""
    scene = Scene(dram(8, SHARED))
    assert [scene.hits(A) for _ in range(3)] == [None] * 3
    lookups = scene.controller.take_lookups()
    assert [lookup.keys for lookup in lookups] == [b"".join(A)]
    scene.now = 0.049
    assert scene.hits(A) is None
    scene.now = 0.051
    assert scene.hits(A) == 0
    assert scene.controller.take_lookups() == []


def test_a_shared_hit_is_found_in_one_question_however_long():
    """R112: ten blocks that another process stored; then they are loaded."""
    scene = Scene(dram(16, SHARED))
    for key in B:
        scene.shared.put((0, scene.ranks[0].rank, key))
    assert scene.hits(B) is None
    (lookup,) = scene.controller.take_lookups()
    assert lookup.keys == b"".join(B)
    scene.controller.answered(Presence("shared", lookup.keys, np.ones(10, np.uint8)))
    assert scene.hits(B) == 10
    scene.load(B)
    assert [done.num_loaded for done in scene.settle()] == [10]


def test_what_dram_has_is_not_withheld_until_a_store_answers_late():
    """R112: eager partial answers once the deadline has passed."""
    scene = Scene(dram(8, SHARED))
    scene.offload(A)
    long = [*A, *chain("more", 2)]
    assert scene.hits(long) is None
    scene.now = 0.06
    assert scene.hits(long) == 3


def test_what_came_before_a_failed_block_is_kept_and_told_by_tier():
    scene = Scene(dram(8, DISK))
    scene.offload(B[:6])
    tier = scene.controller.dram
    for key in B[:2]:
        entry = tier.get(key)
        assert entry is not None
        tier.evict(entry)  # they lie on the disk too
    job_id = scene.load(B[:6])
    scene.step()
    done = scene.answer(job_id, {4: Outcome.FAILED})
    assert done is not None
    assert (done.num_loaded, done.num_failed) == (5, 1)
    assert done.kept == {"disk": 2, "dram": 2}
