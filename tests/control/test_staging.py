"""Loads in a small slab: what is promised finds room, and nobody waits for ever."""

from __future__ import annotations

from .scenes import DISK, Scene, chain, dram, reloads

A, B = chain("a", 3), chain("b", 10)


def test_a_small_slab_reloads_a_long_prompt_for_two_at_once():
    """R29: 60 blocks below, 4 slots; what is promised comes."""
    scene = Scene(dram(4, DISK))
    long = chain("long", 60)
    for rank in scene.ranks:
        for key in long:
            rank.stores["disk"].put((0, rank.rank, key))
    tier = scene.controller.stores[0]
    for key, parent in zip(long, [None, *long], strict=False):
        tier.commit(tier.reserve(key, parent))
    for request in "ab":
        assert scene.hits(long, request=request) == 60
        scene.load(long, request=request)
    assert [(done.num_loaded, done.num_failed) for done in scene.settle()] == [(60, 0)] * 2


def test_a_promise_leaves_room_to_stage():
    """R29: DRAM is full of the prompt's own head; the tail below could land nowhere."""
    scene = Scene(dram(2, DISK))
    scene.offload(B[:2])
    tier = scene.controller.stores[0]
    for key in B[:2]:
        tier.doom(tier.get(key))
    scene.step()  # the disk has lost them, so that they can only be read from DRAM
    for rank in scene.ranks:
        rank.stores["disk"].put((0, rank.rank, B[2]))
    tier.commit(tier.reserve(B[2], B[1]))
    assert scene.hits(B[:3]) == 2


def test_what_lies_below_too_makes_room_to_stage():
    """DRAM is full of the prompt's own head, which can be read from below as well."""
    scene = Scene(dram(2, DISK))
    scene.offload(B[:2])
    scene.offload(B[:4])
    scene.load(B[:2], request="warm")  # brings the head back to DRAM
    scene.settle()
    assert scene.hits(B[:4]) == 4
    scene.load(B[:4])
    (load,) = scene.settle()
    assert (load.num_loaded, load.num_failed) == (4, 0)


def test_a_job_that_waits_for_nobody_goes_without_a_window():
    """R29: every slot is held by jobs that wait for each other; the first one gives up its tail
    at once, not after the deadline."""
    scene = Scene(dram(2, DISK))
    scene.offload(A[:2])
    scene.offload(B[:2])
    held = [scene.controller.dram.get(key) for key in B[:2]]
    for entry in held:  # somebody else's pins, as a defect or a plugin might leave them
        scene.controller.dram.pin(entry)
    scene.load(A[:2])
    (order,) = reloads(scene.controller.take_orders(0, (), 0.0))
    assert order.sources.tolist() == [0, 0]
    assert order.slots.tolist() == [-1, -1]


def on_disk(scene: Scene, keys: list) -> None:
    """Put blocks into the disk's tier and every rank's store, and nowhere else."""
    tier = scene.controller.stores[0]
    for key, parent in zip(keys, [None, *keys], strict=False):
        tier.commit(tier.reserve(key, parent))
        for rank in scene.ranks:
            rank.stores["disk"].put((0, rank.rank, key))


def test_a_load_waits_for_blocks_that_another_waiting_load_will_bring():
    """Else it would read slots that nobody has filled: first come, first served."""
    scene = Scene(dram(4, DISK))
    scene.offload(chain("x", 2))
    on_disk(scene, A)
    scene.load(A, request="stages")  # two blocks have slots, the third needs a window
    scene.load(chain("x", 2), request="ready")
    (ready,) = reloads(scene.step())
    scene.load(A[:2], request="depends")
    assert reloads(scene.step()) == []
    scene.answer(ready.job_id)
    assert [order.request_id for order in reloads(scene.step())] == ["stages", "depends"]
    assert [done.num_failed for done in scene.settle()] == [0, 0]


def test_a_load_of_what_is_there_overtakes_one_that_waits_for_a_window():
    scene = Scene(dram(4, DISK))
    scene.offload(chain("x", 2))
    on_disk(scene, A)
    scene.load(A, request="stages")
    scene.load(chain("x", 2), request="ready")
    assert [order.request_id for order in reloads(scene.step())] == ["ready"]
    assert [done.num_failed for done in scene.settle()] == [0, 0]


def test_a_load_that_the_next_step_reads_is_sent_whatever_it_waits_for():
    """Else the forward pass would run on blocks that nobody is bringing."""
    scene = Scene(dram(4, DISK))
    scene.offload(chain("x", 2))
    on_disk(scene, A)
    scene.load(A, request="stages")
    scene.load(chain("x", 2), request="ready")
    scene.step()
    urgent = scene.load(A[:2], request="urgent")
    orders = scene.controller.take_orders(0, (urgent,), scene.now)
    assert [order.job_id for order in reloads(orders)] == [urgent]
