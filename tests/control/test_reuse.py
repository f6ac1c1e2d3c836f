"""How likely a block is to be asked for again."""

from __future__ import annotations

import pytest

from kvtiers.control.reuse import ReuseChances

from .scenes import chain


def test_chance_is_the_share_that_came_back():
    chances = ReuseChances()
    keys = chain("doc", 1000)
    chances.seen(keys)
    chances.seen(keys[:250])
    assert chances.of(keys[999]) == pytest.approx(0.25, abs=0.01)
    assert chances.of(keys[0]) < 0.05, "of 250 seen twice, none came a third time"


def test_what_was_never_seen_counts_as_seen_once():
    chances = ReuseChances()
    assert chances.of(chain("new", 1)[0]) == 0.5
    chances.seen(chain("doc", 1000))
    assert chances.of(chain("new", 1)[0]) == chances.of(chain("doc", 1)[0]) < 0.02


def test_what_is_asked_for_again_and_again_is_expected_back():
    chances = ReuseChances()
    keys = chain("system prompt", 50)
    for _ in range(100):
        chances.seen(keys)
    assert chances.of(keys[0]) > 0.85


def test_memory_is_bounded_and_the_oldest_are_forgotten():
    chances = ReuseChances(capacity=10)
    old, new = chain("old", 10), chain("new", 10)
    for _ in range(20):
        chances.seen(old)
    chances.seen(new)
    assert chances.of(old[0]) == chances.of(chain("never", 1)[0])
