"""What the scheduler says of a victim's surroundings is what they are."""

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


@pytest.mark.parametrize(
    ("waiting", "num_step_tokens"), [((), 2), ((7,), 2 + 7), ((7, 9), 2 + 7 + 9), ((7, 40), 32)]
)
def test_those_that_run_and_wait_are_counted_with_what_they_compute(waiting, num_step_tokens):
    """Three decode until the pool is full; the budget of a step is 32 tokens."""
    knobs = settings_of(18, watermark=0.0, max_num_seqs=3, preemption=PreemptMode.SWAP)
    engine = engine_of(knobs, tiers_of())
    heard = listened(engine)
    for idx in range(3):
        engine.add(request_of(f"r{idx}", 20, 12))
    for idx, num_tokens in enumerate(waiting):
        engine.add(request_of(f"w{idx}", num_tokens))
    while not heard:
        engine.step()
    assert heard == [("r2", Surroundings(2, len(waiting), num_step_tokens, 0))]


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
    ((victim, around),) = heard
    assert victim == "r2"
    assert (around.num_running, around.num_waiting, around.num_step_tokens) == (2, 0, 2)


def test_who_was_swapped_waits_and_computes_nothing():
    knobs = settings_of(18, watermark=0.0, preemption=PreemptMode.SWAP)
    engine = engine_of(knobs, tiers_of())
    heard = listened(engine)
    for idx in range(3):
        engine.add(request_of(f"r{idx}", 20, 40))
    while len(heard) < 2:
        engine.step()
    assert heard[1] == ("r1", Surroundings(1, 1, 1, 0))


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
    told = [around.num_kept_tokens for _, around in heard]
    names = [name for name, _ in heard]
    assert len(set(names)) == len(names) > 4
    came_back = dict(found)  # the last time, which is the second
    return told, [came_back[name] for name in names]


@pytest.mark.parametrize("mode", PreemptMode)
def test_hbm_is_counted_on_for_no_more_than_a_victim_will_find_there(mode):
    """And not before one has come back, which tells what others will find."""
    knobs = {"watermark": 0.0, "max_num_seqs": 2, "preemption": mode}
    told, found = victims(engine_of(settings_of(18, **knobs), tiers_of()))
    assert told[0] == 0
    assert all(0 < a <= b for a, b in zip(told[1:], found[1:], strict=True))


def test_without_prefix_caching_hbm_is_not_counted_on():
    knobs = {"watermark": 0.0, "max_num_seqs": 2, "prefix_caching": False}
    told, found = victims(engine_of(settings_of(18, **knobs), tiers_of()))
    assert not any(told + found)
