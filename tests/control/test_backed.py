"""Blocks that a lower tier has too may leave DRAM before what follows them."""

from __future__ import annotations

from kvtiers.control.policy.lru import LRU
from kvtiers.control.settings import StoreSettings
from kvtiers.control.tier import Tier
from kvtiers.testing.invariants import check_tier

from .scenes import DISK, Scene, chain, dram, resident

B = chain("b", 12)
C = chain("c", 12)


def offered_until_taken(scene: Scene, keys: list) -> None:
    """Offer a chain again and again, as a request does in every step while it runs."""
    for _ in range(len(keys)):
        if scene.offload(keys) == len(keys):
            return
    raise AssertionError("the chain was never taken whole")


def test_a_chain_longer_than_dram_flows_through_it_into_the_store():
    scene = Scene(dram(4, DISK))
    offered_until_taken(scene, B)
    assert scene.hits(B) == len(B)
    scene.load(B)
    (load,) = scene.settle()
    assert (load.num_loaded, load.num_failed) == (len(B), 0)


def test_without_a_lower_tier_the_head_stays_and_the_rest_is_refused():
    scene = Scene(dram(4))
    assert scene.offload(B) == 4
    assert scene.offload(B) == 4
    assert resident(scene, B) == [0, 1, 2, 3]


def test_a_block_that_its_store_has_lost_holds_up_its_chain_again():
    scene = Scene(dram(8, StoreSettings("disk", 4)))
    scene.offload(B[:4])
    scene.offload(C[:4])  # the disk is full: it drops B from its tail
    scene.offload(chain("d", 2))  # and C's or B's tails make room in DRAM
    assert scene.hits(B[:4], request="b") == len(resident(scene, B[:4]))
    assert resident(scene, B[:4]) in ([0, 1, 2, 3], [0, 1, 2], [0, 1])


def test_backing_is_told_and_taken_back_in_any_order():
    tier = Tier("dram", 3, LRU())
    entries = []
    for parent, key in zip([None, *B], B[:3], strict=False):
        entry = tier.reserve(key, parent)
        assert entry is not None
        tier.commit(entry)
        entries.append(entry)
    head, middle, tail = entries
    assert tier.next_victim() is tail
    tier.back(head)
    assert tier.next_victim() is head  # the least recently used of those that may leave
    tier.pin(head)
    tier.unback(head)
    tier.unpin(head)
    assert tier.next_victim() is tail
    tier.back(middle)
    tier.evict(middle)
    assert not head.backed
    assert tier.next_victim() is head  # nothing that is here follows it directly
    check_tier(tier)
