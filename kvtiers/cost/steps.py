"""The time of an engine step that computes tokens of several requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtiers.cost.learning import LearnedSum
from kvtiers.cost.prefill import ModelShape, PrefillModel, PrefillSpeed


class StepModel:
    """Predict a step as the sum of what it does once, per operation, per sequence and per byte.

    ``t_step + alpha * linear + beta * attention + gamma * sequences + delta * KV read``: the first
    three as in `PrefillModel`; a sequence has work of its own, such as sampling; and every
    sequence reads the KV before its new tokens, which is most of a decode's attention.

    Args:
        kv_nbytes_per_token: on one rank. kv_bytes_per_second: at which it is read; infinite where
            that costs nothing beside attention's operations.
        sequence_seconds: of one sequence beside its tokens; 0 means none, for ever.
    """

    def __init__(
        self,
        speed: PrefillSpeed,
        shape: ModelShape,
        kv_nbytes_per_token: int = 0,
        kv_bytes_per_second: float = float("inf"),
        sequence_seconds: float = 0.0,
    ) -> None:
        self._shape = shape
        self._prefill = PrefillModel.of(speed, shape, 1)
        attention = speed.attention_flops_per_second or speed.flops_per_second
        seeds = (speed.step_seconds, 1.0 / speed.flops_per_second, 1.0 / attention)
        per_token = kv_nbytes_per_token / kv_bytes_per_second
        self._cost = LearnedSum((*seeds, sequence_seconds, per_token))
        self._linear: dict[int, float] = {}  # tokens of a step to its operations: there are few

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds of a step, an operation of matrices, one of attention, a sequence, and a token
        whose KV is read."""
        return self._cost.coefficients

    def seconds(self, num_new: Sequence[int], num_context: Sequence[int]) -> float:
        """Return the predicted seconds of a step; 0 for one without sequences.

        Args:
            num_new: tokens to compute, by sequence. num_context: tokens before them.
        """
        return self._cost.seconds(self._terms(num_new, num_context)) if num_new else 0.0

    def fit(
        self, steps: Sequence[tuple[Sequence[int], Sequence[int]]], seconds: Sequence[float]
    ) -> None:
        """Learn from measured steps at once; see `LearnedSum.fit`.

        Args:
            steps: the arguments of `seconds`, for each.
        """
        self._cost.fit([self._terms(*step) for step in steps], seconds)

    def _terms(self, num_new: Sequence[int], num_context: Sequence[int]) -> list[float]:
        num_tokens = sum(num_new)
        linear = self._linear.get(num_tokens)
        if linear is None:
            linear = float(self._prefill.step_flops(float(num_tokens)))
            self._linear[num_tokens] = linear
        new = np.array(num_new, dtype=np.float64)
        context = np.array(num_context, dtype=np.float64)
        attention = float(self._shape.attention_flops(new, context).sum())
        return [1.0, linear, attention, float(len(num_new)), float(sum(num_context))]
