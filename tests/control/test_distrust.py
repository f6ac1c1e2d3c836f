"""What was computed on top of a failed load is never served."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtiers.model.keys import unpack_keys
from kvtiers.model.messages import Transfer
from kvtiers.model.outcome import Outcome
from kvtiers.testing.invariants import check_stores

from .scenes import DISK, SHARED, Scene, chain, dram, resident

B = chain("b", 6)


def test_offloads_of_the_steps_that_the_engine_took_back_are_dropped():
    scene = Scene(dram(8, DISK))
    scene.offload(B[:2])  # long before, and true
    for _ in range(4):
        scene.step()
    scene.offload(B, settle=False)
    scene.step()
    scene.controller.distrust()
    scene.settle()
    assert resident(scene, B) == [0, 1]
    assert scene.hits(B) == 2
    assert scene.offload(B) == len(B)  # computed again, true this time
    assert scene.hits(B) == len(B)


@pytest.mark.parametrize("store", [DISK, SHARED], ids=lambda store: store.name)
@pytest.mark.parametrize("settled", [True, False])
def test_no_store_keeps_what_the_engine_took_back(store, settled):
    """A key that is there is not written again: what is false must go before it is put anew."""
    scene = Scene(dram(8, store))
    scene.offload(B, settle=settled)
    if not settled:
        scene.step()
    scene.controller.distrust()
    scene.settle()  # what was under way is written only now
    scene.settle()
    assert scene.hits(B) == 0
    assert not scene.ranks[0].stores[store.name].frames
    scene.now += 10.0  # and what another engine may have written is asked for again
    assert scene.offload(B) == len(B)
    assert len(scene.ranks[0].stores[store.name].frames) == len(B)


@pytest.mark.parametrize("store", [DISK, SHARED], ids=lambda store: store.name)
def test_a_frame_that_one_rank_wrote_in_vain_is_forgotten_before_it_is_written_again(store):
    """Rank 0 wrote what it had computed on garbage, rank 1 refused: the frames must not stay."""
    scene = Scene(dram(8, store), num_ranks=2)
    scene.offload(B[:3], settle=False)
    (order,) = scene.step().after
    scene.answer(order.job_id, rank=0)
    scene.answer(order.job_id, dict.fromkeys(range(3), Outcome.FAILED), rank=1)
    for rank in (0, 1):  # the hop to the disk
        scene.answer(order.job_id, dict.fromkeys(range(3), Outcome.FAILED) if rank else None, rank)
    taken = scene.controller.computed(B[:3], [200, 201, 202], 0, 3)
    assert taken == 3
    orders = scene.controller.take_orders(0, (), scene.now)
    forgotten = [key for forget in orders.forgets for key in unpack_keys(forget.keys)]
    assert set(forgotten) >= set(B[:3])
    (again,) = orders.after
    assert again.block_keys() == B[:3]


def test_a_frame_that_is_being_written_when_it_is_doomed_is_forgotten_after_it_was_written():
    """Else the rank keeps it for ever: its slot is lost, and so is every later hit of the key."""
    scene = Scene(dram(8, DISK))
    scene.offload(B[:3], settle=False)
    (order,) = scene.step().after
    scene.answer(order.job_id)  # in DRAM; the disk has yet to write
    scene.controller.distrust()
    scene.step()  # the order to forget comes first
    scene.answer(order.job_id)
    scene.settle()
    check_stores(scene.controller, scene.ranks)
    assert not scene.ranks[0].stores["disk"].frames


@pytest.mark.parametrize("written", [False, True], ids=["on its way", "written"])
def test_false_frames_leave_a_shared_store_too(written):
    """Another engine must not find them, and what is put there again must be written."""
    scene = Scene(dram(8, SHARED))
    scene.offload(B[:3], settle=False)
    (order,) = scene.step().after
    scene.answer(order.job_id)
    if written:
        scene.answer(order.job_id)
    scene.controller.distrust()
    scene.step()
    if not written:
        scene.answer(order.job_id)
    scene.settle()
    assert not scene.shared.frames
    assert scene.offload(B[:3]) == 3
    assert len(scene.shared.frames) == 3


def test_a_frame_of_one_rank_only_leaves_a_shared_store_once_it_is_known_to_be_false():
    """Rank 0 computed on garbage of rank 1, which refused: "a key that is there is OK" after it."""
    scene = Scene(dram(8, SHARED), num_ranks=2)
    scene.offload(B[:3], settle=False)
    (order,) = scene.step().after
    failed = dict.fromkeys(range(3), Outcome.FAILED)
    for _ in ("to DRAM", "to the store"):
        scene.answer(order.job_id, rank=0)
        scene.answer(order.job_id, failed, rank=1)
    scene.controller.distrust()
    scene.settle()
    assert not scene.shared.frames


@pytest.mark.parametrize("written", [False, True], ids=["on its way", "written"])
@pytest.mark.parametrize("store", [DISK, SHARED], ids=["disk", "shared"])
def test_what_left_for_a_store_already_is_taken_back_there(store, written):
    scene = Scene(dram(4, replace(store, write="back"), high_watermark=0.5, low_watermark=0.25))
    scene.offload(B[:3], settle=False)
    (order,) = scene.step().after
    scene.answer(order.job_id)
    (demote,) = scene.step().before
    if written:
        scene.answer(demote.job_id)
    scene.controller.distrust()
    scene.step()
    if not written:
        scene.answer(demote.job_id)
    scene.settle()
    assert scene.hits(B[:3]) in (0, None)
    assert not scene.ranks[0].stores[store.name].frames


@pytest.mark.parametrize("store", [DISK, SHARED], ids=["disk", "shared"])
def test_a_block_is_not_taken_for_written_while_its_false_frame_may_be(store):
    """A put of a key that is there is OK: the true block would answer for the false frame."""
    scene = Scene(dram(8, store))
    scene.offload(B[:1], settle=False)
    (false,) = scene.step().after
    scene.answer(false.job_id)
    scene.controller.distrust()
    scene.step()
    scene.offload(B[:1], settle=False)  # computed again
    (true,) = scene.step().after
    scene.answer(true.job_id)
    assert true.job_id not in [job.job_id for job in scene.controller.jobs]  # DRAM is all it wants
    scene.answer(false.job_id)
    scene.settle()
    assert not scene.ranks[0].stores[store.name].frames
    scene.controller.dram.reset()
    assert scene.hits(B[:1], request="b") in (0, None)
    scene.offload(B[:1])
    assert len(scene.ranks[0].stores[store.name].frames) == 1


def steps_of_a_load_in_step(scene: Scene, outcome: Outcome | None) -> list[Transfer]:
    """Load a prefix within a step that computes `B`; returns every order that writes to a store."""
    prefix = chain("p", 2)
    scene.offload(prefix)
    job = scene.load(prefix, in_step=True)
    scene.offload(B, settle=False)
    orders = [*(first := scene.step()).before, *first.after]
    for order in first.after:  # in DRAM before anyone knows whether the load was good
        scene.answer(order.job_id)
    orders += scene.step().before
    scene.answer(job, None if outcome is None else {0: outcome})
    if outcome is not None:
        scene.controller.distrust()
    for _ in range(4):
        step = scene.step()
        orders += [*step.before, *step.after]
        scene.settle()
    return [order for order in orders if order.targets.any()]


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("store", [DISK, SHARED], ids=["disk", "shared"])
def test_no_store_is_given_what_a_load_of_its_step_may_prove_false(store, write):
    """Another engine, or the next life after a kill, would serve it before it is withdrawn."""
    marks = {"high_watermark": 0.3, "low_watermark": 0.2} if write == "back" else {}
    scene = Scene(dram(16, replace(store, write=write), **marks))
    written = steps_of_a_load_in_step(scene, Outcome.CORRUPT)
    assert not set(B) & {key for order in written for key in order.block_keys()}


@pytest.mark.parametrize("store", [DISK, SHARED], ids=["disk", "shared"])
def test_what_was_computed_beside_a_load_is_written_once_the_load_is_good(store):
    scene = Scene(dram(16, store))
    steps_of_a_load_in_step(scene, None)
    assert len(scene.ranks[0].stores[store.name].frames) == len(B) + 2


def test_engine_is_busy_until_what_was_held_back_is_written():
    scene = Scene(dram(256, SHARED))
    prefix, many = chain("p", 2), chain("m", 200)
    scene.offload(prefix)
    scene.load(prefix, in_step=True)
    scene.offload(many)  # a step writes 64 of them
    assert len(scene.shared.frames) == 202
