"""Each knob of the engine does what is said of it, turned up and turned down."""

import pytest

from kvtiers.cost.preempt import PreemptMode
from kvtiers.engines.reference.settings import Policy

from .engines import big_engine, decoding, engine_of, hashes_of, request_of, run, settings_of

STEP_SECONDS = 0.005  # of the machine that engines run on here, whatever the step computes
RECOMPUTE = PreemptMode.RECOMPUTE


def served_by(reports):
    return {it.request_id: it for report in reports for it in report.finished}


def p99(values):
    return sorted(values)[int(0.99 * (len(values) - 1))]


def test_small_chunks_add_what_a_step_costs_anyway():
    seconds = {}
    for budget in (8192, 2048):
        engine = big_engine(budget)
        engine.add(request_of("r", 30_000, 1))
        run(engine)
        seconds[budget] = engine.now
    assert seconds[2048] - seconds[8192] == pytest.approx((15 - 4) * STEP_SECONDS)


def crowd(max_num_seqs):
    """400 requests of 32 tokens in the end; the KV holds 60 of them."""
    knobs = {"watermark": 0.0, "max_num_batched_tokens": 512, "preemption": RECOMPUTE}
    engine = engine_of(settings_of(60 * 8, max_num_seqs=max_num_seqs, **knobs))
    for idx in range(400):
        engine.add(request_of(f"r{idx}", 8, 24))
    reports = run(engine)
    return engine, reports


def test_more_sequences_raise_throughput_while_kv_lasts():
    few, _ = crowd(6)
    many, _ = crowd(60)
    assert many.now < few.now
    assert many.gauges.num_preemptions == few.gauges.num_preemptions == 0


def test_256_sequences_where_kv_holds_60_mean_thrashing_and_not_throughput():
    """All the signals: full KV, a rising counter, a queue, a worse tail, and less done."""
    (right, calm), (wrong, hurt) = crowd(60), crowd(256)
    assert not any(report.advice for report in calm)
    assert any(report.advice for report in hurt)
    assert wrong.now > right.now
    busy = [report for report in hurt if report.gauges.num_waiting]
    assert sum(report.gauges.kv_use for report in busy) / len(busy) > 0.9
    counter = [report.gauges.num_preemptions for report in busy]
    assert counter == sorted(counter)
    assert counter[-1] > 100
    assert wrong.scheduler.num_swaps == 0
    for what in ("e2e_seconds", "tpot_seconds"):
        tails = [
            p99([getattr(it, what) for it in served_by(reports).values()])
            for reports in (calm, hurt)
        ]
        assert tails[1] > tails[0]
    again = sum(it.num_recomputed_tokens for it in served_by(hurt).values())
    assert again > 0.1 * sum(sum(report.num_tokens.values()) for report in hurt)


def test_a_chunk_threshold_up_takes_fewer_steps_and_down_bounds_itl():
    steps, itl = {}, {}
    for threshold in (256, 4096):
        engine = big_engine(long_prefill_threshold=threshold, max_num_seqs=32)
        decoding(engine, 8)
        engine.add(request_of("long", 16_000, 1))
        reports = run(engine)
        steps[threshold] = next(i for i, r in enumerate(reports) if "long" in r.first_tokens)
        itl[threshold] = max(gap for report in reports for gap in report.itl_seconds)
    assert steps[4096] < steps[256]
    assert itl[256] < itl[4096]


@pytest.mark.parametrize("policy", Policy)
def test_priority_may_starve_the_low_and_first_come_does_not(policy):
    engine = engine_of(settings_of(40, max_num_seqs=2, policy=policy))
    for idx in range(3):
        engine.add(request_of(f"urgent{idx}", 8, 4))
    engine.add(request_of("low", 8, 4, priority=9))
    served = []
    for idx in range(3, 60):
        engine.add(request_of(f"urgent{idx}", 8, 4))
        served += [it.request_id for it in engine.step().finished]
    assert len(served) > 20
    assert ("low" in served) == (policy is Policy.FCFS)
    assert "low" in served_by(run(engine)) or "low" in served


def test_without_prefix_caching_all_is_computed_again():
    computed = {}
    for on in (True, False):
        engine = engine_of(settings_of(40, prefix_caching=on))
        for name in ("one", "two"):
            engine.add(request_of(name, 24, 1, block_hashes=hashes_of(0, 6)))
            computed[on] = run(engine)[-1].finished[0].num_computed_tokens
    assert computed == {True: 4, False: 24}


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_speculative_tokens_are_faster_if_accepted_and_wasted_if_not(acceptance):
    seconds, computed = {}, {}
    for num in (0, 3):
        knobs = settings_of(max_num_batched_tokens=64, num_speculative_tokens=num)
        engine = engine_of(knobs, acceptance=acceptance)
        engine.add(request_of("r", 8, 41))
        computed[num] = served_by(run(engine))["r"].num_computed_tokens
        seconds[num] = engine.now
    assert (seconds[3] < seconds[0]) == (acceptance == 1.0)
    # 40 decodes of 4 tokens each, but the last ones try no more than may still be generated.
    assert computed == {0: 48, 3: 48 if acceptance else 8 + 37 * 4 + 3 + 2 + 1}
