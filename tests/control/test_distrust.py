"""What was computed on top of a failed load is never served."""

from __future__ import annotations

import pytest

from kvtiers.model.keys import unpack_keys
from kvtiers.model.outcome import Outcome

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
