"""An index of a million blocks costs the garbage collector nothing, and leaves nothing behind."""

from __future__ import annotations

import gc
import sys

import pytest

from kvtiers.control.policy import make_policy
from kvtiers.control.tier import Tier
from kvtiers.model.keys import BlockKey, block_key


def key_of(number: int) -> BlockKey:
    return block_key(number.to_bytes(16, "big"), 0)


def tree_of(keys: list[BlockKey]) -> Tier:
    """A tier of a head that four blocks follow, each of which has a follower."""
    tier = Tier("dram", 16, make_policy("lru", 16))
    head, *others = keys
    for key, parent in [(head, None), *((key, head) for key in others[:4])]:
        entry = tier.reserve(key, parent)
        assert entry is not None
        tier.commit(entry)
    for key, parent in zip(others[4:], others[:4], strict=True):
        entry = tier.reserve(key, parent)
        assert entry is not None
        tier.commit(entry)
    return tier


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="its collector is meant")
def test_collector_does_not_look_at_blocks_that_are_there():
    keys = [key_of(number) for number in range(9)]
    tier = tree_of(keys)
    assert [gc.is_tracked(tier.get(key)) for key in keys] == [False] * 9


def test_entries_go_with_their_tier_without_the_collector():
    keys = [key_of(number) for number in range(9)]
    before = [sys.getrefcount(key) for key in keys]
    gc.disable()
    try:
        tier = tree_of(keys)
        assert all(sys.getrefcount(key) > num for key, num in zip(keys, before, strict=True))
        del tier
        assert [sys.getrefcount(key) for key in keys] == before
    finally:
        gc.enable()


@pytest.mark.parametrize("gone", [1, 2, 3, 4])
def test_block_that_leaves_from_among_its_siblings_takes_no_other_along(gone: int):
    keys = [key_of(number) for number in range(5)]
    tier = Tier("dram", 16, make_policy("lru", 16))
    for key, parent in [(keys[0], None), *((key, keys[0]) for key in keys[1:])]:
        entry = tier.reserve(key, parent)
        assert entry is not None
        tier.commit(entry)
    leaving = tier.get(keys[gone])
    assert leaving is not None
    tier.evict(leaving)
    head = tier.get(keys[0])
    assert head is not None
    assert set(head.children()) == set(keys[1:]) - {keys[gone]}
