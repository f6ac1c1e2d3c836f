"""Aborts and resets end or restart what they find, and lose nothing, wherever they come."""

import pytest

from kvtiers.cost.preempt import PreemptMode
from kvtiers.engines.reference.requests import State
from kvtiers.model.errors import ConfigError

from .engines import SLOW, engine_of, hashes_of, request_of, run, settings_of, tiers_of
from .machine import Failing


def engine_that_loads(name):
    """An engine in which a request has 4 blocks in HBM, and 5 on their way there."""
    engine = engine_of(settings_of(), tiers_of(mode="always"), **SLOW)
    for each in ("first", name):
        engine.add(request_of(each, 40, 1, block_hashes=hashes_of(0, 10)))
        if each == name:
            break
        run(engine)
        engine.settle()
        engine.pool.free(engine.pool.take(60))  # which leaves 4 of the 10 that are cached
    assert engine.step(idle_until=engine.now).gauges.num_loading == 1
    return engine


def test_an_abort_is_reported_once_wherever_it_comes():
    engine = engine_of(settings_of(18, watermark=0.0, preemption=PreemptMode.SWAP), tiers_of())
    for idx in range(4):
        engine.add(request_of(f"r{idx}", 20, 12))
    while not engine.gauges.num_swapped:
        engine.step()
    states = {engine.state(f"r{idx}") for idx in range(4)}
    assert states == {State.RUNNING, State.WAITING, State.SWAPPED}
    for idx in range(4):
        engine.abort(f"r{idx}")
        engine.abort(f"r{idx}")
    engine.abort("nobody")
    report = engine.step()
    assert [(it.request_id, it.reason) for it in report.finished] == [
        (f"r{idx}", "aborted") for idx in range(4)
    ]
    assert engine.num_unfinished == 0
    engine.settle()
    assert engine.pool.num_free == 18


@pytest.mark.parametrize("num_failing", [0, 1])
def test_what_a_reset_voids_was_not_reloaded(num_failing):
    """Nor what fails of it."""
    engine = engine_that_loads("second")
    assert engine.scheduler.running[0].num_local_tokens == 16
    Failing(engine).rows.extend([2] * num_failing)
    engine.reset()
    (served,) = (it for report in run(engine) for it in report.finished)
    assert (served.num_local_tokens, served.num_reloaded_tokens) == (0, 0)
    assert sum(served.reloaded_by_tier.values()) == 0
    assert served.num_computed_tokens == 40
    engine.add(request_of("third", 40, 1, block_hashes=hashes_of(0, 10)))
    (served,) = (it for report in run(engine) for it in report.finished)
    assert served.num_local_tokens == 36, "what was computed since can be hit"


def test_blocks_that_a_load_still_writes_are_nobody_elses_after_an_abort():
    engine = engine_that_loads("aborted")
    engine.abort("aborted")
    assert engine.pool.num_free == 64 - 10
    with pytest.raises(ConfigError, match="its load still runs"):
        engine.add(request_of("aborted", 40, 1))
    engine.add(request_of("next", 40, 1))
    run(engine)
    engine.settle()
    assert engine.pool.num_free == 64
    engine.add(request_of("aborted", 40, 1))
    run(engine)


def test_those_of_a_group_neither_until_its_last_load_has_ended():
    knobs = settings_of(17, watermark=0.0, preemption=PreemptMode.SWAP)
    engine = engine_of(knobs, tiers_of(mode="always"), **SLOW)
    for idx in range(2):
        engine.add(request_of(f"g{idx}", 10, 14, num_sequences=2))
    while not engine.gauges.num_loading:
        engine.step()
        engine.pool.forget_all()
    (group,) = [it for it in engine.scheduler.running if it.loading]
    assert len(group.loading) == 2
    num_blocks = group.num_blocks
    engine.abort(group.request_id)
    while len(group.loading) == 2:
        engine.step()
    assert group.num_blocks == num_blocks
    run(engine)
    engine.settle()
    assert engine.pool.num_free == 17


def test_who_was_aborted_is_told_of_by_the_next_step_whatever_settles_before():
    engine = engine_that_loads("aborted")
    engine.abort("aborted")
    engine.settle()
    assert [it.request_id for it in engine.step().finished] == ["aborted"]


@pytest.mark.parametrize("mode", PreemptMode)
def test_after_a_reset_all_begin_again_in_their_order(mode):
    """What was computed before it is computed again and counted, and nothing is swapped."""
    knobs = settings_of(60, preemption=mode, max_num_batched_tokens=18)
    engine = engine_of(knobs, tiers_of(mode="always"))
    for name, num_prompt in (("a", 10), ("b", 50), ("c", 20)):
        engine.add(request_of(name, num_prompt, 6))
    computed = [engine.step().num_tokens for _ in range(3)]
    assert computed[-1] == {"a": 1, "b": 17}
    assert [engine.state(name) for name in "abc"] == [State.RUNNING, State.RUNNING, State.WAITING]
    engine.reset()
    assert {engine.state(name) for name in "abc"} == {State.WAITING}
    assert engine.gauges.num_swaps == 0
    reports = run(engine)
    assert [name for report in reports for name in report.admitted] == ["a", "b", "c"]
    again = {it.request_id: it.num_recomputed_tokens for r in reports for it in r.finished}
    assert again == {name: sum(step.get(name, 0) for step in computed) for name in "abc"}
