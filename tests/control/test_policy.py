"""Replacement rules: the shipped ones pass the suite, and LRU evicts by last use."""

from __future__ import annotations

import pytest

from kvtiers.control.policy import POLICIES, make_policy
from kvtiers.control.policy.base import EvictionPolicy
from kvtiers.control.policy.lru import LRU
from kvtiers.model.errors import ConfigError
from kvtiers.testing.policy_suite import Conductor, PolicySuite, keys

CAPACITY = 6  # fewer than the suite has keys


class TestLRU(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return make_policy("lru", CAPACITY)


class TestARC(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return make_policy("arc", CAPACITY)


class TestS3FIFO(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return make_policy("s3-fifo", CAPACITY)


class TestWTinyLFU(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return make_policy("w-tinylfu", CAPACITY)


class TestCost(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return make_policy("cost", CAPACITY)


class TestAdaptive(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return make_policy("adaptive", CAPACITY)


def lru(*numbers: int) -> Conductor:
    """An LRU whose blocks were admitted in this order, and all may leave."""
    conductor = Conductor(LRU())
    for key in keys(*numbers):
        conductor.apply("admitted", key)
    for key in keys(*reversed(numbers)):
        conductor.apply("exposed", key)
    return conductor


def order_of_leaving(conductor: Conductor) -> list[int]:
    order = []
    while (victim := conductor.policy.next_victim()) is not None:
        order.append(int.from_bytes(victim[:32], "big"))
        conductor.apply("removed", victim)
    return order


def test_lru_counts_admission_as_use_whenever_a_block_was_exposed():
    assert order_of_leaving(lru(3, 1, 2)) == [3, 1, 2]


def test_lru_hit_moves_a_block_to_the_end():
    conductor = lru(1, 2, 3)
    conductor.apply("touched", *keys(1))
    assert order_of_leaving(conductor) == [2, 3, 1]


def test_lru_keeps_the_last_use_of_a_block_that_was_shielded():
    conductor = lru(1, 2, 3)
    conductor.apply("shielded", *keys(1))
    conductor.apply("exposed", *keys(1))
    assert order_of_leaving(conductor) == [1, 2, 3]


def test_lru_counts_hits_of_shielded_blocks():
    conductor = lru(1, 2, 3)
    for operation in ("shielded", "touched", "exposed"):
        conductor.apply(operation, *keys(1))
    assert order_of_leaving(conductor) == [2, 3, 1]


def test_lru_readmitted_block_is_new():
    conductor = lru(1, 2)
    for operation in ("removed", "admitted", "exposed"):
        conductor.apply(operation, *keys(1))
    assert order_of_leaving(conductor) == [2, 1]


def test_unknown_policy_is_named_with_those_that_exist():
    with pytest.raises(ConfigError, match="'mru'.*" + ", ".join(sorted(POLICIES))):
        make_policy("mru", 8)
