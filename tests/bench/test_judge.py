"""The verdict, on times that a known machine would have given."""

from dataclasses import replace

import pytest

from kvtiers.bench.judge import Calibrated, best_split, comparable_lengths, judge, spread_of
from kvtiers.bench.measure import SPLIT, Measured
from kvtiers.bench.plan import MeasuredPlan
from kvtiers.cost.shapes import model_shape
from kvtiers.engines.reference.shape import ReferenceShape

PLAN = MeasuredPlan(
    "made up",
    ReferenceShape(4, 64, 4, 2, 16, 176, 512),
    lengths=(256, 512, 1024, 2048, 4096),
    num_repeats=3,
    tiers=("dram", "nvme"),
    num_stages=4,
)
FLOPS = model_shape(PLAN.shape.to_hf_config()).prefill_flops
FLOPS_PER_SECOND = 1e10
NBYTES_PER_SECOND = {"dram": 4e9, "nvme": 1.15e7}
NOISE = (0.99, 1.0, 1.02)


def times(change=lambda point: point):
    points = []
    for num_tokens in PLAN.lengths:
        for repeat, noise in enumerate(NOISE):
            compute = noise * (0.002 + float(FLOPS(num_tokens)) / FLOPS_PER_SECOND)
            points.append(Measured("recompute", num_tokens, repeat, compute, 0, 0.0, compute, 7))
            num = (num_tokens - 1) // PLAN.block_size
            for tier, speed in NBYTES_PER_SECOND.items():
                load = noise * (0.001 + num * PLAN.block_nbytes / speed)
                rest = 0.002 + float(FLOPS(num_tokens - 32 * num, 32 * num) / FLOPS_PER_SECOND)
                points.append(Measured(tier, num_tokens, repeat, load + rest, num, load, rest, 7))
    return [change(point) for point in points]


def test_a_machine_that_keeps_to_the_model_is_predicted_on_lengths_not_seen():
    verdict = judge(PLAN, times(), complete=True)
    judged = [c for c in verdict.comparisons if not c.fitted]
    assert {c.num_tokens for c in judged} == {512, 2048}
    assert all(c.error < 0.03 for c in verdict.comparisons)
    assert verdict.median_error < 0.03
    assert verdict.allowed_error == pytest.approx(0.1)
    assert verdict.calibrated["flops_per_second"] == pytest.approx(FLOPS_PER_SECOND, rel=0.1)


def test_lengths_that_were_not_fitted_to_do_not_teach():
    def spoilt(point):
        strange = point.num_tokens not in PLAN.fitted_lengths
        factor = 5.0 if strange else 1.0
        return replace(
            point,
            ttft_seconds=factor * point.ttft_seconds,
            load_seconds=factor * point.load_seconds,
            rest_seconds=factor * point.rest_seconds,
        )

    clean, verdict = judge(PLAN, times(), True), judge(PLAN, times(spoilt), True)
    assert verdict.calibrated == clean.calibrated
    assert verdict.median_error == pytest.approx(0.8, abs=0.02)


def test_crossovers_agree_with_the_machine():
    verdict = judge(PLAN, times(), complete=True)
    dram, nvme = verdict.crossovers
    assert dram.measured_tokens == 256  # from the first length on
    # A token: 1 KiB at 11.5 MB/s, 89 us; (369 + 0.512 n) kFLOP at 10 GFLOP/s: equal at 1016.
    assert nvme.measured_tokens == pytest.approx(1016, rel=0.1)
    assert nvme.predicted_tokens == pytest.approx(nvme.measured_tokens, rel=0.15)


def test_the_planner_of_a_calibrated_model_has_little_regret():
    verdict = judge(PLAN, times(), complete=True)
    assert len(verdict.regrets) == 2 * len(PLAN.lengths)
    assert {r.chosen for r in verdict.regrets} >= {"recompute", "reload"}
    assert all(r.regret < 0.05 for r in verdict.regrets if r.regret is not None)


def test_splits_are_measured_where_load_and_computation_are_alike():
    lengths = comparable_lengths(Calibrated(PLAN, times()), "nvme")
    assert 1024 in lengths
    assert 4096 not in lengths
    for num_tokens in lengths:
        assert 0 < best_split(PLAN, times(), num_tokens) < (num_tokens - 1) // 32
    assert comparable_lengths(Calibrated(PLAN, times()), "dram") == []


def split_of(num_blocks, seconds, repeat=0):
    return Measured(SPLIT, 1024, repeat, seconds, num_blocks, 0.0, seconds, 7)


def test_the_speed_of_the_moment_decides_how_much_is_loaded():
    seconds = next(p.ttft_seconds for p in times() if (p.way, p.num_tokens) == ("recompute", 1024))
    loaded = [
        best_split(PLAN, [*times(), split_of(0, factor * seconds)], 1024)
        for factor in (0.5, 1.0, 2.0)
    ]
    assert loaded == sorted(set(loaded))  # the slower the machine computes, the more


def test_the_gain_of_a_split_is_over_the_better_pure_choice_of_its_round():
    first = [split_of(0, 1.5), split_of(31, 1.2), split_of(14, 0.8)]
    second = [split_of(0, 3.0, 1), split_of(31, 1.2, 1), split_of(14, 1.0, 1)]
    third = [split_of(0, 1.0, 2), split_of(31, 1.2, 2), split_of(14, 0.5, 2)]
    points = times() + first + second + third
    (found,) = judge(PLAN, points, complete=True).splits
    assert found.gain == pytest.approx(1.5)
    assert (found.num_loaded_blocks, found.num_blocks, found.num_rounds) == (14, 31, 3)
    assert judge(PLAN, times() + first[:2], complete=True).splits == ()


def test_too_little_is_no_model():
    few = [point for point in times() if point.num_tokens == 256]
    with pytest.raises(ValueError, match="two lengths"):
        judge(PLAN, few, complete=False)


def test_the_spread_of_one_is_none():
    assert spread_of([2.0]) == 0.0
    assert spread_of([1.0, 2.0, 3.0]) == pytest.approx(0.5)
