"""How many engines meet a goal, from as few replays as tell."""

from dataclasses import replace

import pytest

from kvtiers.simulate.estimate import Guess
from kvtiers.simulate.generate import Workload, generate
from kvtiers.simulate.machine import MachinePlan
from kvtiers.simulate.measures import Percentiles
from kvtiers.simulate.more_engines import MoreEngines
from kvtiers.simulate.replay import ReplayPlan, replay
from kvtiers.simulate.sizes import Size

GIB = 2**30
SOME = replay(ReplayPlan(generate(Workload("chat", 3)), MachinePlan("llama-3.1-8b", "h100")))


class Pool:
    """Plays nothing: so many seconds for so many engines; None where time is up."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.played = []

    def result(self, job, _likely=()):
        num, size = job
        self.played.append(num)
        found = self.seconds(num, bool(size.dram_nbytes))
        return None if found is None else replace(SOME, ttft=Percentiles(num=1, p90=found))


def search(seconds, guess=lambda _num: 1.0, most=1000):
    """Returns the pool, and a search for at most 1.0 s."""
    pool = Pool(seconds)

    def largest(num):
        return Size(64 * GIB, 0), Guess(0.5, guess(num), 0.1)

    return pool, MoreEngines(pool, lambda num, size: (num, size), largest, most, 1.0)


@pytest.mark.parametrize("guessed", range(4, 12))
@pytest.mark.parametrize("needed", range(4, 10))
def test_the_fewest_that_meet_the_goal_are_found_wherever_the_guess_begins(needed, guessed):
    pool, more = search(
        lambda num, _tiers: 1.0 if num >= needed else 1.01,
        lambda num: 1.0 if num >= guessed else 2.0,
    )
    assert more.with_tiers(4) == needed
    assert len(pool.played) == len(set(pool.played)) <= 8
    assert [it.num_engines for it in more.tries] == pool.played
    assert more.complete


def test_none_does_where_more_engines_are_of_no_use():
    pool, more = search(lambda _num, _tiers: 3.0, lambda _num: 3.0)
    assert more.with_tiers(4) is None
    assert max(pool.played) == 12
    assert more.complete


def test_there_are_no_more_engines_than_requests():
    pool, more = search(lambda _num, _tiers: 3.0, most=5)
    assert more.with_tiers(4) is None
    assert sorted(pool.played) == [4, 5]
    assert more.with_tiers(6) is None
    assert len(pool.played) == 2


def test_of_many_engines_not_every_number_is_tried():
    pool, more = search(lambda num, _tiers: 60.0 / num, lambda num: 55.0 / num)
    assert 60 <= more.with_tiers(41) <= 60 + 41 // 8
    assert len(pool.played) < 5


def test_time_that_is_up_leaves_what_is_known():
    _, more = search(lambda num, _tiers: 0.9 if num == 6 else None, lambda num: 6.0 / num)
    assert more.with_tiers(4) == 6
    assert not more.complete
    _, more = search(lambda _num, _tiers: None)
    assert more.with_tiers(4) is None
    assert (more.complete, more.tries) == (False, [])


def test_without_tiers_a_few_numbers_are_tried():
    pool, more = search(lambda num, tiers: 5.9 / num if not tiers else 0.1)
    more.without_tiers(5)
    assert pool.played == [5, 6]
    assert [it.meets(1.0) for it in more.tries] == [False, True]
    assert not any(it.size.dram_nbytes for it in more.tries)
    pool, more = search(lambda _num, _tiers: 3.0)
    more.without_tiers(5)
    assert pool.played == [5, 6, 7, 8]
