"""What is remembered of victims and of ends, and what that says of the next ones."""

import pytest

from kvtiers.engines.reference.block_pool import BlockPool
from kvtiers.engines.reference.turnover import Guess, Turnover


@pytest.fixture
def pool():
    return BlockPool(100)


@pytest.fixture
def turnover(pool):
    return Turnover(pool)


def full(pool):
    """Take all blocks, so that a victim's are the next."""
    return pool.take(pool.num_free)


def away(pool, turnover, name, num_taken):
    """Let one give way, others be handed out so many blocks, and it return."""
    turnover.gave_way(name)
    pool.free(pool.take(num_taken))
    turnover.returns(name)


def kept(turnover, num_blocks):
    """What a victim of so many blocks may find in HBM, guess by guess."""
    return [guess.num_kept for guess in turnover.guesses(num_blocks)]


def test_nothing_is_known_before_the_first_return(pool, turnover):
    assert kept(turnover, 10) == []
    turnover.gave_way("a")
    assert kept(turnover, 10) == []


def test_each_of_the_last_that_returned_is_a_guess(pool, turnover):
    away(pool, turnover, "a", 3)
    away(pool, turnover, "b", 20)
    pool.take(pool.num_free)  # else what is free already is handed out first
    assert kept(turnover, 10) == [7, 0]
    assert kept(turnover, 50) == [47, 30]


def test_what_is_free_already_is_handed_out_first(pool, turnover):
    away(pool, turnover, "a", 12)
    pool.take(95)
    assert kept(turnover, 10) == [3]


def test_who_is_away_for_longer_than_all_others_finds_nothing(pool, turnover):
    """Counting the first that return only would take all for short."""
    turnover.gave_way("long")
    away(pool, turnover, "short", 3)
    full(pool)
    assert kept(turnover, 10) == [7, 0]
    turnover.gave_way("just now")
    assert kept(turnover, 10) == [7, 0]


def test_who_is_over_while_it_is_away_tells_nothing(pool, turnover):
    turnover.gave_way("long")
    away(pool, turnover, "short", 3)
    full(pool)
    turnover.forget("long")
    turnover.forget("never was away")
    assert kept(turnover, 10) == [7]


def test_only_the_last_victims_count(pool, turnover):
    for idx in range(16):
        away(pool, turnover, f"early {idx}", 1)
    for idx in range(16):
        away(pool, turnover, f"late {idx}", 5)
    full(pool)
    assert kept(turnover, 10) == [5] * 16


def test_each_guess_tells_what_its_step_computed_for_others(pool, turnover):
    """Beside decodes: of prompts, and of others that returned with it."""
    away(pool, turnover, "a", 3)
    away(pool, turnover, "b", 4)
    turnover.stepped({"a": 100, "b": 20, "newcomer": 7})
    assert not turnover.has_returned
    away(pool, turnover, "c", 5)  # which was reloaded, and computes nothing in its first step
    assert turnover.has_returned
    turnover.stepped({"newcomer": 30})
    assert [guess.num_joined for guess in turnover.guesses(10)] == [27, 107, 30]


def test_who_is_away_for_longer_than_all_others_meets_as_many_as_they_did(pool, turnover):
    turnover.gave_way("long")
    for name, num_tokens in (("a", 10), ("b", 40)):
        away(pool, turnover, name, 3)
        turnover.stepped({"newcomer": num_tokens})
    full(pool)
    assert list(turnover.guesses(10))[-1] == Guess(0, 25)


def test_of_the_blocks_that_are_handed_out_some_are_of_admissions(pool, turnover):
    assert turnover.admitted_share == 0
    pool.take(30)
    turnover.admitted(30)
    assert turnover.admitted_share == 1
    pool.take(10)  # as requests grow
    pool.take(20)
    turnover.admitted(20)
    assert turnover.admitted_share == pytest.approx((15 / 16 * 30 + 20) / (15 / 16 * 30 + 30))


def test_what_is_long_past_does_not_count(pool, turnover):
    pool.free(pool.take(100))
    turnover.admitted(100)
    for _ in range(100):
        pool.free(pool.take(10))
        pool.free(pool.take(10))
        turnover.admitted(10)
    assert turnover.admitted_share == pytest.approx(0.5, abs=0.01)
