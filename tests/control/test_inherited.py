"""Frames of an earlier life: found by hearsay, taken over when used, never kept by nobody."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtiers.control.presence import ABSENT_SECONDS
from kvtiers.model.keys import BlockKey
from kvtiers.model.messages import HBM, Completion, Presence
from kvtiers.model.outcome import Outcome
from kvtiers.testing.invariants import check_stores

from .scenes import DISK, Scene, chain, dram

A = chain("a", 3)
INHERITS = replace(DISK, inherits=True)


def second_life(*kept: list[BlockKey], num_slots: int = 8, capacity: int = 64) -> Scene:
    """An engine whose ranks kept some blocks each."""
    scene = Scene(dram(num_slots, replace(INHERITS, capacity_blocks=capacity)), len(kept))
    for rank, keys in zip(scene.ranks, kept, strict=True):
        store = rank.stores["disk"]
        store.inherited = {(0, rank.rank, key): None for key in keys}
        store.frames = set(store.inherited)
    return scene


def tell(scene: Scene, present: bool = True) -> int:
    """Answer what control asks; returns how many keys it asked for."""
    num = 0
    for lookup in scene.controller.take_lookups():
        num_keys = len(lookup.keys) // 36
        flags = np.full(num_keys, present, np.uint8)
        scene.controller.answered(Presence("disk", lookup.keys, flags, lookup.epoch))
        num += num_keys
    return num


def disk_keys(scene: Scene) -> set[BlockKey]:
    tier = scene.controller.stores[0]
    assert tier is not None
    return {entry.key for entry in tier.entries()}


def test_what_an_earlier_life_left_is_asked_for_and_loaded():
    scene = second_life(A)
    assert scene.hits(A) is None
    assert tell(scene) == 3
    assert scene.hits(A) == 3
    scene.load(A)
    assert [done.num_loaded for done in scene.settle()] == [3]
    assert disk_keys(scene) == set(A)  # control's own from now on
    check_stores(scene.controller, scene.ranks)


def test_lookup_is_made_when_a_request_arrives():
    """Its answer is there before the engine asks."""
    scene = second_life(A)
    scene.controller.arrived([A], scene.now)
    assert tell(scene) == 3
    assert scene.hits(A) == 3


def test_frame_that_one_rank_has_lost_is_dropped_by_all():
    """Nobody would ever evict it otherwise: control does not know it, the store thinks it does."""
    scene = second_life(A, A[:2])
    assert scene.hits(A) is None
    tell(scene)
    scene.load(A)
    (done,) = scene.settle()
    assert (done.num_loaded, done.num_failed) == (2, 1)
    assert disk_keys(scene) == set(A[:2])
    scene.settle()
    check_stores(scene.controller, scene.ranks)
    scene.controller.finished("a")
    assert scene.hits(A, request="b") == 2


def test_frame_that_did_not_come_in_time_is_kept():
    scene = second_life(A)
    scene.hits(A)
    tell(scene)
    job_id = scene.load(A)
    scene.step()
    scene.answer(job_id, dict.fromkeys(range(3), Outcome.TIMED_OUT))
    assert disk_keys(scene) == set(A)


def test_frame_for_which_nothing_may_leave_is_dropped():
    """The store's books are full of blocks that jobs read."""
    scene = second_life([*A, *chain("b", 1)], capacity=3)
    tier = scene.controller.stores[0]
    assert tier is not None
    entries = [tier.reserve(key, None) for key in A]  # being written
    other = chain("b", 1)
    scene.hits(other)
    tell(scene)
    job_id = scene.load(other)
    scene.controller.take_orders(0, (), 0.0)
    scene.controller.completed(
        Completion(job_id, 0, scene.ranks[0].rank, HBM, np.zeros(1, np.uint8), last=True), 0.0
    )
    assert other[0] not in disk_keys(scene)
    (forget,) = scene.controller.take_orders(0, (), 0.0).forgets
    assert forget.block_keys() == other
    assert [entry is not None for entry in entries] == [True] * 3


def test_block_that_is_computed_again_is_put_again():
    """That writes nothing, and makes the frame control's own."""
    scene = second_life(A)
    scene.hits(A)
    tell(scene)
    scene.offload(A)
    assert disk_keys(scene) == set(A)
    assert not scene.ranks[0].stores["disk"].inherited


def test_reset_ends_what_was_inherited():
    scene = second_life(A)
    scene.hits(A)
    tell(scene)
    scene.controller.reset()
    assert scene.hits(A, request="b") == 0
    assert scene.controller.take_lookups() == []


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_absence_is_believed_for_a_while(seconds):
    scene = second_life(A)
    assert scene.hits(A) is None
    tell(scene, present=False)
    assert scene.hits(A) == 0
    scene.now += seconds
    expected = None if seconds >= ABSENT_SECONDS else 0
    assert scene.hits(A, request="b") is expected


def test_a_frame_that_is_gone_is_not_hoped_for_again():
    """R36: the inventory is of the start, and says for ever that the frame is there."""
    scene = second_life(A)
    scene.ranks[0].stores["disk"].frames.clear()  # the store has needed the room
    scene.hits(A)
    tell(scene)
    scene.load(A)
    assert [done.num_failed for done in scene.settle()] == [3]
    scene.controller.finished("a")
    for request in "bcd":
        scene.now += 2 * ABSENT_SECONDS
        scene.controller.arrived([A], scene.now)
        tell(scene)
        assert scene.hits(A, request=request) == 0


def test_a_frame_that_control_has_evicted_is_not_hoped_for():
    scene = second_life(A, capacity=3)
    scene.hits(A)
    tell(scene)
    scene.load(A)
    scene.settle()
    for number in range(3):
        scene.offload(chain(f"c{number}", 3))
    scene.controller.finished("a")
    scene.now += 2 * ABSENT_SECONDS
    scene.controller.arrived([A], scene.now)
    tell(scene)
    found = scene.hits(A, request="b")
    held = {name[2] for name in scene.ranks[0].stores["disk"].frames}
    assert found == len([key for key in A if key in held or scene.controller.holds(key)])
