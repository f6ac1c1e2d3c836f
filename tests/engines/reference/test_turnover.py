"""What is remembered of victims and of ends, and what that says of the next ones."""

import pytest

from kvtiers.engines.reference.block_pool import BlockPool
from kvtiers.engines.reference.turnover import Turnover


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


def test_nothing_is_known_before_the_first_return(pool, turnover):
    assert list(turnover.kept_blocks(10)) == []
    turnover.gave_way("a")
    assert list(turnover.kept_blocks(10)) == []


def test_each_of_the_last_that_returned_is_a_guess(pool, turnover):
    away(pool, turnover, "a", 3)
    away(pool, turnover, "b", 20)
    pool.take(pool.num_free)  # else what is free already is handed out first
    assert list(turnover.kept_blocks(10)) == [7, 0]
    assert list(turnover.kept_blocks(50)) == [47, 30]


def test_what_is_free_already_is_handed_out_first(pool, turnover):
    away(pool, turnover, "a", 12)
    pool.take(95)
    assert list(turnover.kept_blocks(10)) == [3]


def test_who_is_away_for_longer_than_all_others_finds_nothing(pool, turnover):
    """Counting the first that return only would take all for short."""
    turnover.gave_way("long")
    away(pool, turnover, "short", 3)
    full(pool)
    assert list(turnover.kept_blocks(10)) == [7, 0]
    turnover.gave_way("just now")
    assert list(turnover.kept_blocks(10)) == [7, 0]


def test_who_is_over_while_it_is_away_tells_nothing(pool, turnover):
    turnover.gave_way("long")
    away(pool, turnover, "short", 3)
    full(pool)
    turnover.forget("long")
    turnover.forget("never was away")
    assert list(turnover.kept_blocks(10)) == [7]


def test_only_the_last_victims_count(pool, turnover):
    for idx in range(16):
        away(pool, turnover, f"early {idx}", 1)
    for idx in range(16):
        away(pool, turnover, f"late {idx}", 5)
    full(pool)
    assert list(turnover.kept_blocks(10)) == [5] * 16


def ended(pool, turnover, num_free, num_freed, num_taken):
    """Let a request end while blocks are free, and a step take some."""
    held = pool.take(pool.num_free)
    pool.free(held[:num_free])
    turnover.scheduled(0, pool.num_taken)  # nobody ended before
    rest = held[num_free:]
    pool.free(rest[:num_freed])
    before = pool.num_free, pool.num_taken
    taken = pool.take(num_taken)
    turnover.scheduled(*before)
    pool.free(rest[num_freed:] + taken)


@pytest.mark.parametrize(
    ("num_free", "num_freed", "num_taken", "awaited", "crowded"),
    [
        (0, 30, 30, 20, 1),  # all of them, and all of the victim's
        (0, 30, 15, 5, 1),  # ten that it will have filled until then, and five of its own
        (0, 30, 8, 0, 1),
        (4, 30, 15, 1, 1),  # four that were free before
        (40, 30, 15, 0, 0),
        (0, 12, 12, 12, 1),  # those of a shorter one
        (0, 30, 0, 0, 1),
    ],
)
def test_blocks_that_are_taken_at_once_after_an_end(
    pool, turnover, num_free, num_freed, num_taken, awaited, crowded
):
    assert (turnover.awaited_blocks(20), turnover.crowded) == (0, 0)
    ended(pool, turnover, num_free, num_freed, num_taken)
    assert (turnover.awaited_blocks(20), turnover.crowded) == (awaited, crowded)


def test_ends_count_in_the_mean(pool, turnover):
    for num_free, num_taken in ((0, 30), (40, 15)):
        ended(pool, turnover, num_free, 30, num_taken)
    assert (turnover.awaited_blocks(20), turnover.crowded) == (10, 0.5)


def test_a_step_after_which_nobody_ended_is_no_end(pool, turnover):
    pool.take(20)
    turnover.scheduled(pool.num_free, pool.num_taken)
    before = pool.num_free, pool.num_taken
    pool.take(5)
    turnover.scheduled(*before)
    assert turnover.crowded == 0
