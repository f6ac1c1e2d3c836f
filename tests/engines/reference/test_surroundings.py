"""What the scheduler says of a victim's surroundings is what they are."""

from dataclasses import replace

import pytest

from kvtiers.cost.preempt import PreemptMode, Surroundings
from kvtiers.engines.reference.requests import State

from .engines import SLOW, engine_of, hashes_of, request_of, run, settings_of, tiers_of


def listened(engine):
    """Hear what kvtiers is told of each victim: its id, and what it leaves behind."""
    connector, heard = engine.runner.connector, []
    ask = connector.preemption

    def asked(name, num_tokens, places, mode, around):
        heard.append((name, around))
        return ask(name, num_tokens, places, mode, around)

    connector.preemption = asked
    return heard


@pytest.mark.parametrize("waiting", [(), (7,), (7, 9)])
def test_those_that_run_and_wait_are_counted(waiting):
    """Three decode until the pool is full: two of them go on."""
    knobs = settings_of(18, watermark=0.0, max_num_seqs=3, preemption=PreemptMode.SWAP)
    engine = engine_of(knobs, tiers_of())
    heard = listened(engine)
    for idx in range(3):
        engine.add(request_of(f"r{idx}", 20, 12))
    for idx, num_tokens in enumerate(waiting):
        engine.add(request_of(f"w{idx}", num_tokens))
    while not heard:
        engine.step()
    ((name, around),) = heard
    assert name == "r2"
    assert replace(around, admitted_share=0.0) == Surroundings(2, len(waiting), 2)
    assert 0.8 < around.admitted_share < 1  # 15 blocks of prompts, and few of decodes


def test_who_waits_for_a_load_computes_nothing_and_nobody_delays_it():
    engine = engine_of(
        settings_of(27, watermark=0.0, preemption=PreemptMode.SWAP), tiers_of(mode="always"), **SLOW
    )
    hashes = hashes_of(0, 9, num_shared=0)
    engine.add(request_of("before", 36, 1, block_hashes=hashes))
    run(engine)
    engine.settle()
    engine.pool.forget_all()
    heard = listened(engine)
    for idx in range(3):
        engine.add(request_of(f"r{idx}", 20, 12))
    while any(engine.state(f"r{idx}") is State.WAITING for idx in range(3)):
        engine.step()
    engine.add(request_of("loads", 36, 1, block_hashes=hashes))
    while not heard:
        engine.step()
    assert engine.state("loads") is State.RUNNING
    assert engine.gauges.num_loading == 1
    ((name, around),) = heard
    assert (name, replace(around, admitted_share=0.0)) == ("r2", Surroundings(2, 0, 2))


def test_who_was_swapped_waits_and_computes_nothing():
    knobs = settings_of(18, watermark=0.0, preemption=PreemptMode.SWAP)
    engine = engine_of(knobs, tiers_of())
    heard = listened(engine)
    for idx in range(3):
        engine.add(request_of(f"r{idx}", 20, 40))
    while len(heard) < 2:
        engine.step()
    name, around = heard[1]
    assert (name, around.num_running, around.num_waiting, around.num_step_tokens) == ("r1", 1, 1, 1)


def victims(engine):
    """Serve pairs of requests that outgrow the pool; returns what kvtiers was told HBM will keep of
    each victim, and what it then found there."""
    heard, found = listened(engine), []
    allocated = engine.runner.connector.allocated

    def listening(name, tables, num_local, load):
        found.append((name, num_local))
        allocated(name, tables, num_local, load)

    engine.runner.connector.allocated = listening
    for idx in range(8):
        engine.add(request_of(f"r{idx}", 30, 12))
    run(engine)
    gave_way = {}
    for name, around in heard:  # a swapped one is asked about again when it returns
        gave_way.setdefault(name, around)
    assert len(gave_way) == engine.gauges.num_preemptions > 4
    came_back = dict(found)  # the last time, which is the second
    told = [max(around.kept_tokens) for around in gave_way.values()]
    return told, [came_back[name] for name in gave_way]


@pytest.mark.parametrize("mode", PreemptMode)
def test_hbm_is_counted_on_for_what_a_victim_will_find_there_to_a_block(mode):
    """And not before one has come back, which tells what others will find."""
    knobs = {"watermark": 0.0, "max_num_seqs": 2, "preemption": mode}
    settings = settings_of(18, **knobs)
    told, found = victims(engine_of(settings, tiers_of()))
    assert told[0] == 0
    assert min(found) > 2 * settings.block_size
    assert all(abs(a - b) <= settings.block_size for a, b in zip(told[1:], found[1:], strict=True))


def test_without_prefix_caching_hbm_is_not_counted_on():
    knobs = {"watermark": 0.0, "max_num_seqs": 2, "prefix_caching": False}
    told, found = victims(engine_of(settings_of(18, **knobs), tiers_of()))
    assert not any(told + found)


@pytest.mark.parametrize("reloads", [True, False])
def test_a_swapped_request_is_asked_about_again_when_it_returns(reloads):
    """By then it is known what HBM has kept of it, and what was copied down may be left there."""
    knobs = settings_of(18, watermark=0.0, preemption=PreemptMode.COST)
    engine = engine_of(knobs, tiers_of())
    connector, asked = engine.runner.connector, []
    ask = connector.preemption

    def asked_about(name, num_tokens, places, mode, around):
        plan = ask(name, num_tokens, places, mode, around)
        first = all(name != other for other, _, _ in asked)
        asked.append((name, num_tokens, around.kept_tokens))
        return replace(plan, swap=first or reloads)

    connector.preemption = asked_about
    for idx in range(2):
        engine.add(request_of(f"r{idx}", 20, 40))
    served = [it for report in run(engine) for it in report.finished]
    (left, returned) = asked[:2]
    assert left[:2] == returned[:2]  # the same one, with as many tokens
    assert left[2] == (0,)  # a guess
    assert returned[2] == (3 * knobs.block_size,)  # which the other one did not take
    (victim,) = (it for it in served if it.request_id == returned[0])
    assert victim.num_swaps >= 1
    assert (victim.num_reloaded_tokens > 0) == reloads
    assert (victim.num_recomputed_tokens > knobs.block_size) != reloads


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_of_a_swapped_request_no_more_is_copied_than_its_plan_says(num_blocks):
    """What was left behind is computed when it returns, if HBM has not kept it."""
    knobs = settings_of(18, watermark=0.0, preemption=PreemptMode.COST, prefix_caching=False)
    engine = engine_of(knobs, tiers_of(offload="lazy"))
    connector = engine.runner.connector
    ask = connector.preemption

    def asked_about(*args):
        return replace(ask(*args), swap=True, num_blocks=num_blocks)

    connector.preemption = asked_about
    for idx in range(2):
        engine.add(request_of(f"r{idx}", 20, 40))
    served = [it for report in run(engine) for it in report.finished]
    first = next(it for it in served if it.num_swaps)
    assert first.num_swaps == 1
    assert first.num_reloaded_tokens == num_blocks * knobs.block_size


def test_a_returning_request_is_told_what_its_step_computes_for_others():
    """Two that gave way come back in one step: the second is told of what the first computes."""
    more = {"prefix_caching": False, "max_num_batched_tokens": 256}
    knobs = settings_of(24, watermark=0.0, preemption=PreemptMode.COST, **more)
    engine = engine_of(knobs, tiers_of())
    connector, asked = engine.runner.connector, []
    ask = connector.preemption

    def asked_about(name, num_tokens, places, mode, around):
        plan = ask(name, num_tokens, places, mode, around)
        asked.append((name, around))
        return replace(plan, swap=not around.returning)

    connector.preemption = asked_about
    for idx in range(3):
        engine.add(request_of(f"r{idx}", 20, 40))
    run(engine)
    back = [around for _, around in asked if around.returning]
    assert back
    assert any(max(around.joined_tokens) > 20 for around in back)
    assert all(around.num_step_tokens <= 3 for around in back)
