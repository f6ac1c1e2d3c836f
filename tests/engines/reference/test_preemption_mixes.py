"""Deciding victim by victim is as good as the better of both ways, on mixes that were fixed before
any of them was run; `bench/preemption.py` has the other half of them, and more seeds."""

import statistics
from functools import cache

import pytest

from kvtiers.bench.preemption import MIXES, SEEDS, Comparison, compare
from kvtiers.cost.preempt import PreemptMode

# By eager offload a victim's blocks lie below already, and both ways differ little.
LAZY = [mix.name for mix in MIXES if mix.offload == "lazy"]
BY_NAME = {mix.name: mix for mix in MIXES}
TOLERANCE = 1.01


@cache
def comparison(name: str) -> Comparison:
    return compare(BY_NAME[name], SEEDS[:2])


@pytest.mark.parametrize("name", LAZY)
def test_cost_is_no_worse_than_the_better_of_both(name):
    found = comparison(name)
    swap, again = found.outcomes[PreemptMode.SWAP], found.outcomes[PreemptMode.RECOMPUTE]
    assert min(it.num_preemptions for each in found.outcomes.values() for it in each) > 10
    assert all(it.num_swaps == it.num_preemptions for it in swap)
    assert not any(it.num_swaps for it in again)
    assert found.ratio(found.better)[0] <= TOLERANCE


def test_cost_is_better_than_both_where_requests_are_mixed():
    """Short and long ones, over all links: no single way is as good."""
    found = [comparison(name) for name in LAZY if not name.startswith("bursty")]
    swaps = sum(it.num_swaps for each in found for it in each.outcomes[PreemptMode.COST])
    assert (
        0
        < swaps
        < sum(it.num_preemptions for each in found for it in each.outcomes[PreemptMode.COST])
    )
    for mode in (PreemptMode.SWAP, PreemptMode.RECOMPUTE):
        assert statistics.fmean(each.ratio(mode)[0] for each in found) < 1.0
