"""Deciding victim by victim is about as good as the better of both ways, and best where requests
differ; `bench/preemption.py` has more mixes."""

import pytest

from kvtiers.bench.preemption import MIXES, compare
from kvtiers.cost.preempt import PreemptMode

BY_NAME = {mix.name: mix for mix in MIXES}
# The worst of all mixes is 2.4 % over the better one, measured with these seeds, November 2026.
TOLERANCE = 1.03


@pytest.mark.parametrize("name", ["bursty, far", "mixed, far"])
def test_cost_is_no_worse_than_the_better_of_both(name):
    found = compare(BY_NAME[name])
    cost, swap, again = (
        found[mode] for mode in (PreemptMode.COST, PreemptMode.SWAP, PreemptMode.RECOMPUTE)
    )
    assert min(it.num_preemptions for it in found.values()) > 10
    assert (swap.num_swaps, again.num_swaps) == (swap.num_preemptions, 0)
    assert cost.p99_seconds <= TOLERANCE * min(swap.p99_seconds, again.p99_seconds)
    if name == "mixed, far":
        assert 0 < cost.num_swaps < cost.num_preemptions
        assert cost.p99_seconds < min(swap.p99_seconds, again.p99_seconds)
