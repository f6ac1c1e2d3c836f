from hypothesis import given
from hypothesis import strategies as st

from kvtiers.simulate.frontier import Frontier, largest
from kvtiers.simulate.goal import Prices
from kvtiers.simulate.sizes import Size, candidates

GIB = 2**30
GRID = candidates(300 * GIB)
PRICES = Prices()
COSTS = {size: PRICES.of(size.dram_nbytes, size.nvme_nbytes) for size in GRID}


def meets(size, least):
    """Whether a size has enough of any of some pairs: larger tiers never do worse."""
    return any(
        size.dram_nbytes >= dram * GIB and size.nvme_nbytes >= nvme * GIB for dram, nvme in least
    )


def search(frontier, try_one):
    """Try until nothing is undecided; returns whether that was reached before `try_one` says
    None."""
    while (size := frontier.next()) is not None:
        met = try_one(size)
        if met is None:
            return False
        frontier.told(size, met)
    return True


needs = st.lists(
    st.tuples(st.sampled_from([0, 4, 16, 64, 256]), st.sampled_from([0, 64, 200, 500])), max_size=4
)
ranks = st.lists(st.floats(0, 100), min_size=len(GRID), max_size=len(GRID))


@given(least=needs, ranks=ranks)
def test_it_ends_with_the_cheapest_of_all_whatever_the_ranks_promise(least, ranks):
    frontier = Frontier(COSTS, dict(zip(GRID, ranks, strict=True)))
    tried = []

    def replay(size):
        assert size not in tried
        tried.append(size)
        return meets(size, least)

    assert search(frontier, replay)
    expected = min((s for s in GRID if meets(s, least)), key=COSTS.__getitem__, default=None)
    assert frontier.best == expected
    assert frontier.undecided == []


@given(least=needs, most=st.integers(0, 6))
def test_where_time_is_up_nothing_cheaper_than_the_undecided_can_do(least, most):
    frontier = Frontier(COSTS, {size: -cost for size, cost in COSTS.items()})
    left = [None] + [1] * most
    done = search(frontier, lambda size: meets(size, least) if left.pop() else None)
    cheaper = [s for s in GRID if meets(s, least) and s != frontier.best]
    if frontier.best is not None:
        cheaper = [s for s in cheaper if COSTS[s] < COSTS[frontier.best]]
    assert set(cheaper) <= set(frontier.undecided)
    assert done or frontier.undecided


def test_good_ranks_take_few_tries():
    least = [(32, 500)]
    ranks = {s: -min(s.dram_nbytes / 32, s.nvme_nbytes / 500) / GIB for s in GRID}
    frontier, tried = Frontier(COSTS, ranks | {GRID[-1]: -2.0}), []
    frontier.told(GRID[0], False)
    frontier.told(GRID[-1], True)
    search(frontier, lambda size: tried.append(size) or meets(size, least))
    assert frontier.best == Size(32 * GIB, 512 * GIB)
    assert len(tried) <= 8


@given(least=needs, ranks=ranks)
def test_what_follows_is_among_those_that_were_named_ahead(least, ranks):
    frontier = Frontier(COSTS, dict(zip(GRID, ranks, strict=True)))
    named = None
    while (size := frontier.next()) is not None:
        assert named is None or size in named
        named = frontier.ahead(size, 4)
        assert size not in named
        frontier.told(size, meets(size, least))


def test_the_largest_are_those_that_no_other_exceeds():
    some = [Size(4, 64), Size(8, 32), Size(4, 32), Size(2, 128), Size(8, 0)]
    assert largest(some) == [Size(4, 64), Size(8, 32), Size(2, 128)]


@given(least=needs)
def test_as_many_tries_are_expected_as_it_takes_where_the_ranks_are_right(least):
    frontier = Frontier(COSTS, {size: 0.0 if meets(size, least) else 1.0 for size in GRID})
    for size in (GRID[0], GRID[-1]):
        frontier.told(size, meets(size, least))
    if meets(GRID[0], least) or not meets(GRID[-1], least):
        return
    expected, num = frontier.num_expected(), 0
    while (size := frontier.next()) is not None:
        frontier.told(size, meets(size, least))
        num += 1
    assert expected == num
