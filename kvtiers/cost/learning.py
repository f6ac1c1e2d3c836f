"""A sum of non-negative terms whose coefficients are corrected by every measurement."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from operator import mul
from typing import Final

import numpy as np

from kvtiers.cost.nnls import Float64s, solve_nnls

# Relative standard deviations, chosen in simulation: see `tests/cost/test_learning.py`.
_PRIOR_SIGMA: Final = 1.0  # of a seed, and of every coefficient after a lasting change
_NOISE_SIGMA: Final = 0.1  # of a measurement
_DRIFT_SIGMA: Final = 0.01  # of a coefficient between two measurements that inform about it
_MAX_SURPRISE: Final = 0.4  # log units that a measurement may be off before others confirm it
_WINDOW: Final = 5  # measurements of one kind of which three must agree on a lasting change
_FIT_ROUNDS: Final = 30  # each moves a prediction by up to a factor of 1.4
_FIT_PRIOR_SIGMA: Final = 10.0  # of what was held before a fit: it only settles what rows do not
_LEAST_FACTOR: Final = 1e-3  # that a fit leaves of a coefficient, so that it can grow again

_Rows = deque[tuple[tuple[float, ...], float]]


class LearnedSum:
    """Predict ``seconds = sum(coefficient * feature)`` and learn the coefficients.

    A Kalman filter whose errors count relative to what is predicted: with steps of 5 ms and of
    5 s, both teach. Three things make it fit for a serving engine:

    - Drift is added only along the direction that a measurement informs about, so that a
      thousand decode steps leave what prefill steps have taught untouched.
    - A measurement is clipped to `_MAX_SURPRISE` (a factor of 1.5) around the median error of the
      last `_WINDOW` ones of its kind, which is the term that dominates it. One stall hardly counts.
    - If that median itself is off by more, the change is a lasting one: the dominant term is
      scaled to match, and all coefficients are held as uncertain as seeds. So seeds may be wrong
      by orders of magnitude.

    A coefficient whose seed is 0 is known to be absent and stays 0.

    Args:
        seeds: the coefficients until something is measured, all finite and >= 0.
    """

    def __init__(self, seeds: Sequence[float]) -> None:
        if not all(math.isfinite(seed) and seed >= 0 for seed in seeds):
            raise ValueError(f"seeds {tuple(seeds)} must be finite and not negative")
        self._coefficients = [float(seed) for seed in seeds]
        self._covariance = self._prior()
        self._recent: list[_Rows] = [deque(maxlen=_WINDOW) for _ in seeds]
        self._num_observed = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The current coefficients, in the seeds' order."""
        return tuple(self._coefficients)

    @property
    def num_observed(self) -> int:
        """How many measurements were taken in."""
        return self._num_observed

    def seconds(self, features: Sequence[float]) -> float:
        """Return the predicted seconds for one row of features."""
        if len(features) != len(self._coefficients):  # `map` would drop what is too many
            raise ValueError(f"{len(features)} features for {len(self._coefficients)} coefficients")
        seconds: float = sum(map(mul, self._coefficients, features))
        return seconds

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Correct the coefficients by one measurement.

        A measurement that says nothing (it took no time, or has only features that cost nothing
        by the model) is left out: clocks have a resolution, and no measurement may stop a server.
        """
        predicted = self.seconds(features)
        if not (0 < seconds < math.inf and 0 < predicted < math.inf):
            return
        self._num_observed += 1
        terms = [c * x for c, x in zip(self._coefficients, features, strict=True)]
        dominant = terms.index(max(terms))
        recent = self._recent[dominant]
        recent.append((tuple(features), seconds))
        middle = self._median_error(recent)
        if abs(middle) > _MAX_SURPRISE:
            self._rescale(dominant, math.exp(middle))
            middle = self._median_error(recent)
        predicted = self.seconds(features)
        error = math.log(seconds / predicted)
        clipped = min(max(error, middle - _MAX_SURPRISE), middle + _MAX_SURPRISE)
        self._update(features, predicted, predicted * math.expm1(clipped))

    def fit(self, rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> None:
        """Replace the coefficients by those that explain many measurements at once.

        Non-negative least squares of relative errors. The coefficients held so far count as one
        very uncertain measurement each, so that what the rows say nothing about keeps its value.
        Errors are logarithmic and clipped to `_MAX_SURPRISE`, round by round: some stalls hardly
        count, and a coefficient that was held a hundred times too small or too large pulls no
        more than one that was nearly right. Later measurements correct the result as they correct
        seeds.

        Args:
            rows: features, one row a measurement. seconds: of each; both as in `observe`.
        """
        held = np.array(self._coefficients)
        learnt = held > 0
        features, measured = np.array(rows, dtype=np.float64), np.array(seconds, dtype=np.float64)
        if features.ndim != 2 or features.shape != (len(measured), len(held)):
            raise ValueError(f"{features.shape} features do not fit {len(measured)} measurements")
        kept = (measured > 0) & np.isfinite(measured) & (features[:, learnt] > 0).any(axis=1)
        if not (kept.any() and learnt.any()):
            return
        features, measured = features[kept][:, learnt], measured[kept]
        held = held[learnt]
        weight = _NOISE_SIGMA / _FIT_PRIOR_SIGMA
        start = held * np.exp(np.median(np.log(measured / (features @ held))))
        found = start
        for _ in range(_FIT_ROUNDS):
            predicted = features @ found
            factors = solve_nnls(  # of what was found in the round before
                np.vstack([features * found / predicted[:, None], weight * np.eye(len(held))]),
                np.concatenate(
                    [_target(measured / predicted), weight * _target(held / found)],
                ),
            )
            found = np.maximum(factors * found, _LEAST_FACTOR * np.minimum(start, held))
        self._take(found.tolist(), learnt.tolist(), len(measured))

    def _take(self, found: list[float], learnt: list[bool], num_rows: int) -> None:
        left = iter(found)
        self._coefficients = [next(left) if is_learnt else 0.0 for is_learnt in learnt]
        self._covariance = self._prior()
        for recent in self._recent:
            recent.clear()
        self._num_observed += num_rows

    def scale(self, factor: float) -> None:
        """Believe all coefficients to be ``factor`` times as large, and as uncertain as seeds."""
        if not 0 < factor < math.inf:
            raise ValueError(f"a factor of {factor}; must be > 0 and finite")
        self._coefficients = [factor * c for c in self._coefficients]
        self._covariance = self._prior()
        for recent in self._recent:
            recent.clear()

    def _rescale(self, dominant: int, factor: float) -> None:
        """Scale one term, and those of which nothing was measured yet."""
        for i, recent in enumerate(self._recent):
            if i == dominant or not recent:
                self._coefficients[i] *= factor
        self._covariance = self._prior()

    def _prior(self) -> list[list[float]]:
        """Return a covariance that trusts the coefficients as little as seeds."""
        return [
            [(_PRIOR_SIGMA * c) ** 2 if i == j else 0.0 for j in range(len(self._coefficients))]
            for i, c in enumerate(self._coefficients)
        ]

    def _median_error(self, recent: _Rows) -> float:
        """Return the median log error of recent measurements; 0 while there are too few."""
        if len(recent) <= _WINDOW // 2:
            return 0.0
        errors = sorted(math.log(seconds / self.seconds(row)) for row, seconds in recent)
        # Of an even number, the middle one that is nearer to no change.
        return min(errors[(len(errors) - 1) // 2], errors[len(errors) // 2], key=abs)

    def _update(self, features: Sequence[float], predicted: float, error: float) -> None:
        """Do one Kalman step for an error in seconds."""
        coefficients, covariance = self._coefficients, self._covariance
        size = range(len(coefficients))
        shares = [c * x / predicted for c, x in zip(coefficients, features, strict=True)]
        drift = _DRIFT_SIGMA / math.sqrt(sum(share * share for share in shares))
        steps = [drift * shares[i] * coefficients[i] for i in size]
        for i in size:
            for j in size:
                covariance[i][j] += steps[i] * steps[j]
        spread = [sum(covariance[i][j] * features[j] for j in size) for i in size]
        variance = sum(features[i] * spread[i] for i in size) + (_NOISE_SIGMA * predicted) ** 2
        for i in size:
            # At most halved: a coefficient stays positive, and can grow again.
            moved = coefficients[i] + spread[i] / variance * error
            coefficients[i] = max(moved, 0.5 * coefficients[i])
            for j in size:
                covariance[i][j] -= spread[i] * spread[j] / variance


def _target(ratios: Float64s) -> Float64s:
    """Return by which factors to correct what is off by some ratios, in one round."""
    return np.asarray(1.0 + np.clip(np.log(ratios), -_MAX_SURPRISE, _MAX_SURPRISE))
