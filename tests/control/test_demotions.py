"""What DRAM demotes to be ahead of need, and what it must keep."""

from __future__ import annotations

from kvtiers.control.settings import StoreSettings
from kvtiers.model.outcome import Outcome
from kvtiers.observe.metrics import OFFLOADS_DROPPED

from .scenes import Scene, chain, dram, resident

A, B, C = chain("a", 3), chain("b", 10), chain("c", 10)


def test_written_blocks_leave_until_dram_is_at_its_low_water():
    """Write-back: 10 slots, high water 7, low 4; what is on disk makes room, tail first."""
    back = StoreSettings("disk", 64, "back")
    scene = Scene(dram(10, back, high_watermark=0.7, low_watermark=0.4))
    scene.offload(B[:8])
    scene.settle()
    assert resident(scene, B) == [0, 1, 2, 3]
    assert scene.hits(B[:8]) == 8


def test_blocks_whose_write_failed_stay():
    back = StoreSettings("disk", 64, "back")
    scene = Scene(dram(10, back, high_watermark=0.7, low_watermark=0.4))
    scene.offload(B[:8], settle=False)
    (offload,) = scene.step().after
    scene.answer(offload.job_id)
    (demote,) = scene.step().before
    assert demote.block_keys() == B[7:3:-1]
    scene.answer(demote.job_id, {0: Outcome.FAILED})
    assert resident(scene, B) == [0, 1, 2, 3, 7]  # 4 to 6 lie below: no hole before 7


def test_a_fork_is_not_demoted_past_its_other_branch():
    """The shared head has a child that stays."""
    back = StoreSettings("disk", 64, "back")
    scene = Scene(dram(10, back, high_watermark=0.5, low_watermark=0.1))
    left, right = [*A[:2], *chain("l", 2)], [*A[:2], *chain("r", 2)]
    scene.offload(left, settle=False)
    (first,) = scene.step().after
    scene.offload(right, settle=False)
    (second,) = scene.step().after
    scene.answer(first.job_id)
    entry = scene.controller.dram.get(right[3])
    demote = scene.controller.take_orders(0, (), 0.0).before
    assert entry.residence.value == "reserved"
    assert [key for order in demote for key in order.block_keys()] == left[3:1:-1]
    assert scene.ranks[0].answerable() == [second.job_id]


def test_demotions_under_way_are_not_started_twice():
    """A slow disk: 10 slots, high water 7, low 4; three steps before the first answer."""
    back = StoreSettings("disk", 64, "back")
    scene = Scene(dram(10, back, high_watermark=0.7, low_watermark=0.4))
    scene.offload(B[:4], settle=False)
    scene.offload(C[:4], settle=False)
    (order,) = scene.step().after
    scene.answer(order.job_id)
    demoted = [t.block_keys() for _ in range(3) for t in scene.step().before]
    assert demoted == [B[3::-1]]


def test_slots_come_back_before_all_is_written():
    """A slow disk, of which the first order of several is answered."""
    back = StoreSettings("disk", 64, "back")
    scene, keys = Scene(dram(64, back, high_watermark=0.75, low_watermark=0.5)), chain("d", 60)
    scene.offload(keys, settle=False)
    (order,) = scene.step().after
    scene.answer(order.job_id)
    orders = scene.step().before
    assert [key for order in orders for key in order.block_keys()] == keys[:31:-1]
    num_free = scene.controller.dram.num_free
    scene.answer(orders[0].job_id)
    assert scene.controller.dram.num_free - num_free == orders[0].num_blocks < 28


def test_what_leaves_before_it_is_written_is_counted():
    """A slow disk: 10 slots, high water 7, low 4; more comes than is free, before its answer."""
    scene = Scene(
        dram(10, StoreSettings("disk", 64, "back"), high_watermark=0.7, low_watermark=0.4)
    )
    old, new = ([chain(f"{name}{i}", 1) for i in range(8)] for name in ("old", "new"))
    for keys in old:
        scene.offload(keys, settle=False)
    (order,) = scene.step().after
    scene.answer(order.job_id)
    (demote,) = scene.step().before
    assert demote.block_keys() == [keys[0] for keys in old[:4]]
    for keys in new[:5]:
        assert scene.offload(keys, settle=False) == 1
    scene.step()
    assert _unwritten(scene) == 3
    hits = [scene.hits(keys, request=str(idx)) for idx, keys in enumerate(old)]
    assert hits == [1, 1, 1, 1, 0, 0, 0, 1]


def test_what_a_store_has_may_leave_uncounted():
    scene = Scene(dram(4, StoreSettings("disk", 64)))
    for number in range(8):
        scene.offload(chain(f"d{number}", 1))
    assert scene.controller.dram.num_evicted == 4
    assert _unwritten(scene) == 0


def test_without_a_store_nothing_was_to_be_written():
    scene = Scene(dram(4))
    for number in range(8):
        scene.offload(chain(f"d{number}", 1))
    assert scene.controller.dram.num_evicted == 4
    assert _unwritten(scene) == 0


def _unwritten(scene: Scene) -> float:
    counted = scene.controller.counters.snapshot().counters
    return counted.get((OFFLOADS_DROPPED, ("unwritten",)), 0)
