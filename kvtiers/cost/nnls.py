"""Least squares whose solution is not negative."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Float64s = npt.NDArray[np.float64]

_TOLERANCE: Final = 1e-10  # relative, of a gradient that counts as zero


def solve_nnls(rows: Float64s, targets: Float64s) -> Float64s:
    """Return the ``x >= 0`` with the least ``|rows @ x - targets|``.

    Lawson and Hanson's active-set method (Solving Least Squares Problems, 1974, chapter 23), for
    few unknowns: columns are scaled to length 1 first, so that their units do not matter.

    Args:
        rows: [measurements, unknowns]. targets: [measurements].

    Raises:
        ValueError: shapes do not match, or a value is not finite.
    """
    if rows.ndim != 2 or targets.shape != rows.shape[:1]:
        raise ValueError(f"rows {rows.shape} and targets {targets.shape} do not match")
    if not (np.isfinite(rows).all() and np.isfinite(targets).all()):
        raise ValueError("rows and targets must be finite")
    lengths = np.linalg.norm(rows, axis=0)
    scale = np.where(lengths > 0, lengths, 1.0)
    matrix = rows / scale
    solution = np.zeros(rows.shape[1])
    free = np.zeros(rows.shape[1], dtype=np.bool_)
    enough = _TOLERANCE * max(float(np.linalg.norm(targets)), np.finfo(float).tiny)
    for _ in range(3 * rows.shape[1] + 1):
        gradient = matrix.T @ (targets - matrix @ solution)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient)) if len(gradient) else 0
        if not len(gradient) or gradient[best] <= enough:
            break
        free[best] = True
        solution = _feasible(matrix, targets, solution, free)
    return np.asarray(solution / scale)


def _feasible(
    matrix: Float64s, targets: Float64s, solution: Float64s, free: npt.NDArray[np.bool_]
) -> Float64s:
    """Move to the least-squares solution of the free unknowns, fixing those that become 0."""
    while True:
        wanted = np.zeros_like(solution)
        wanted[free] = np.linalg.lstsq(matrix[:, free], targets, rcond=None)[0]
        negative = free & (wanted <= 0)
        if not negative.any():
            return wanted
        shares = solution[negative] / (solution[negative] - wanted[negative])
        solution = solution + float(shares.min()) * (wanted - solution)
        # What reached 0 is fixed there; rounding must not keep it free.
        free &= ~(negative & (solution <= 1e-15 * max(1.0, float(solution.max()))))
        solution[~free] = 0.0
        if not free.any():
            return solution
