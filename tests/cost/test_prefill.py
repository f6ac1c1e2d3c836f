"""Promises of `kvtiers.cost.prefill`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.cost.known_models import KNOWN_MODELS
from kvtiers.cost.prefill import FALLBACK_SHAPE, MeasuredPrefill, PrefillModel, PrefillSpeed

from .machine import H100_FLOPS_PER_SECOND, h100

tokens = st.integers(0, 1_000_000)


@given(n=tokens, context=tokens, cut=st.floats(0, 1))
def test_chunks_cost_as_many_operations_as_the_whole(n, context, cut):
    first = int(n * cut)
    flops = FALLBACK_SHAPE.prefill_flops
    chunked = flops(first, context) + flops(n - first, context + first)
    assert chunked == pytest.approx(float(flops(n, context)), rel=1e-9)


@given(n=tokens, context=tokens)
def test_more_tokens_and_more_context_never_take_less(n, context):
    model = h100()
    seconds = model.seconds(n, context)
    assert seconds >= 0
    assert model.seconds(n + 1, context) > seconds
    assert model.seconds(n, context + 1) >= seconds


def test_arrays_give_what_numbers_give():
    model = h100()
    n, context = np.array([0, 1, 8192, 8193]), np.array([0, 5, 100, 100_000])
    singly = [float(model.seconds(a, b)) for a, b in zip(n, context, strict=True)]
    assert model.seconds(n, context).tolist() == singly


def test_each_chunk_costs_a_step():
    model = h100(step_seconds=1.0)
    whole = [float(model.seconds(n)) for n in (0, 1, 8192, 8193, 30_000)]
    assert [int(seconds) for seconds in whole] == [0, 1, 1, 2, 4 + int(whole[4] - 4)]


def test_published_ttft_is_met_without_fixed_costs():
    """0.26 s for 10k tokens, Llama-3.1-8B on an H100 (vLLM's offloading article, January 2026)."""
    assert h100(step_seconds=0.0).seconds(10_000) == pytest.approx(0.26, rel=0.1)


def test_seeds_hold_until_a_step_is_observed():
    model = h100()
    assert model.step_seconds == pytest.approx(0.005)
    assert model.flops_per_second == pytest.approx(H100_FLOPS_PER_SECOND)
    assert model.num_observed == 0


def test_steps_without_tokens_teach_nothing():
    model = h100()
    model.observe(0.0, 0, 0.5)
    model.observe(1e12, 1, 0.0)
    model.observe(1e12, 1, float("nan"))
    assert model.num_observed == 0


def test_observed_steps_predict_lengths_not_observed():
    """The bound is the project's own: median error at most 10 % where nothing was fitted."""
    rng = np.random.default_rng(0)
    step_seconds, flops_per_second = 0.02, 1e14
    model = h100()
    for _ in range(60):
        n, context = int(rng.integers(64, 4096)), int(rng.integers(0, 8192))
        flops = float(model.shape.prefill_flops(n, context))
        model.observe(flops, n, (step_seconds + flops / flops_per_second) * rng.lognormal(0, 0.05))
    lengths = np.array([32, 512, 8192, 32_768, 131_072])
    truth = PrefillModel(step_seconds, flops_per_second, model.shape, 8192).seconds(lengths)
    assert np.median(np.abs(model.seconds(lengths) / truth - 1)) < 0.1


@pytest.mark.parametrize(("flops", "budget"), [(0.0, 1), (float("inf"), 1), (1e12, 0)])
def test_senseless_arguments_are_refused(flops, budget):
    with pytest.raises(ValueError, match=r"step|per second"):
        PrefillModel(0.0, flops, FALLBACK_SHAPE, budget)


class TestThreeTerms:
    """Matrices, attention and a step's own time are learnt apart."""

    truth = PrefillSpeed(0.01, 4e14, 1.5e14)

    def model(self, speed: PrefillSpeed | None = None) -> PrefillModel:
        return PrefillModel.of(speed or PrefillSpeed(0.005, 6e14), FALLBACK_SHAPE, 8192)

    def prompts(self, num: int, scatter: float, longest: int) -> list[MeasuredPrefill]:
        rng, truth = np.random.default_rng(0), self.model(self.truth)
        found = []
        for _ in range(num):
            n = int(np.exp(rng.uniform(np.log(16), np.log(longest))))
            context = int(rng.integers(0, 40_000))
            seconds = float(truth.seconds(n, context)) * rng.lognormal(0, scatter)
            found.append(MeasuredPrefill(n, context, seconds))
        return found

    def check(self, model: PrefillModel, bound: float) -> None:
        lengths = np.array([100, 1000, 10_000, 50_000, 120_000])
        truth = self.model(self.truth)
        for context in (0, 20_000):
            error = model.seconds(lengths, context) / truth.seconds(lengths, context) - 1
            assert np.abs(error).max() < bound

    def test_a_fit_finds_all_three(self):
        model = self.model()
        model.fit(self.prompts(60, 0.02, longest=30_000))
        self.check(model, 0.05)
        assert model.step_seconds == pytest.approx(0.01, rel=0.2)
        assert model.flops_per_second == pytest.approx(4e14, rel=0.1)
        assert model.attention_flops_per_second == pytest.approx(1.5e14, rel=0.1)

    def test_steps_one_by_one_find_all_three(self):
        model = self.model()
        for step in self.prompts(200, 0.05, longest=8192):
            n, context = step.num_tokens, step.num_context_tokens
            model.observe(float(FALLBACK_SHAPE.prefill_flops(n, context)), n, step.seconds)
        self.check(model, 0.15)

    def test_a_fit_of_nothing_changes_nothing(self):
        model = self.model()
        model.fit([MeasuredPrefill(0, 0, 1.0)])
        assert model.num_observed == 0
        assert model.step_seconds == 0.005


class TestReadingWeights:
    speed = PrefillSpeed(0.0, 8e14, flops_per_byte=8e14 / 3e12)

    def model(self, name: str = "llama-3.1-8b") -> PrefillModel:
        return PrefillModel.of(self.speed, KNOWN_MODELS[name].shape, 8192)

    def test_one_token_takes_as_long_as_reading_all_weights(self):
        shape = KNOWN_MODELS["llama-3.1-8b"].shape
        nbytes = 2 * (shape.linear_params + shape.head_params)
        assert self.model().seconds(1) == pytest.approx(nbytes / 3e12, rel=1e-4)

    def test_a_large_chunk_hides_the_reading(self):
        without = PrefillModel.of(PrefillSpeed(0.0, 8e14), self.model().shape, 8192)
        assert self.model().seconds(8192) == without.seconds(8192)

    def test_every_chunk_of_a_prompt_reads_anew(self):
        """8,193 tokens: one whole step, and a step that reads the weights for one token."""
        whole, one_more = (float(self.model().seconds(n)) for n in (8192, 8193))
        assert one_more - whole == pytest.approx(float(self.model().seconds(1, 8192)), rel=1e-6)

    def test_few_tokens_read_few_experts(self):
        shape = KNOWN_MODELS["mixtral-8x7b"].shape
        model = self.model("mixtral-8x7b")
        active = 2 * (shape.linear_params + shape.head_params) / 3e12
        everything = 2 * (shape.num_params - shape.embedding_params) / 3e12
        assert model.seconds(1) == pytest.approx(active, rel=1e-3)
        assert model.seconds(64) == pytest.approx(everything, rel=1e-3)

    @given(n=tokens, context=tokens)
    def test_more_tokens_never_take_less(self, n, context):
        model = self.model("mixtral-8x7b")
        assert 0 <= model.seconds(n, context) <= model.seconds(n + 1, context)

    def test_a_decode_step_teaches_what_it_read(self):
        """Steps that only read weights must not make prefill look slow."""
        model = self.model()
        before = float(model.seconds(8192))
        for _ in range(300):
            model.observe(float(model.shape.prefill_flops(1, 500)), 1, float(model.seconds(1, 500)))
        assert model.seconds(8192) == pytest.approx(before, rel=0.02)


class TestReadingKV:
    """Attention reads the keys and values of the context, whatever little it multiplies."""

    speed = PrefillSpeed(0.005, 8e14, kv_bytes_per_second=2e12)
    shape = KNOWN_MODELS["llama-3.1-8b"].shape

    def model(self, speed: PrefillSpeed | None = None) -> PrefillModel:
        return PrefillModel.of(speed or self.speed, self.shape, 8192)

    def test_one_token_after_a_long_context_takes_as_long_as_reading_it(self):
        model, free = self.model(), self.model(PrefillSpeed(0.005, 8e14))
        read = float(model.seconds(1, 100_000) - free.seconds(1, 100_000))
        assert read == pytest.approx(100_001 * 131_072 / 2e12)

    def test_every_step_reads_what_its_tokens_see(self):
        """Three steps, of 8,192, 8,192 and 100 tokens after 1,000."""
        model, free = self.model(), self.model(PrefillSpeed(0.005, 8e14))
        tokens = (1000 + 8192) + (1000 + 2 * 8192) + (1000 + 2 * 8192 + 100)
        read = float(model.seconds(2 * 8192 + 100, 1000) - free.seconds(2 * 8192 + 100, 1000))
        assert read == pytest.approx(tokens * 131_072 / 2e12)

    def test_layers_with_a_window_read_the_window(self):
        shape = replace(self.shape, num_window_layers=24, window=1024)
        whole, half = (float(s.kv_elements_read(1, 100_000)) for s in (self.shape, shape))
        assert half == pytest.approx(whole * (8 * 100_001 + 24 * 1025) / (32 * 100_001))

    @pytest.mark.parametrize("window", [0, 100])
    @given(rows=st.lists(st.tuples(st.integers(0, 3), tokens), max_size=20), decodes=st.booleans())
    def test_sums_of_a_step_are_those_of_its_requests(self, window, rows, decodes):
        shape = replace(self.shape, num_window_layers=8 if window else 0, window=window)
        new = [1 if decodes else n for n, _ in rows]
        context = [c for _, c in rows]
        attention, read = shape.step_sums(new, context)
        assert attention == pytest.approx(shape.attention_flops(new, context).sum(), rel=1e-12)
        assert read == pytest.approx(shape.kv_elements_read(new, context).sum(), rel=1e-12)

    def test_steps_one_by_one_find_it(self):
        """A reload leaves little to compute after much context: that is what must be learnt."""
        truth = self.model(PrefillSpeed(0.005, 8e14, kv_bytes_per_second=2e11))
        model, rng = self.model(), np.random.default_rng(0)
        for _ in range(100):
            n, context = int(rng.integers(1, 4096)), int(rng.integers(0, 30_000))
            n = 1 if rng.random() < 0.5 else n
            flops = float(self.shape.prefill_flops(n, context))
            read = float(self.shape.kv_elements_read(n, context))
            seconds = float(truth.seconds(n, context)) * rng.lognormal(0, 0.05)
            model.observe(flops, n, seconds, read)
        for n, context in ((1, 5000), (1, 30_000), (2000, 0), (4000, 20_000)):
            exact = float(truth.seconds(n, context))
            assert model.seconds(n, context) == pytest.approx(exact, rel=0.15)

    @given(n=tokens, context=tokens)
    def test_more_tokens_never_take_less(self, n, context):
        shape = replace(self.shape, num_window_layers=20, window=4096)
        model = PrefillModel.of(self.speed, shape, 8192)
        assert 0 <= model.seconds(n, context) <= model.seconds(n + 1, context) * (1 + 1e-12)


def test_first_step_is_the_first_chunk():
    model = h100()
    assert model.first_step_seconds(20_000, 100) == model.seconds(8192, 100)
    assert model.first_step_seconds(20, 100) == model.seconds(20, 100)


def test_marginal_time_leaves_out_what_runs_anyway():
    model = h100(step_seconds=1.0)
    assert model.marginal_seconds(16, 1000) == pytest.approx(float(model.seconds(16, 1000)) - 1.0)
