"""Promises of `kvtiers.cost.learning`: quick, and hard to fool."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.cost.learning import LearnedSum

SMALL, LARGE = (1.0, 10.0), (1.0, 1000.0)
TRUTH = (0.01, 0.001)
positive = st.floats(1e-6, 1e6)


class Machine:
    """Gives measurements of a sum of two terms, with 10 % of scatter."""

    def __init__(self, truth: tuple[float, float] = TRUTH, seed: int = 0) -> None:
        self.truth = truth
        self.rng = np.random.default_rng(seed)

    def row(self, share_of_small: float = 0.0) -> tuple[float, float]:
        """Return features: of a small job, mostly the first term, or of a job of any size."""
        if self.rng.random() < share_of_small:
            return (1.0, float(self.rng.integers(1, 4)))
        return (1.0, float(self.rng.integers(8, 1000)))

    def seconds(self, row: tuple[float, float]) -> float:
        exact = self.truth[0] * row[0] + self.truth[1] * row[1]
        return exact * float(self.rng.lognormal(0, 0.1))

    def teach(self, model: LearnedSum, times: int, share_of_small: float = 0.0) -> None:
        for _ in range(times):
            row = self.row(share_of_small)
            model.observe(row, self.seconds(row))

    def error(self, model: LearnedSum) -> float:
        """Return the larger relative error, of a small and a large job."""
        exact = [self.truth[0] * a + self.truth[1] * b for a, b in (SMALL, LARGE)]
        found = [model.seconds(row) for row in (SMALL, LARGE)]
        return max(abs(f / e - 1) for f, e in zip(found, exact, strict=True))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("small", [0.0, 0.8])
@pytest.mark.parametrize("seeds", [TRUTH, (0.05, 0.0002), (0.01, 1e-6), (10.0, 1.0), (1e-5, 1e-6)])
def test_wrong_seeds_are_corrected_within_a_hundred_measurements(seeds, small, seed):
    model, machine = LearnedSum(seeds), Machine(seed=seed)
    machine.teach(model, 100, small)
    assert machine.error(model) < 0.25


@pytest.mark.parametrize("stall", [10.0, 1e4, 1e-4])
@pytest.mark.parametrize("taught", [1, 5, 50])
def test_one_stall_hardly_counts(taught, stall):
    model, machine = LearnedSum(TRUTH), Machine()
    machine.teach(model, taught)
    before = model.seconds(LARGE)
    model.observe(LARGE, stall * machine.seconds(LARGE))
    ratio = model.seconds(LARGE) / before
    allowed = 1.3 if taught < 50 else 1.1
    assert 1 / allowed < ratio < allowed


def test_two_stalls_in_a_row_hardly_count():
    model, machine = LearnedSum(TRUTH), Machine()
    machine.teach(model, 50)
    before = model.seconds(LARGE)
    for _ in range(2):
        model.observe(LARGE, 100 * machine.seconds(LARGE))
    assert model.seconds(LARGE) / before < 1.15


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [0.1, 0.25, 4.0, 8.0])
def test_lasting_change_is_believed_after_thirty_measurements(factor, seed):
    model, machine = LearnedSum(TRUTH), Machine(seed=seed)
    machine.teach(model, 100, share_of_small=0.3)
    machine.truth = (TRUTH[0] * factor, TRUTH[1] * factor)
    machine.teach(model, 30, share_of_small=0.3)
    assert machine.error(model) < 0.25


def test_lasting_change_of_one_term_leaves_the_other():
    model, machine = LearnedSum(TRUTH), Machine()
    machine.teach(model, 100, share_of_small=0.5)
    machine.truth = (TRUTH[0], TRUTH[1] * 5)
    machine.teach(model, 60, share_of_small=0.5)
    assert machine.error(model) < 0.25


def test_a_thousand_small_jobs_leave_what_large_ones_taught():
    model, machine = LearnedSum((0.01, 0.01)), Machine()
    machine.teach(model, 40)
    learnt = model.seconds(LARGE)
    for _ in range(1000):
        model.observe((1.0, 0.0), 0.01 * machine.rng.lognormal(0, 0.1))
    assert model.seconds(LARGE) == pytest.approx(learnt, rel=0.1)


@given(
    seeds=st.tuples(positive, positive, positive),
    jobs=st.lists(st.tuples(positive, positive, positive, positive), max_size=40),
)
def test_coefficients_stay_positive_and_finite(seeds, jobs):
    model = LearnedSum(seeds)
    for *row, seconds in jobs:
        model.observe(row, seconds)
    assert all(0 < c < float("inf") for c in model.coefficients)
    assert model.num_observed == len(jobs)


@pytest.mark.parametrize("row", [(1.0,), (1.0, 1.0, 1.0)])
def test_rows_of_another_length_are_refused(row):
    model = LearnedSum(TRUTH)
    for use in (model.seconds, lambda features: model.observe(features, 1.0)):
        with pytest.raises(ValueError, match="features for 2 coefficients"):
            use(row)
    assert model.num_observed == 0


def test_absent_term_stays_absent():
    model = LearnedSum((0.0, 1.0))
    for _ in range(20):
        model.observe((1.0, 1.0), 3.0)
    assert model.coefficients[0] == 0.0
    assert model.coefficients[1] == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_measurements_that_say_nothing_are_left_out(seconds):
    model = LearnedSum(TRUTH)
    model.observe(LARGE, seconds)
    model.observe((0.0, 0.0), 1.0)
    assert model.coefficients == TRUTH
    assert model.num_observed == 0


@pytest.mark.parametrize("seed", [-1.0, float("nan"), float("inf")])
def test_senseless_seeds_are_refused(seed):
    with pytest.raises(ValueError, match="finite"):
        LearnedSum((seed,))


class TestFit:
    def rows(self, machine: Machine, num: int) -> tuple[list[tuple[float, float]], list[float]]:
        rows = [machine.row(0.3) for _ in range(num)]
        return rows, [machine.seconds(row) for row in rows]

    @pytest.mark.parametrize("seeds", [TRUTH, (0.1, 0.0001), (0.001, 0.01)])
    def test_many_measurements_at_once_outweigh_seeds(self, seeds):
        model, machine = LearnedSum(seeds), Machine()
        model.fit(*self.rows(machine, 60))
        assert machine.error(model) < 0.1
        assert model.num_observed == 60

    def test_one_stall_in_a_fit_hardly_counts(self):
        model, machine = LearnedSum(TRUTH), Machine()
        rows, seconds = self.rows(machine, 30)
        seconds[7] *= 1000
        seconds[8] /= 1000
        model.fit(rows, seconds)
        assert machine.error(model) < 0.15

    def test_what_was_not_measured_keeps_its_value(self):
        model = LearnedSum((0.01, 0.001))
        model.fit([(1.0, 0.0)] * 10, [0.05] * 10)
        assert model.coefficients == pytest.approx((0.05, 0.001), rel=0.03)

    def test_absent_term_stays_absent(self):
        model = LearnedSum((0.0, 1.0))
        model.fit([(1.0, 1.0), (1.0, 2.0)], [3.0, 6.0])
        assert model.coefficients == pytest.approx((0.0, 3.0), rel=0.03)

    def test_nothing_measured_changes_nothing(self):
        model = LearnedSum(TRUTH)
        model.fit([(1.0, 5.0), (0.0, 0.0)], [0.0, 1.0])
        assert (model.coefficients, model.num_observed) == (TRUTH, 0)

    @pytest.mark.parametrize("factor", [1e-3, 0.01, 0.1, 10.0, 100.0, 1e4])
    def test_few_measurements_outweigh_a_seed_that_is_far_off(self, factor):
        """As of a link whose latency and bandwidth are nothing like those of its kind."""
        model = LearnedSum((TRUTH[0] / factor, TRUTH[1] / factor))
        rows = [(1.0, 8.0), (1.0, 64.0), (1.0, 512.0)]
        model.fit(rows, [TRUTH[0] + TRUTH[1] * size for _, size in rows])
        assert model.coefficients == pytest.approx(TRUTH, rel=0.02)

    @pytest.mark.parametrize("factor", [0.01, 100.0])
    def test_one_coefficient_may_be_far_off(self, factor):
        model = LearnedSum((TRUTH[0], TRUTH[1] / factor))
        rows = [(1.0, 8.0), (1.0, 64.0), (1.0, 512.0)]
        model.fit(rows, [TRUTH[0] + TRUTH[1] * size for _, size in rows])
        assert model.coefficients == pytest.approx(TRUTH, rel=0.02)

    @pytest.mark.parametrize("factor", [0.01, 100.0])
    def test_what_was_not_measured_keeps_its_value_however_far_off_the_rest(self, factor):
        model = LearnedSum((0.01, 0.001))
        model.fit([(1.0, 0.0)] * 3, [0.01 * factor] * 3)
        assert model.coefficients == pytest.approx((0.01 * factor, 0.001), rel=0.02)

    def test_features_must_fit(self):
        with pytest.raises(ValueError, match="do not fit"):
            LearnedSum(TRUTH).fit([(1.0,)], [1.0])

    def test_a_fitted_model_still_learns(self):
        model, machine = LearnedSum(TRUTH), Machine()
        model.fit(*self.rows(machine, 30))
        machine.truth = (TRUTH[0] * 4, TRUTH[1] * 4)
        machine.teach(model, 30)
        assert machine.error(model) < 0.25
