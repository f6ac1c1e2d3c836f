"""Deciding victim by victim is as good as the better of both ways, and better than both where
requests are mixed; `bench/preemption.py` has all mixes, and more seeds."""

from functools import cache

import pytest

from kvtiers.bench.preemption import DEVELOPMENT_SEEDS, MIXES, Comparison, compare
from kvtiers.cost.preempt import PreemptMode

BY_NAME = {mix.name: mix for mix in MIXES}
# The median of four seeds, over the better of both ways: measured on a virtual clock, which gives
# the same each time. On the link "far" each way is best for some victims; on "slow" swapping is for
# nearly all, but seed 0 has a huge prompt of which HBM keeps all.
MOST = {
    "bursty, far, lazy": 0.9995,
    "adversarial, far, lazy": 0.9956,
    "adversarial, slow, lazy": 1.0,
    "mixed, far, lazy": 0.9975,
}


@cache
def comparison(name: str) -> Comparison:
    return compare(BY_NAME[name], DEVELOPMENT_SEEDS)


@pytest.mark.parametrize("name", MOST)
def test_cost_is_as_good_against_the_better_of_both_as_was_measured(name):
    found = comparison(name)
    swap, again = found.outcomes[PreemptMode.SWAP], found.outcomes[PreemptMode.RECOMPUTE]
    assert min(it.num_preemptions for each in found.outcomes.values() for it in each) > 10
    assert all(it.num_swaps == it.num_preemptions for it in swap)
    assert not any(it.num_swaps for it in again)
    assert found.ratio(found.better) <= MOST[name]


@pytest.mark.parametrize("mode", [PreemptMode.SWAP, PreemptMode.RECOMPUTE])
@pytest.mark.parametrize("name", ["adversarial, far, lazy", "mixed, far, lazy"])
def test_where_each_way_is_best_for_some_it_is_better_than_both(name, mode):
    found = comparison(name)
    assert found.p99_seconds(PreemptMode.COST) < found.p99_seconds(mode)
    assert found.mean_ratio(mode) < 1
    assert found.ratio(mode) < 1


def test_it_swaps_some_and_computes_others():
    for name in MOST:
        decided = comparison(name).outcomes[PreemptMode.COST]
        num_swaps = sum(it.num_swaps for it in decided)
        assert 0 < num_swaps < sum(it.num_preemptions for it in decided)
