"""What a store lacks of the blocks in use comes to it with the requests that use them."""

from __future__ import annotations

from dataclasses import replace

from kvtiers.control.late_writes import MAX_BLOCKS
from kvtiers.control.presence import FRESH_SECONDS
from kvtiers.model.messages import Transfer, TransferKind
from kvtiers.model.outcome import Outcome

from .scenes import DISK, SHARED, Scene, chain, dram

A = chain("a", 3)


def late_writes(scene: Scene) -> list[Transfer]:
    return [order for order in scene.step().before if order.kind is TransferKind.DEMOTE]


def disk_lost(scene: Scene) -> None:
    """The first block was not written."""
    scene.offload(A, settle=False)
    (order,) = scene.step().after
    scene.answer(order.job_id)
    scene.answer(order.job_id, {0: Outcome.FULL})


def test_block_that_was_not_written_is_written_when_it_is_used_again():
    scene = Scene(dram(8, DISK))
    disk_lost(scene)
    scene.offload(A, settle=False)
    (order,) = late_writes(scene)
    assert order.block_keys() == A[:1]
    scene.answer(order.job_id)
    scene.settle()
    tier = scene.controller.stores[0]
    assert tier is not None
    assert all(tier.get(key) is not None for key in A)
    assert all(scene.controller.dram.get(key) is not None for key in A)  # it stays in DRAM
    scene.offload(A, settle=False)
    assert late_writes(scene) == []


def test_store_that_is_off_is_left_alone():
    scene = Scene(dram(8, DISK))
    disk_lost(scene)
    for _ in range(3):
        scene.offload(chain("x", 1), settle=False)
        (order,) = scene.step().after
        scene.answer(order.job_id)
        scene.answer(order.job_id, {0: Outcome.FAILED})
        scene.controller.dram.doom(scene.controller.dram.get(chain("x", 1)[0]))
    assert not scene.controller.gates.most_writes(0)
    scene.offload(A, settle=False)
    assert late_writes(scene) == []


def test_shared_store_hears_now_and_then_of_blocks_in_use():
    """It evicts by last access, and sees none of what DRAM serves."""
    scene = Scene(dram(8, SHARED))
    scene.offload(A)
    scene.offload(A, settle=False)
    assert late_writes(scene) == []
    scene.now += FRESH_SECONDS
    scene.controller.presence.tick(scene.now)
    scene.offload(A, settle=False)
    (order,) = late_writes(scene)
    assert order.block_keys() == A
    scene.answer(order.job_id)
    scene.offload(A, settle=False)
    assert late_writes(scene) == []


def test_step_writes_a_bounded_number_late():
    scene = Scene(dram(2 * MAX_BLOCKS, replace(DISK, capacity_blocks=2 * MAX_BLOCKS)))
    keys = chain("long", MAX_BLOCKS + 9)
    scene.offload(keys, settle=False)
    (order,) = scene.step().after
    scene.answer(order.job_id)
    scene.answer(order.job_id, dict.fromkeys(range(len(keys)), Outcome.FULL))
    numbers = []
    for _ in range(2):
        scene.offload(keys, settle=False)
        (order,) = late_writes(scene)
        scene.answer(order.job_id)
        numbers.append(order.num_blocks)
    assert numbers == [MAX_BLOCKS, 9]


def test_resets_lose_no_order():
    scene = Scene(dram(8, DISK))
    for _ in range(2):
        disk_lost(scene)
        scene.offload(A, settle=False)
        scene.controller.reset()
    scene.settle()
    assert not scene.controller.busy
