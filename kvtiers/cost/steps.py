"""How long an engine step takes that computes tokens of several requests."""

from __future__ import annotations

from collections.abc import Sequence

from kvtiers.cost.learning import LearnedSum
from kvtiers.cost.prefill import ModelShape, PrefillModel, PrefillSpeed


class StepModel:
    """Predict ``t_step + alpha * linear + beta * attention + gamma * KV read + delta * sequences``,
    and ``epsilon`` more where it computes prompts.

    The terms of `PrefillModel`, summed over a step's requests, and two more: a sequence has work
    of its own, such as sampling; and a step of decodes only has kernels, or a graph, of its own.

    Args:
        speed: a seed. sequence_seconds: of one sequence beside its tokens.
        prompt_seconds: of a step with more tokens than sequences, beside those tokens. Of both, 0
            means none, for ever.
    """

    def __init__(
        self,
        speed: PrefillSpeed,
        shape: ModelShape,
        sequence_seconds: float = 0.0,
        prompt_seconds: float = 0.0,
    ) -> None:
        self._prefill = PrefillModel.of(speed, shape, 1)
        more = sequence_seconds, prompt_seconds
        self._cost = LearnedSum((*self._prefill.coefficients, *more))

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds of a step, an operation of matrices, one of attention, an element of KV that is
        read, a sequence, and of computing prompts at all."""
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

    def _terms(self, num_new: Sequence[int], num_context: Sequence[int]) -> tuple[float, ...]:
        prompts = float(sum(num_new) > len(num_new))
        return (*self._prefill.step_terms(num_new, num_context), float(len(num_new)), prompts)
