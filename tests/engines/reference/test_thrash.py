"""An engine thrashes where all the signs are there for long enough, and only there."""

import pytest

from kvtiers.cost.preempt import PreemptMode
from kvtiers.engines.reference.thrash import ADVICE, ThrashDetector

from .engines import engine_of, request_of, run, settings_of, tiers_of
from .machine import Moody

THRASHING = {
    "kv_use": 0.95,
    "num_preempted": 1,
    "num_waiting": 3,
    "num_tokens": 100,
    "num_again": 20,
}


def detector(num_steps=64, *, has_tiers=False, **row):
    found = ThrashDetector(has_tiers=has_tiers)
    for _ in range(num_steps):
        found.see(**{**THRASHING, **row})
    return found


def test_all_signs_together_are_advised_against_in_order():
    assert detector().advice == ADVICE
    assert detector(has_tiers=True).advice == ADVICE[:3] + ADVICE[4:]


@pytest.mark.parametrize(
    "row", [{"kv_use": 0.7}, {"num_preempted": 0}, {"num_waiting": 0}, {"num_again": 9}]
)
def test_one_sign_that_is_missing_is_enough_to_say_nothing(row):
    assert not detector(**row).thrashes


def test_a_burst_is_not_a_state_and_what_is_past_is_forgotten():
    assert not detector(63).thrashes
    found = detector(200)
    assert found.thrashes
    for _ in range(64):
        found.see(kv_use=0.5, num_preempted=0, num_waiting=0, num_tokens=100, num_again=0)
    assert not found.advice


def test_swapped_requests_wait_too():
    """All of whose KV was lost below, so that they are computed again and again."""
    knobs = {"watermark": 0.0, "preemption": PreemptMode.SWAP, "prefix_caching": False}
    engine = engine_of(settings_of(20, max_num_seqs=4, **knobs), tiers_of())
    Moody(engine.runner.connector, 4).moods.extend(["nothing"] * 10_000)
    for idx in range(4):
        engine.add(request_of(f"r{idx}", 8, 56))
    reports = run(engine)
    assert any(report.advice for report in reports)
    assert {report.gauges.num_waiting for report in reports} == {0}


def thrashing_engine(config=None):
    engine = engine_of(settings_of(20, watermark=0.0), config)
    for idx in range(60):
        engine.add(request_of(f"r{idx}", 8, 50))
    return engine


def test_thrashing_is_seen_and_the_advice_is_in_order():
    engine = thrashing_engine()
    advice = [report.advice for report in run(engine) if report.advice]
    assert advice
    assert advice[0] == ADVICE
    words = ("max_num_seqs", "max_model_len", "fp8", "lower tier", "scale out")
    assert all(word in line for word, line in zip(words, ADVICE, strict=True))
    assert engine.gauges.num_preemptions > 10


def test_an_engine_with_a_lower_tier_is_not_told_to_get_one():
    engine = thrashing_engine(tiers_of(mode="never", dram="32KiB"))
    for report in run(engine):
        assert not any("lower tier" in line for line in report.advice)


def test_admitting_less_ends_the_thrashing():
    engine = engine_of(settings_of(20, watermark=0.0, max_num_seqs=1))
    for idx in range(20):
        engine.add(request_of(f"r{idx}", 8, 50))
    assert not any(report.advice for report in run(engine))
    assert engine.gauges.num_preemptions == 0
