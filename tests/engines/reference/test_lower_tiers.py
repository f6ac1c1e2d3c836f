"""kvtiers is told what it has to know: who runs, what is computed, and what a reset voids."""

from types import SimpleNamespace

import pytest

from kvtiers.cost.preempt import PreemptMode
from kvtiers.engines.reference.lower_tiers import LowerTiers
from kvtiers.engines.reference.requests import State, TokenSequence

from .engines import engine_of, hashes_of, request_of, run, settings_of, tiers_of
from .machine import Failing, Moody


def listened(engine, hear):
    """Hear every step that kvtiers is told of."""
    connector = engine.runner.connector
    schedule = connector.schedule

    def listening(step):
        hear(step)
        return schedule(step)

    connector.schedule = listening


def test_all_that_run_are_known_to_run_also_where_none_fills_a_block():
    engine = engine_of(settings_of(), tiers_of())
    for idx in range(5):
        engine.add(request_of(f"r{idx}", 5, 12))
    outlook = engine.runner.connector.controller.outlook
    while engine.num_unfinished:
        report = engine.step()
        left = {it.request_id for it in report.finished}
        assert outlook.running == set(report.num_tokens) - left
        if not left:
            assert len(outlook.running) == 5
    assert outlook.running == set()


@pytest.mark.parametrize("num_guesses", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("offload", ["eager", "lazy"])
def test_blocks_that_right_guesses_filled_are_offloaded(offload, num_guesses):
    """Steps of as many tokens as a block has never end where one was just filled."""
    knobs = settings_of(max_num_batched_tokens=64, num_speculative_tokens=num_guesses)
    engine = engine_of(knobs, tiers_of(mode="always", offload=offload), acceptance=1.0)
    hashes = hashes_of(0, 14)
    engine.add(request_of("first", 8, 49, block_hashes=hashes))
    run(engine)
    engine.settle()
    engine.pool.forget_all()
    engine.add(request_of("second", 57, 1, block_hashes=hashes))
    (served,) = (it for report in run(engine) for it in report.finished)
    # Of 56 tokens that were computed those that the last step guessed were not told.
    assert served.num_reloaded_tokens >= 56 - (4 + num_guesses if num_guesses else 0)


def test_every_block_that_is_handed_out_is_told_before_it_is_written():
    """Whoever still copies it comes first: also those into which a group's sequences will part."""
    engine = engine_of(settings_of(), tiers_of())
    told = set()
    listened(engine, lambda step: told.update(step.overwritten))
    engine.add(request_of("group", 10, 9, num_sequences=3))
    engine.add(request_of("one", 6, 9))
    while engine.num_unfinished:
        held = set().union(*(s.block_ids for r in engine.holders() for s in r.sequences))
        assert held <= told
        engine.step()
    assert len(told) > 10


def test_runs_that_are_torn_are_told_by_the_names_they_had():
    """Engine blocks travel in pairs, named after their first; later owners pair them otherwise."""
    engine = engine_of(settings_of(17, blocks_per_hash=2), tiers_of())
    engine.add(request_of("first", 31, 1))
    run(engine)
    names = {it: name for it, name in enumerate(engine._tiers._run_of) if name}
    told = set()
    assert len(names) == 8
    listened(engine, lambda step: told.update(step.overwritten))
    engine.add(request_of("second", 54, 2))
    num_seen = 0
    while engine.num_unfinished:
        held = set().union(*(s.block_ids for r in engine.holders() for s in r.sequences))
        torn = {names[block_id] for block_id in held if block_id in names}
        assert torn <= told
        num_seen = max(num_seen, len(torn))
        engine.step()
    assert num_seen > 1


def test_a_run_is_named_as_its_blocks_come_and_anew_after_they_are_gone():
    tiers = LowerTiers(settings_of(blocks_per_hash=2), SimpleNamespace(schedule=lambda step: step))
    sequence = TokenSequence("r", 8, [], None, 40, 50)

    def names(block_ids):
        tiers.will_write(block_ids)
        return tiers.orders({}, {}, 0).overwritten

    assert names([1, 2, 3]) == set()
    for block_ids, heads in (([1, 2, 3], [1, 3]), ([1, 2, 3, 4, 5], [1, 3, 5])):
        sequence.block_ids = block_ids
        assert tiers.table(sequence) == heads
    assert [names([block_id]) for block_id in (2, 4, 5, 6)] == [{1}, {3}, {5}, set()]
    sequence.lose_blocks()
    sequence.block_ids = [4, 2, 6]
    assert tiers.table(sequence) == [4, 6]
    assert [names([block_id]) for block_id in (1, 2, 3, 4, 6)] == [{1}, {4}, {3}, {4}, {6}]


def test_guesses_are_not_told_to_be_computed_and_short_prompts_are():
    knobs = settings_of(max_num_batched_tokens=64, num_speculative_tokens=3)
    engine = engine_of(knobs, tiers_of(), acceptance=0.0)
    told = []

    def hear(step):
        told.append(dict(step.num_computed_tokens))
        for name, num in step.num_computed_tokens.items():
            assert num <= running[name].sequences[0].num_known

    listened(engine, hear)
    engine.add(request_of("r", 3, 12))
    running = {"r": engine.scheduler.queue[0]}
    run(engine)
    assert told[0] == {"r": 3}
    assert [num for step in told for num in step.values()] == [3, 4, 8, 12]


def test_who_waits_for_an_answer_is_not_admitted_and_holds_nobody_up():
    engine = engine_of(settings_of(), tiers_of())
    moody = Moody(engine.runner.connector, 4)
    moody.moods.extend(["late", "all", "late"])
    engine.add(request_of("asks", 8, 4))
    engine.add(request_of("other", 8, 4))
    assert engine.step().admitted == ["other"]
    assert engine.step().admitted == []
    assert engine.step().admitted == ["asks"]


def test_newcomers_do_not_pass_a_swapped_one_that_waits_for_an_answer():
    engine = engine_of(
        settings_of(18, watermark=0.0, preemption=PreemptMode.SWAP), tiers_of(mode="always")
    )
    moody = Moody(engine.runner.connector, 4)
    for idx in range(3):
        engine.add(request_of(f"r{idx}", 20, 12))
    while not engine.gauges.num_swapped:
        engine.step()
    engine.add(request_of("late", 4, 1))
    moody.moods.extend(["late"] * 200)
    while engine.scheduler.running:
        engine.step()
    moody.moods.clear()
    moody.moods.append("late")
    report = engine.step(idle_until=engine.now + 1.0)
    assert (report.admitted, report.resumed) == ([], [])
    assert (report.gauges.num_swapped, report.gauges.num_waiting) == (1, 1)
    report = engine.step()
    assert (report.resumed, report.admitted) == (["r2"], ["late"])
    assert (report.gauges.num_swapped, report.gauges.num_waiting) == (0, 0)
    run(engine)


def test_forced_recomputation_takes_nothing_from_below():
    engine = engine_of(
        settings_of(18, watermark=0.0, preemption=PreemptMode.RECOMPUTE), tiers_of(mode="always")
    )
    for idx in range(3):
        engine.add(request_of(f"r{idx}", 20, 12))
    served = [it for report in run(engine) for it in report.finished]
    assert sum(it.num_recomputes for it in served) > 0
    assert sum(it.num_reloaded_tokens for it in served) == 0


def test_the_tokens_of_a_step_share_its_time():
    knobs = settings_of(max_num_batched_tokens=64, num_speculative_tokens=3)
    engine = engine_of(knobs, acceptance=1.0)
    engine.add(request_of("r", 8, 41))
    reports = run(engine)
    (served,) = reports[-1].finished
    gaps = [gap for report in reports for gap in report.itl_seconds]
    assert len(gaps) == 40
    assert sum(gaps) == pytest.approx(served.finished_at - served.first_token_at)


def test_a_load_that_fails_on_the_way_back_takes_nothing_off_the_first_one():
    engine = engine_of(
        settings_of(18, watermark=0.0, preemption=PreemptMode.SWAP), tiers_of(mode="always")
    )
    for name, num_outputs in (("first", 1), ("r", 12)):
        engine.pool.forget_all()
        for idx in range(3):
            hashes = hashes_of(idx, 5, num_shared=0)
            engine.add(request_of(f"{name}{idx}", 20, num_outputs, block_hashes=hashes))
        while engine.num_unfinished and not engine.gauges.num_swapped:
            engine.step()
        if name == "first":
            engine.settle()
    engine.pool.forget_all()
    Failing(engine).rows.append(0)
    served = {it.request_id: it for report in run(engine) for it in report.finished}["r2"]
    assert served.num_swaps == 1
    assert sum(served.reloaded_by_tier.values()) == served.num_reloaded_tokens == 16
    assert served.num_recomputed_tokens > 20


def test_what_a_step_computed_on_a_load_that_failed_within_it_is_void():
    engine = engine_of(settings_of(), tiers_of(mode="always", sync_below="1s"))
    hashes = hashes_of(0, 10)
    engine.add(request_of("first", 40, 1, block_hashes=hashes))
    run(engine)
    engine.settle()
    engine.pool.forget_all()
    engine.add(request_of("second", 40, 1, block_hashes=hashes))
    Failing(engine).rows.append(4)
    report = engine.step()
    assert (report.admitted, report.gauges.num_loading) == (["second"], 0)
    assert (report.num_tokens, report.first_tokens) == ({}, [])
    (served,) = (it for report in run(engine) for it in report.finished)
    assert (served.num_reloaded_tokens, served.num_computed_tokens) == (16, 24)


def preempted_engine(config, **more):
    """An engine of which one of three requests has just given way."""
    engine = engine_of(settings_of(18, watermark=0.0, **more), config)
    for idx in range(3):
        engine.add(request_of(f"r{idx}", 20, 12))
    while not engine.gauges.num_preemptions:
        engine.step()
    return engine


@pytest.mark.parametrize("how", ["returns", "leaves"])
def test_who_has_come_back_or_left_need_not_be_reloaded_any_more(how):
    """That the way down was gone counts for the way back, and for nothing else."""
    engine = preempted_engine(tiers_of(mode="never"), preemption=PreemptMode.SWAP)
    assert engine.gauges.num_swapped == 1
    request = engine.scheduler.queue[0]
    hashes = list(request.sequences[0].hashes)
    connector = engine.runner.connector
    assert connector.reloadable("r2", hashes, 32, 0).num_tokens > 0
    if how == "leaves":
        engine.abort("r2")
        engine.settle()
    while request.state is State.SWAPPED:
        engine.step()
    assert connector.reloadable("r2", hashes, 32, 0).num_tokens == 0


def test_what_is_computed_again_is_told_again():
    """Chunk by chunk, as far as it had come and beyond."""
    knobs = {"max_num_batched_tokens": 8, "watermark": 0.0, "prefix_caching": False}
    engine = engine_of(settings_of(18, preemption=PreemptMode.RECOMPUTE, **knobs), tiers_of())
    told, computed, num_told = {}, {}, 0
    listened(engine, lambda step: told.update(step.num_computed_tokens))
    for idx in range(3):
        engine.add(request_of(f"r{idx}", 8, 24))
    while engine.num_unfinished:
        report = engine.step()
        computed |= dict.fromkeys(report.preempted, 0)
        for name, num in report.num_tokens.items():
            before, computed[name] = computed.get(name, 0), computed.get(name, 0) + num
            if computed[name] // 4 > before // 4:
                assert told[name] == computed[name]
                num_told += 1
    assert engine.gauges.num_preemptions > 0
    assert num_told > 20


def test_an_arrival_tells_what_hbm_has_of_it():
    """Which need not be brought from stores ahead of it."""
    engine = engine_of(config=tiers_of("nvme"))
    prefetch, heard = engine.runner.connector.prefetch, []

    def hear(*arrival):
        heard.append(arrival)
        prefetch(*arrival)

    engine.runner.connector.prefetch = hear
    for name in ("first", "second"):
        engine.add(request_of(name, 38, 1, block_hashes=hashes_of(0, 9)))
        run(engine)
    assert heard == [("first", 38, 0), ("second", 38, 36)]


def lessons(engine):
    """Count the tokens of each step from which kvtiers learns how fast the engine is."""
    learn, heard = engine.runner.connector.step_took, []

    def hear(num_new, num_context, seconds):
        heard.append(sum(num_new))
        learn(num_new, num_context, seconds)

    engine.runner.connector.step_took = hear
    return heard


def test_each_step_with_a_prompt_teaches_and_of_the_decodes_some():
    engine = engine_of(settings_of(max_num_batched_tokens=18), tiers_of())
    heard = lessons(engine)
    engine.add(request_of("r", 24, 40))
    run(engine)
    assert heard == [18, 6] + [1] * 5  # of 39, every eighth


def test_a_step_that_waited_for_a_load_teaches_nothing():
    engine = engine_of(settings_of(), tiers_of(mode="always", sync_below="1s"))
    heard = lessons(engine)
    for name in ("first", "second"):
        engine.pool.forget_all()
        engine.add(request_of(name, 32, 1, block_hashes=hashes_of(0, 8)))
        (report,) = run(engine)
        engine.settle()
    assert sum(report.num_tokens.values()) == 4
    assert heard == [32]


@pytest.mark.parametrize(("failing", "by_tier"), [(5, (16, 4)), (3, (12, 0))])
def test_what_a_failed_load_did_not_bring_is_taken_off_the_tier_that_has_the_tail(failing, by_tier):
    engine = engine_of(config=tiers_of("memory", mode="always", dram="64KiB"))
    for document, num_prompt in ((0, 32), (1, 16)):  # which leaves half of the first one in DRAM
        hashes = hashes_of(document, num_prompt // 4, num_shared=0)
        engine.add(request_of(f"r{document}", num_prompt, 1, block_hashes=hashes))
        run(engine)
        engine.settle()
    engine.pool.forget_all()
    Failing(engine).rows.append(failing)
    engine.add(request_of("again", 33, 1, block_hashes=hashes_of(0, 8, num_shared=0)))
    (served,) = (it for report in run(engine) for it in report.finished)
    assert served.reloaded_by_tier == dict(zip(("dram", "memory"), by_tier, strict=True))
    assert served.num_reloaded_tokens == sum(by_tier) == 4 * failing
