"""The time that an engine needs to compute the KV of new tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtiers.cost.learning import LearnedSum

Float64s = npt.NDArray[np.float64]

# One H100 (989 TFLOP/s dense bf16) at a utilisation of 0.6: published TTFTs of Llama-3.1-8B imply
# 0.64 at 10k tokens to 0.59 at 100k (vLLM's offloading article, January 2026).
SEED_FLOPS_PER_SECOND: Final = 0.6 * 989e12
# Scheduling, launches and sampling of one step; an order of magnitude, not measured.
SEED_STEP_SECONDS: Final = 0.005


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides how many operations a token costs.

    Attributes:
        num_layers: layers with attention.
        num_query_heads: query heads a layer; KV heads do not matter for operations.
        head_size: elements of one head.
        linear_params: weights that one token is multiplied with, without the embedding and the
            output head (which only a prompt's last token needs).
    """

    num_layers: int
    num_query_heads: int
    head_size: int
    linear_params: int

    def prefill_flops(self, n: npt.ArrayLike, context: npt.ArrayLike = 0) -> Float64s:
        """Return the operations to compute ``n`` new tokens after ``context`` tokens, causal.

        ``2 P n + 4 L H d (n c + n^2 / 2)``: a multiply and an add per weight and token; per pair
        of a query and a key it sees, and per layer and head, ``2 d`` for the score and ``2 d`` for
        the weighted value. Without context that is the usual ``2 P n + 2 L H d n^2``. The sum over
        the chunks of a prompt equals the whole: chunking costs steps, not operations.

        Args:
            n: new tokens, a number or an array. context: tokens before them; broadcasts.
        """
        new = np.asarray(n, dtype=np.float64)
        pairs = new * (np.asarray(context, dtype=np.float64) + 0.5 * new)
        attention = 4.0 * self.num_layers * self.num_query_heads * self.head_size
        return np.asarray(2.0 * self.linear_params * new + attention * pairs)


# Llama-3.1-8B, for a model whose shape is unknown: the speed is learnt, so that only the ratio of
# the linear to the quadratic term is guessed.
FALLBACK_SHAPE: Final = ModelShape(
    num_layers=32, num_query_heads=32, head_size=128, linear_params=6_979_321_856
)


class PrefillModel:
    """Predict prefill time as ``steps * step_seconds + operations / flops_per_second``.

    The arguments are seeds: they hold until `observe` has corrected them. Under tensor
    parallelism ``flops_per_second`` is that of all ranks together.

    Args:
        step_seconds: time of an engine step beside its operations, >= 0; 0 means none, for ever.
        flops_per_second: operations per second that prefill reaches, > 0.
        shape: of the model.
        max_tokens_per_step: the engine's token budget of a step: longer prefills are chunked.
    """

    def __init__(
        self,
        step_seconds: float,
        flops_per_second: float,
        shape: ModelShape,
        max_tokens_per_step: int,
    ) -> None:
        if not 0 < flops_per_second < math.inf:
            raise ValueError(f"{flops_per_second} operations per second; must be > 0 and finite")
        if max_tokens_per_step < 1:
            raise ValueError(f"a step of {max_tokens_per_step} tokens computes nothing")
        self.shape = shape
        self.max_tokens_per_step = max_tokens_per_step
        self._cost = LearnedSum((step_seconds, 1.0 / flops_per_second))

    @property
    def step_seconds(self) -> float:
        """Time of an engine step beside its operations, as known now."""
        return self._cost.coefficients[0]

    @property
    def flops_per_second(self) -> float:
        """Operations per second, as known now."""
        return 1.0 / self._cost.coefficients[1]

    @property
    def num_observed(self) -> int:
        """How many engine steps were learnt from."""
        return self._cost.num_observed

    def seconds(self, n: npt.ArrayLike, context: npt.ArrayLike = 0) -> Float64s:
        """Return the predicted seconds to compute ``n`` tokens after ``context``; broadcasts."""
        new = np.asarray(n, dtype=np.float64)
        step_seconds, seconds_per_flop = self._cost.coefficients
        num_steps = np.ceil(new / self.max_tokens_per_step)
        flops = self.shape.prefill_flops(new, context)
        return np.asarray(num_steps * step_seconds + flops * seconds_per_flop)

    def observe(self, step_flops: float, step_tokens: int, seconds: float) -> None:
        """Learn from one engine step.

        Args:
            step_flops: operations of all requests in the step; see `ModelShape.prefill_flops`.
            step_tokens: tokens of the step; a step without tokens ran no model and is left out.
            seconds: from the step's start to its end.
        """
        if step_tokens > 0 and step_flops > 0:
            self._cost.observe((1.0, step_flops), seconds)
