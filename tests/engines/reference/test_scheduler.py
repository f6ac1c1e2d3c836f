"""The scheduler does what is specified of serving engines, number by number."""

import pytest

from kvtiers.cost.links import LinkSeed
from kvtiers.cost.preempt import PreemptMode
from kvtiers.engines.reference.requests import State
from kvtiers.engines.reference.settings import EngineSettings, Policy
from kvtiers.model.errors import CapacityError, ConfigError

from .engines import (
    big_engine,
    decoding,
    engine_of,
    hashes_of,
    request_of,
    run,
    settings_of,
    tiers_of,
)


def test_decodes_come_first_and_prefills_get_the_rest():
    engine = big_engine()
    decoding(engine, 200)
    engine.add(request_of("whole", 4000))
    engine.add(request_of("long", 30_000))
    step = engine.step().num_tokens
    assert sum(num for name, num in step.items() if name[0] == "d") == 200
    assert step["whole"] == 4000  # of 7992
    assert step["long"] == 3992
    assert sum(step.values()) == 8192


def test_a_long_prompt_beside_decodes_gets_what_they_leave():
    engine = big_engine()
    decoding(engine, 200)
    engine.add(request_of("long", 30_000))
    assert engine.step().num_tokens["long"] == 7992
    left = 0
    while True:
        report = engine.step()
        left += report.num_tokens["long"]
        if "long" in report.first_tokens:
            break
    assert left == 22_008


@pytest.mark.parametrize(("budget", "num_steps"), [(8192, 4), (2048, 15)])
def test_a_prompt_alone_takes_so_many_steps(budget, num_steps):
    engine = big_engine(budget)
    engine.add(request_of("r", 30_000, 1))
    assert len(run(engine)) == num_steps


def test_chunks_that_hit_the_prefix_cache_skip_compute():
    engine = big_engine()
    hashes = hashes_of(0, 100)
    engine.add(request_of("first", 1600, 1, block_hashes=hashes))
    run(engine)
    engine.add(request_of("again", 1600, 1, block_hashes=hashes))
    (report,) = run(engine)
    assert report.num_tokens == {"again": 16}  # the last block: its output is wanted
    assert report.finished[0].num_local_tokens == 1584


def test_a_larger_budget_raises_throughput_and_worsens_itl():
    seconds, itl = {}, {}
    for budget in (512, 8192):
        engine = big_engine(budget, max_num_seqs=32)
        decoding(engine, 8, 60)
        engine.add(request_of("long", 20_000, 1))
        reports = run(engine)
        gaps = [gap for report in reports for gap in report.itl_seconds]
        itl[budget] = max(gaps)
        first = next(r for r in reports if "long" in r.first_tokens)
        seconds[budget] = first.started_at + first.seconds - reports[0].started_at
    assert seconds[8192] < seconds[512]
    assert itl[8192] > itl[512]


def test_a_threshold_bounds_the_chunk_of_a_long_prompt():
    engine = big_engine(long_prefill_threshold=1000)
    engine.add(request_of("long", 3500))
    engine.add(request_of("short", 700))
    steps = [engine.step().num_tokens for _ in range(4)]
    assert [step["long"] for step in steps] == [1000, 1000, 1000, 500]
    assert steps[0]["short"] == 700


def test_what_a_step_leaves_of_a_prompt_the_next_one_takes_whole():
    engine = big_engine(1000)
    engine.add(request_of("r", 1002, 1))
    assert [report.num_tokens for report in run(engine)] == [{"r": 1000}, {"r": 2}]


# -- who gives way --------------------------------------------------------------------


def grow_until_full(preemption=PreemptMode.RECOMPUTE, config=None, **more):
    """Three requests that fit at first, and do not once they have grown."""
    engine = engine_of(
        settings_of(18, watermark=0.0, preemption=preemption, **more.pop("knobs", {})), config
    )
    for idx in range(3):
        engine.add(request_of(f"r{idx}", 20, 12, **(more.get(f"r{idx}", {}))))
    while True:
        report = engine.step()
        if report.preempted:
            return engine, report


def test_the_last_admitted_gives_way_and_keeps_its_place():
    engine, report = grow_until_full()
    engine.add(request_of("late", 4, 1))
    assert report.preempted == ["r2"]
    assert report.swapped == []
    assert engine.state("r2") is State.WAITING
    assert engine.scheduler.queue[0].request_id == "r2"
    reports = run(engine)
    order = [name for report in reports for name in report.admitted]
    assert order == ["r2", "late"]
    served = {it.request_id: it for report in reports for it in report.finished}
    assert served["r2"].num_recomputes == 1
    assert served["r2"].num_recomputed_tokens >= 12


def test_recomputing_costs_a_prefill_over_the_prompt_and_what_was_generated():
    engine, _ = grow_until_full(knobs={"prefix_caching": False})
    num_known = engine.scheduler.queue[0].sequences[0].num_known
    reports = run(engine)
    assert 20 < num_known < 32
    assert next(r.num_tokens["r2"] for r in reports if "r2" in r.num_tokens) == num_known
    (served,) = (it for r in reports for it in r.finished if it.request_id == "r2")
    assert served.num_recomputed_tokens == num_known - 1  # the last one was never computed


def test_swapping_costs_the_link_in_both_directions():
    config = tiers_of(offload="lazy", mode="never")
    engine, _ = grow_until_full(PreemptMode.SWAP, config, knobs={"prefix_caching": False})
    num_full = (engine.scheduler.queue[0].sequences[0].num_known - 1) // 4
    moved = engine.runner.connector.counters
    engine.step()
    assert moved.value("kvtiers_blocks_offloaded_total", ("dram",)) == num_full
    assert moved.value("kvtiers_blocks_reloaded_total", ("dram",)) == 0
    run(engine)
    assert moved.value("kvtiers_blocks_reloaded_total", ("dram",)) == num_full


def test_the_least_urgent_gives_way_under_priority():
    knobs = {"policy": Policy.PRIORITY}
    _, report = grow_until_full(knobs=knobs, r0={"priority": 5})
    assert report.preempted == ["r0"]


@pytest.mark.parametrize("offload", ["eager", "lazy"])
def test_a_victim_that_is_computed_again_has_no_blocks_for_kvtiers_to_copy(offload):
    engine, _ = grow_until_full(config=tiers_of(offload=offload))
    state = engine.runner.connector._requests["r2"]
    assert (state.num_full, state.admitted, sum(map(len, state.block_ids))) == (0, False, 0)


def test_a_token_that_was_given_already_is_taken_back_from_who_gives_way():
    knobs = {"policy": Policy.PRIORITY, "watermark": 0.0}
    engine = engine_of(settings_of(17, **knobs))
    engine.add(request_of("low", 30, 34, priority=1))
    engine.step()
    engine.add(request_of("urgent", 31, 33))
    while not (report := engine.step()).preempted:
        pass
    assert (report.preempted, report.num_tokens) == (["low"], {"urgent": 1})
    run(engine)


def test_a_prompt_in_the_middle_that_gives_way_to_an_urgent_one_computes_nothing_more():
    """It was looked at before the one that takes its blocks: the less urgent came first."""
    knobs = {"policy": Policy.PRIORITY, "long_prefill_threshold": 2, "watermark": 0.0}
    engine = engine_of(settings_of(17, **knobs))
    engine.add(request_of("low", 48, 2, priority=1))
    engine.step()
    engine.add(request_of("urgent", 16, 12))
    while not (report := engine.step()).preempted:
        assert "low" in report.num_tokens
    assert report.preempted == ["low"]
    assert report.num_tokens == {"urgent": 1}
    run(engine)


def test_among_the_equally_urgent_the_last_admitted_gives_way():
    _, report = grow_until_full(knobs={"policy": Policy.PRIORITY}, r0={"priority": -1})
    assert report.preempted == ["r2"]


def test_nobody_gives_way_for_a_guess():
    knobs = {"watermark": 0.0, "num_speculative_tokens": 3, "max_num_batched_tokens": 80}
    engine = engine_of(settings_of(17, **knobs), acceptance=0.0)
    engine.add(request_of("short", 30, 2))
    engine.add(request_of("long", 34, 14))  # whose first guesses need a tenth block
    assert engine.step().admitted == ["short", "long"]
    assert engine.step().num_tokens == {"short": 1, "long": 1}
    run(engine)
    assert engine.gauges.num_preemptions == 0


@pytest.mark.parametrize("offload", ["eager", "lazy"])
def test_a_swapped_request_comes_back_before_newcomers_and_is_reloaded(offload):
    # Even where the user would rather recompute prompts.
    config = tiers_of(mode="never", offload=offload)
    engine, report = grow_until_full(PreemptMode.SWAP, config)
    assert report.swapped == report.preempted == ["r2"]
    assert engine.state("r2") is State.SWAPPED
    engine.add(request_of("late", 4, 1))
    reports = run(engine)
    back = next(idx for idx, report in enumerate(reports) if report.resumed)
    came = next(idx for idx, report in enumerate(reports) if report.admitted)
    assert back <= came
    served = {it.request_id: it for report in reports for it in report.finished}
    assert served["r2"].num_reloaded_tokens >= 12
    assert served["r2"].num_recomputed_tokens < 4  # what is behind its last full block
    assert served["r2"].num_swaps == 1
    assert not served["r2"].reloaded_by_tier  # which tells of the prompt, when it was new


def test_cost_asks_which_is_cheaper():
    """Copies that take for ever against computing, and the other way round."""
    links = dict.fromkeys(("hbm>dram", "dram>hbm"), LinkSeed(1.0, 1.0, 1e3))
    swaps = {}
    for name, more in (("slow", {"links": links}), ("fast", {})):
        config = tiers_of(offload="lazy")
        engine = engine_of(settings_of(18, watermark=0.0), config, **more)
        for idx in range(3):
            engine.add(request_of(f"r{idx}", 20, 12))
        run(engine)
        swaps[name] = engine.gauges.num_swaps
        assert engine.gauges.num_preemptions > 0
    assert swaps["slow"] == 0
    assert swaps["fast"] > 0


@pytest.mark.parametrize("mode", PreemptMode)
def test_a_stream_of_newcomers_starves_nobody(mode):
    """About as many as the engine can serve, for ever: neither large ones nor victims stay out."""
    engine = engine_of(settings_of(20, watermark=0.0, preemption=mode), tiers_of())
    waits, longest = {}, 0
    for idx in range(300):
        if idx % 3 == 0:
            waits[f"r{idx}"] = 0
            engine.add(request_of(f"r{idx}", *((40, 20) if idx % 30 == 0 else (8, 10))))
        engine.step()
        for name, num in waits.items():
            out = engine.state(name) in {State.WAITING, State.SWAPPED}
            waits[name] = num + 1 if out else 0
        longest = max(longest, *waits.values())
    assert engine.gauges.num_preemptions > 50
    assert longest < 40  # steps: twice those of a large one
    run(engine)


# -- who is admitted ------------------------------------------------------------------


def test_an_admission_leaves_the_watermark_free():
    engine = engine_of(settings_of(40, watermark=0.25, max_num_batched_tokens=400))
    for idx in range(5):
        engine.add(request_of(f"r{idx}", 40, 1))
    report = engine.step()
    assert report.admitted == ["r0", "r1", "r2"]  # 10 blocks each; 10 of 40 stay free


def test_nobody_is_admitted_once_the_budget_is_spent():
    engine = engine_of(settings_of(90))
    engine.add(request_of("all", 32, 2))
    engine.add(request_of("next", 8, 2))
    report = engine.step()
    assert (report.admitted, report.num_tokens) == (["all"], {"all": 32})
    assert engine.state("next") is State.WAITING


def test_no_more_sequences_than_the_knob_says():
    engine = engine_of(settings_of(90, max_num_seqs=3), tiers_of())
    engine.add(request_of("group", 4, 2, num_sequences=2))
    engine.add(request_of("one", 4, 2))
    engine.add(request_of("more", 4, 2))
    assert engine.step().admitted == ["group", "one"]


def test_a_tenant_gets_no_more_than_its_share():
    engine = engine_of(settings_of(80, tenant_share=0.5, max_num_batched_tokens=400))
    for idx in range(6):
        engine.add(request_of(f"greedy{idx}", 40, 2, tenant="greedy"))
    engine.add(request_of("other", 40, 2, tenant="other"))
    report = engine.step()
    assert report.admitted == ["greedy0", "greedy1", "greedy2", "greedy3", "other"]
    run(engine)


def test_a_request_larger_than_the_share_runs_alone():
    engine = engine_of(settings_of(80, tenant_share=0.1))
    engine.add(request_of("large", 60, 2, tenant="a"))
    engine.add(request_of("small", 8, 2, tenant="a"))
    assert engine.step().admitted == ["large"]
    run(engine)


# -- checks at the start --------------------------------------------------------------


def test_one_sequence_of_the_longest_context_must_fit():
    with pytest.raises(CapacityError) as error:
        EngineSettings(num_blocks=100, max_model_len=1601)
    for remedy in ("max_model_len of at most", "gpu_memory_utilization", "fp8", "tensor par"):
        assert remedy in str(error.value)
    with pytest.raises(CapacityError, match=r"needs 100 KV blocks .* has 99 above the watermark"):
        EngineSettings(num_blocks=100, max_model_len=1600)
    EngineSettings(num_blocks=101, max_model_len=1600)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_num_seqs": 33}, "some would never get on"),
        ({"num_speculative_tokens": 8}, "decode 54 tokens a step"),
        ({"watermark": 1.0}, "must be in"),
        ({"block_size": 0}, "must be at least 1"),
        ({"long_prefill_threshold": -1}, "must not be negative"),
    ],
)
def test_knobs_that_cannot_work_are_refused(knobs, message):
    with pytest.raises(ConfigError, match=message):
        settings_of(**knobs)


def test_requests_that_could_never_run_are_refused():
    engine = engine_of(settings_of(40), tiers_of())
    with pytest.raises(CapacityError, match="max_model_len is 64"):
        engine.add(request_of("long", 60, 5))
    with pytest.raises(CapacityError, match="needs 61 KV blocks"):
        engine.add(request_of("wide", 4, 38, num_sequences=6))
    with pytest.raises(CapacityError, match="has 7 sequences"):
        engine.add(request_of("many", 4, 2, num_sequences=7))
    engine.add(request_of("twice"))
    with pytest.raises(ConfigError, match="ids must be unique"):
        engine.add(request_of("twice"))
    with pytest.raises(ConfigError, match="contains '#'"):
        request_of("a#1")
    with pytest.raises(ConfigError, match="at least 1"):
        request_of("nothing", 4, 0)


def test_guesses_of_a_virtual_model_are_accepted_by_chance():
    steps = {}
    for acceptance in (0.0, 0.5, 1.0):
        knobs = settings_of(max_num_batched_tokens=64, num_speculative_tokens=3)
        engine = engine_of(knobs, acceptance=acceptance)
        engine.add(request_of("r", 8, 41))
        steps[acceptance] = len(run(engine))
    assert steps[0.0] == 41
    assert steps[1.0] == 11  # the first token, and ten times four
    assert steps[1.0] < steps[0.5] < steps[0.0]
