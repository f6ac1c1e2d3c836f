"""Promises of `kvtiers.cost.prefill`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.cost.prefill import FALLBACK_SHAPE, PrefillModel

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
