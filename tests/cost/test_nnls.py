"""Promises of `kvtiers.cost.nnls`: the best of all solutions that are not negative."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.cost.nnls import solve_nnls


def best_by_trying(rows: np.ndarray, targets: np.ndarray) -> float:
    """Return the least error over all sets of unknowns that are not 0."""
    unknowns = range(rows.shape[1])
    least = float(np.linalg.norm(targets))
    for chosen in chain.from_iterable(
        combinations(unknowns, k) for k in range(1, len(unknowns) + 1)
    ):
        columns = rows[:, list(chosen)]
        x = np.linalg.lstsq(columns, targets, rcond=None)[0]
        if (x >= -1e-9 * np.abs(x).max()).all():
            x = np.maximum(x, 0)
            least = min(least, float(np.linalg.norm(columns @ x - targets)))
    return least


@given(
    seed=st.integers(0, 10**6),
    num=st.integers(1, 12),
    unknowns=st.integers(1, 4),
    scale=st.integers(-12, 12),
)
def test_solution_is_as_good_as_the_best_of_all_active_sets(seed, num, unknowns, scale):
    rng = np.random.default_rng(seed)
    rows, targets = rng.normal(size=(num, unknowns)), rng.normal(size=num)
    rows[:, 0] *= 10.0**scale
    found = solve_nnls(rows, targets)
    assert (found >= 0).all()
    error = float(np.linalg.norm(rows @ found - targets))
    assert error <= best_by_trying(rows, targets) * (1 + 1e-7) + 1e-9


def test_exact_measurements_give_the_truth():
    truth = np.array([0.005, 1e-15, 3e-15])
    flops = np.array([1e12, 5e12, 1e13, 7e13])
    rows = np.column_stack([np.ones(4), flops, flops**1.5 / 1e6])
    assert solve_nnls(rows, rows @ truth) == pytest.approx(truth, rel=1e-6)


def test_a_term_that_would_be_negative_is_left_out():
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert solve_nnls(rows, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])


def test_a_column_of_zeros_gets_nothing():
    assert solve_nnls(np.array([[0.0, 2.0], [0.0, 4.0]]), np.array([1.0, 2.0])).tolist() == [0, 0.5]


@pytest.mark.parametrize(
    ("rows", "targets"),
    [
        (np.ones((2, 1)), np.ones(3)),
        (np.ones(3), np.ones(3)),
        (np.full((1, 1), np.nan), np.ones(1)),
    ],
)
def test_senseless_input_is_refused(rows, targets):
    with pytest.raises(ValueError, match=r"match|finite"):
        solve_nnls(rows, targets)
