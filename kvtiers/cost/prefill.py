"""The time that an engine needs to compute the KV of new tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtiers.cost.learning import LearnedSum

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides how many operations a token costs, and what a step reads.

    Only the first four are needed; without the others there is no window, every weight that a
    token uses is read in every step, and nothing is known of KV.

    Attributes:
        num_layers: layers with attention.
        num_query_heads: query heads a layer; KV heads do not matter for operations.
        head_size: elements of a query's and a key's head.
        linear_params: weights that one token is multiplied with, without the embedding and the
            output head (which only a prompt's last token needs).
        value_head_size: elements of a value's head; 0: as many as a key's.
        num_window_layers: of `num_layers`, those that look back `window` tokens only.
        window: tokens; 0 without such layers.
        expert_params: weights of all routed experts; a token uses some of them.
        active_expert_params: of `linear_params`, those that lie in routed experts.
        head_params: weights of the output head, read in every step.
        embedding_params: weights of the embedding, of which a token needs one row; 0 where the
            output head is the same matrix.
        hidden_size: elements that ranks exchange for one token.
        kv_elements_per_token: of all layers, each kept for every token.
        num_kv_heads: into which tensor parallelism divides KV; 0: every rank keeps all of it.
    """

    num_layers: int
    num_query_heads: int
    head_size: int
    linear_params: int
    value_head_size: int = 0
    num_window_layers: int = 0
    window: int = 0
    expert_params: int = 0
    active_expert_params: int = 0
    head_params: int = 0
    embedding_params: int = 0
    hidden_size: int = 0
    kv_elements_per_token: int = 0
    num_kv_heads: int = 0

    @property
    def num_params(self) -> int:
        """All weights of the model, without norms and biases."""
        inactive = self.expert_params - self.active_expert_params
        return self.linear_params + inactive + self.head_params + self.embedding_params

    def linear_flops(self, n: npt.ArrayLike) -> Float64s:
        """Return ``2 P n``: a multiply and an add per weight and new token."""
        return np.asarray(2.0 * self.linear_params * np.asarray(n, dtype=np.float64))

    def attention_flops(self, n: npt.ArrayLike, context: npt.ArrayLike = 0) -> Float64s:
        """Return the operations of attention for ``n`` new tokens after ``context`` tokens.

        Per pair of a query and a key it sees, and per layer and head, ``2 d`` for the score and
        ``2 d_v`` for the weighted value. A token sees all before it, ``n c + n^2 / 2`` pairs, or
        the last `window` ones.
        """
        start = np.asarray(context, dtype=np.float64)
        end = start + np.asarray(n, dtype=np.float64)
        per_pair = 2.0 * self.num_query_heads * (self.head_size + self._value_head_size)
        pairs = 0.5 * (end - start) * (end + start) * (self.num_layers - self.num_window_layers)
        if self.num_window_layers:
            seen = _windowed_pairs(end, self.window) - _windowed_pairs(start, self.window)
            pairs = pairs + self.num_window_layers * seen
        return np.asarray(per_pair * pairs)

    def prefill_flops(self, n: npt.ArrayLike, context: npt.ArrayLike = 0) -> Float64s:
        """Return the operations to compute ``n`` new tokens after ``context`` tokens, causal.

        Without a window ``2 P n + 4 L H d (n c + n^2 / 2)``; without context the usual
        ``2 P n + 2 L H d n^2``. The sum over the chunks of a prompt equals the whole: chunking
        costs steps, not operations.

        Args:
            n: new tokens, a number or an array. context: tokens before them; broadcasts.
        """
        return np.asarray(self.linear_flops(n) + self.attention_flops(n, context))

    def params_read(self, n: npt.ArrayLike) -> Float64s:
        """Return the weights that a step of ``n`` tokens reads.

        All but those of routed experts that no token has chosen: with ``E`` experts of which a
        token uses ``k``, chosen at random, ``1 - (1 - k / E)^n`` of them are read.
        """
        always = self.linear_params - self.active_expert_params + self.head_params
        if not self.expert_params:
            return np.full_like(np.asarray(n, dtype=np.float64), always)
        unused = 1.0 - self.active_expert_params / self.expert_params
        chosen = 1.0 - np.power(unused, np.asarray(n, dtype=np.float64))
        return np.asarray(always + self.expert_params * chosen)

    def kv_elements_read(self, n: npt.ArrayLike, context: npt.ArrayLike = 0) -> Float64s:
        """Return the KV that one step of ``n`` new tokens after ``context`` tokens reads.

        Attention reads the keys and values of all tokens that its queries see, once: of a decode,
        and of what a reload leaves, that is most of its work.
        """
        new = np.asarray(n, dtype=np.float64)
        end = np.asarray(context, dtype=np.float64) + new
        share = self.num_window_layers / self.num_layers
        seen = (1.0 - share) * end + share * np.minimum(end, self.window + new)
        return np.asarray(np.where(new > 0, self.kv_elements_per_token * seen, 0.0))

    def step_sums(self, num_new: Sequence[int], num_context: Sequence[int]) -> tuple[float, float]:
        """Return the operations of attention, and the KV elements read, of one step of several
        requests: the sums of `attention_flops` and `kv_elements_read`.

        Without a window they follow from sums of whole numbers, which for some tens of requests
        take a tenth of what arrays do.

        Args:
            num_new: tokens to compute, by request. num_context: tokens before them.
        """
        if self.num_window_layers:
            attention = float(self.attention_flops(num_new, num_context).sum())
            return attention, float(self.kv_elements_read(num_new, num_context).sum())
        if len(num_new) == sum(num_new) and min(num_new, default=0):  # decodes only
            end = sum(num_context) + len(num_new)
            twice_pairs = 2 * end - len(num_new)
        else:
            rows = [(n, n + c) for n, c in zip(num_new, num_context, strict=True) if n]
            end = sum(reached for _, reached in rows)
            twice_pairs = sum(n * (2 * reached - n) for n, reached in rows)
        per_pair = 2.0 * self.num_query_heads * (self.head_size + self._value_head_size)
        return 0.5 * per_pair * twice_pairs * self.num_layers, float(
            self.kv_elements_per_token * end
        )

    def kv_nbytes_per_token(self, element_nbytes: float = 2, tensor_parallel_size: int = 1) -> int:
        """Return the KV bytes that one rank keeps of a token over all layers.

        Ranks share KV heads, at least one each; KV that has none (latent attention) is on all.

        Args:
            element_nbytes: 2 for bf16, 1 for fp8: of the cache, which need not be the weights'.
        """
        if not self.num_kv_heads:
            return int(self.kv_elements_per_token * element_nbytes)
        of_rank = math.ceil(self.num_kv_heads / tensor_parallel_size)
        return int(self.kv_elements_per_token * of_rank // self.num_kv_heads * element_nbytes)

    @property
    def _value_head_size(self) -> int:
        return self.value_head_size or self.head_size


def _windowed_pairs(end: Float64s, window: int) -> Float64s:
    """Return how many pairs the first ``end`` tokens form, each with the last `window` ones."""
    inside = np.minimum(end, window)
    return np.asarray(0.5 * inside * inside + (end - inside) * window)


# Llama-3.1-8B, for a model whose shape is unknown: the speed is learnt, so that only the ratio of
# the linear to the quadratic term is guessed.
FALLBACK_SHAPE: Final = ModelShape(
    num_layers=32, num_query_heads=32, head_size=128, linear_params=6_979_321_856
)


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """What is believed of an engine's speed before its steps are measured.

    Attributes:
        step_seconds: of an engine step beside its operations, >= 0; 0 means none, for ever.
        flops_per_second: of the layers' matrices, over all ranks, > 0.
        attention_flops_per_second: of attention, over all ranks; 0: as of the matrices.
        flops_per_byte: operations that take as long as reading one byte of weights; 0 where
            reading weights is free. A ratio of the machine, not learnt.
        weight_element_nbytes: bytes of one weight.
        kv_bytes_per_second: at which attention reads keys and values, over all ranks; 0 where
            reading them is free, for ever.
        kv_element_nbytes: bytes of an element of those.
    """

    step_seconds: float
    flops_per_second: float
    attention_flops_per_second: float = 0.0
    flops_per_byte: float = 0.0
    weight_element_nbytes: float = 2.0
    kv_bytes_per_second: float = 0.0
    kv_element_nbytes: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.flops_per_second < math.inf:
            raise ValueError(
                f"{self.flops_per_second} operations per second; must be > 0 and finite"
            )


@dataclass(frozen=True, slots=True)
class MeasuredPrefill:
    """One prompt that an engine computed with nothing else to do.

    Attributes:
        num_tokens: computed, in as few steps as the budget allows. num_context_tokens: before
            them, whose KV was there. seconds: from the first step's start to the last one's end.
    """

    num_tokens: int
    num_context_tokens: int
    seconds: float


class PrefillModel:
    """Predict ``steps * t_step + alpha * linear + beta * attention + gamma * KV that is read``.

    Linear and attention count operations. A step multiplies at least as long as it takes to read
    its weights. The speed is a seed: it holds until `observe` or `fit` has corrected it.

    Args:
        step_seconds, flops_per_second: see `PrefillSpeed`, where the rest is as by default.
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
        self._start(PrefillSpeed(step_seconds, flops_per_second), shape, max_tokens_per_step)

    @classmethod
    def of(cls, speed: PrefillSpeed, shape: ModelShape, max_tokens_per_step: int) -> PrefillModel:
        """Return the model of an engine that nothing was measured of."""
        model = cls(speed.step_seconds, speed.flops_per_second, shape, max_tokens_per_step)
        model._start(speed, shape, max_tokens_per_step)
        return model

    def _start(self, speed: PrefillSpeed, shape: ModelShape, max_tokens_per_step: int) -> None:
        if max_tokens_per_step < 1:
            raise ValueError(f"a step of {max_tokens_per_step} tokens computes nothing")
        self.shape = shape
        self.max_tokens_per_step = max_tokens_per_step
        self._flops_per_param_read = speed.flops_per_byte * speed.weight_element_nbytes
        self._linear: dict[int, float] = {}  # tokens of a step to its operations: there are few
        attention = speed.attention_flops_per_second or speed.flops_per_second
        reads = speed.kv_bytes_per_second
        per_kv_element = speed.kv_element_nbytes / reads if reads > 0 else 0.0
        self._cost = LearnedSum(
            (speed.step_seconds, 1.0 / speed.flops_per_second, 1.0 / attention, per_kv_element)
        )

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds of a step, an operation of matrices, one of attention, and an element of KV."""
        return self._cost.coefficients

    @property
    def step_seconds(self) -> float:
        """Time of an engine step beside its operations, as known now."""
        return self._cost.coefficients[0]

    @property
    def flops_per_second(self) -> float:
        """Operations per second of the layers' matrices, as known now."""
        return 1.0 / self._cost.coefficients[1]

    @property
    def attention_flops_per_second(self) -> float:
        """Operations per second of attention, as known now."""
        return 1.0 / self._cost.coefficients[2]

    @property
    def seconds_per_kv_element(self) -> float:
        """Of keys and values that attention reads, as known now; 0 where that is free."""
        return self._cost.coefficients[3]

    @property
    def num_observed(self) -> int:
        """How many engine steps were learnt from."""
        return self._cost.num_observed

    def seconds(self, n: npt.ArrayLike, context: npt.ArrayLike = 0) -> Float64s:
        """Return the predicted seconds to compute ``n`` tokens after ``context``; broadcasts."""
        terms = zip(self._cost.coefficients, self._terms(n, context), strict=True)
        return np.asarray(sum(coefficient * term for coefficient, term in terms))

    def first_step_seconds(self, n: npt.ArrayLike, context: npt.ArrayLike = 0) -> Float64s:
        """Return the predicted seconds of the first step that `seconds` counts."""
        return self.seconds(np.minimum(n, self.max_tokens_per_step), context)

    def marginal_seconds(self, n: npt.ArrayLike, context: npt.ArrayLike = 0) -> Float64s:
        """Return the seconds that ``n`` more tokens add to steps that run anyway."""
        _, per_flop, per_attention_flop, _ = self._cost.coefficients
        attention = self.shape.attention_flops(n, context)
        return np.asarray(self.shape.linear_flops(n) * per_flop + attention * per_attention_flop)

    def added_seconds(
        self, n: npt.ArrayLike, context: npt.ArrayLike = 0, num_others: npt.ArrayLike = 0
    ) -> Float64s:
        """Return by how much ``n`` more tokens lengthen steps that run anyway; broadcasts.

        Args:
            num_others: tokens of each of these steps. What fits beside reading the weights, and
                they leave of it, costs nothing.
        """
        others = np.asarray(num_others)
        room = np.maximum(1, self.max_tokens_per_step - others)
        num_whole, rest = np.divmod(n, room)
        flops = num_whole * self.step_flops(room + others)
        flops = flops + self.step_flops(np.maximum(1, rest + others))
        usual = (num_whole + 1) * self.step_flops(np.maximum(1, others))
        _, per_flop, per_attention_flop, _ = self._cost.coefficients
        attention = self.shape.attention_flops(n, context) * per_attention_flop
        return np.asarray(np.maximum(flops - usual, 0.0) * per_flop + attention)

    def observe(
        self, step_flops: float, step_tokens: int, seconds: float, kv_elements_read: float = 0.0
    ) -> None:
        """Learn from one engine step.

        Args:
            step_flops: operations of all requests in the step; see `ModelShape.prefill_flops`.
            step_tokens: tokens of the step; a step without tokens ran no model and is left out.
            seconds: from the step's start to its end.
            kv_elements_read: by all requests; see `ModelShape.kv_elements_read`.
        """
        if step_tokens > 0 and step_flops > 0:
            attention = max(0.0, step_flops - float(self.shape.linear_flops(step_tokens)))
            linear = self._linear_flops(step_tokens)
            self._cost.observe((1.0, linear, attention, kv_elements_read), seconds)

    def fit(self, prompts: Sequence[MeasuredPrefill]) -> None:
        """Learn from many prefills at once, as of a calibration; see `LearnedSum.fit`."""
        computed = [prompt for prompt in prompts if prompt.num_tokens > 0]
        if computed:
            terms = [self._terms(p.num_tokens, p.num_context_tokens) for p in computed]
            rows = [[float(term) for term in row] for row in terms]
            self._cost.fit(rows, [prompt.seconds for prompt in computed])

    def step_terms(self, num_new: Sequence[int], num_context: Sequence[int]) -> tuple[float, ...]:
        """Return what the coefficients count, of one step of several requests.

        Args:
            num_new: tokens to compute, by request. num_context: tokens before them.
        """
        return 1.0, self._linear_flops(sum(num_new)), *self.shape.step_sums(num_new, num_context)

    def _linear_flops(self, tokens: int) -> float:
        """Return `step_flops`, which is asked for few numbers of tokens very often."""
        linear = self._linear.get(tokens)
        if linear is None:
            linear = self._linear[tokens] = float(self.step_flops(float(tokens)))
        return linear

    def _terms(
        self, n: npt.ArrayLike, context: npt.ArrayLike
    ) -> tuple[Float64s, Float64s, Float64s, Float64s]:
        """Return steps, operations of matrices and of attention, and KV elements read; see
        `step_flops`."""
        new = np.asarray(n, dtype=np.float64)
        num_whole = np.floor(new / self.max_tokens_per_step)
        rest = new - num_whole * self.max_tokens_per_step
        flops = num_whole * self.step_flops(self.max_tokens_per_step) + self.step_flops(rest)
        read = self._kv_elements_read(num_whole, rest, np.asarray(context, dtype=np.float64))
        return num_whole + (rest > 0), flops, self.shape.attention_flops(new, context), read

    def _kv_elements_read(self, num_whole: Float64s, rest: Float64s, context: Float64s) -> Float64s:
        """Return the KV elements that `num_whole` whole steps and one of the rest read.

        Each whole step is taken to read as much as the middle one, which is exact without windows.
        """
        size, read = self.max_tokens_per_step, self.shape.kv_elements_read
        whole = num_whole * read(size, context + (num_whole - 1) / 2 * size)
        return np.asarray(whole + read(rest, context + num_whole * size))

    def step_flops(self, tokens: npt.ArrayLike) -> Float64s:
        """Return a step's operations: those of its tokens, or what fits beside reading weights."""
        linear = self.shape.linear_flops(tokens)
        if not self._flops_per_param_read:
            return linear
        reading = self.shape.params_read(tokens) * self._flops_per_param_read
        return np.where(np.asarray(tokens) > 0, np.maximum(linear, reading), 0.0)
