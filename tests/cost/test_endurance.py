"""Promises of `kvtiers.cost.endurance`: no day sees more than a day's bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.cost.endurance import DAY_SECONDS, WriteBudget

BUDGET = 1e12


@given(
    share=st.floats(0.001, 0.999),
    gaps=st.lists(st.floats(0, DAY_SECONDS), min_size=1, max_size=60),
    greed=st.lists(st.floats(0, 1), min_size=60, max_size=60),
)
def test_no_window_of_a_day_sees_more_than_the_budget(share, gaps, greed):
    budget, now, written = WriteBudget(BUDGET, 0.0, share), 0.0, []
    for gap, part in zip(gaps, greed, strict=False):
        now += gap
        nbytes = part * budget.affordable_nbytes(now)
        budget.spend(nbytes, now)
        written.append((now, nbytes))
    for start, _ in written:
        of_day = sum(n for when, n in written if start <= when <= start + DAY_SECONDS)
        assert of_day <= BUDGET * (1 + 1e-9)


def test_a_greedy_writer_gets_nearly_all_of_a_day_over_days():
    budget, written = WriteBudget(BUDGET, 0.0), 0.0
    for minute in range(10 * 24 * 60):
        nbytes = budget.affordable_nbytes(60.0 * minute)
        budget.spend(nbytes, 60.0 * minute)
        written += nbytes
    assert 0.95 * 10 * BUDGET < written <= 10 * BUDGET


def test_after_a_quiet_day_one_burst_is_there_and_no_more():
    budget = WriteBudget(BUDGET, 0.0, burst_share=0.25)
    assert budget.affordable_nbytes(10 * DAY_SECONDS) == pytest.approx(0.25 * BUDGET)
    budget.spend(0.25 * BUDGET, 10 * DAY_SECONDS)
    assert budget.affordable_nbytes(10 * DAY_SECONDS) == 0
    assert budget.affordable_nbytes(10 * DAY_SECONDS + 864) == pytest.approx(0.0075 * BUDGET)


def test_a_clock_that_runs_backwards_gives_nothing():
    budget = WriteBudget(BUDGET, 1000.0)
    budget.spend(budget.affordable_nbytes(1000.0), 1000.0)
    assert budget.affordable_nbytes(0.0) == 0
    budget.spend(0.0, 0.0)
    assert budget.affordable_nbytes(1000.0) == 0


def test_asking_changes_nothing():
    budget = WriteBudget(BUDGET, 0.0)
    assert budget.affordable_nbytes(5.0) == budget.affordable_nbytes(5.0)


def test_more_than_is_left_is_refused():
    budget = WriteBudget(24.0, 0.0)
    with pytest.raises(ValueError, match="2 bytes do not lie in the 1 left"):
        budget.spend(2, 0.0)
    with pytest.raises(ValueError, match="-1 bytes"):
        budget.spend(-1, 0.0)


@pytest.mark.parametrize(("nbytes", "share"), [(0, 0.1), (-1, 0.1), (1, 0), (1, 1), (1, 2)])
def test_senseless_budgets_are_refused(nbytes, share):
    with pytest.raises(ValueError, match=r"admits nothing|between 0 and 1"):
        WriteBudget(nbytes, 0.0, share)
