"""The connector under an engine that preempts, aborts, speculates and schedules ahead.

The fake engine checks every KV byte that a forward pass reads and every frame that DRAM serves
against what a faultless engine computes, and that everything comes back in the end.
"""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.testing.fake_engine import Setup, random_work
from kvtiers.testing.fake_step import EngineSettings, Execution

ALWAYS = {"cost": {"mode": "always"}}
LAZY = {**ALWAYS, "policy": {"offload": "lazy"}}
NEVER_IN_STEP = {**ALWAYS, "reload": {"sync_below": "0ms"}}
VERIFIED = {**ALWAYS, "integrity": "all"}

engines = st.builds(
    EngineSettings,
    num_blocks=st.sampled_from([16, 24, 60]),
    num_draft_tokens=st.integers(0, 3),
    execution=st.sampled_from(list(Execution)),
    max_step_tokens=st.sampled_from([5, 16, 64]),
)
setups = st.builds(
    Setup,
    engine=engines,
    num_ranks=st.integers(1, 3),
    num_slots=st.sampled_from([1, 2, 5, 12, 40]),
    store_blocks=st.sampled_from([0, 3, 40]),
    store=st.sampled_from([{}, {"write": "back"}, {"admit": "second_touch"}]),
    num_layer_ranges=st.sampled_from([1, 2]),
    options=st.sampled_from([ALWAYS, LAZY, NEVER_IN_STEP, VERIFIED, {}]),
)


@pytest.fixture(autouse=True)
def quiet(caplog):
    """The faults that are made here are logged by the thousand."""
    with caplog.at_level(logging.CRITICAL):
        yield


@settings(max_examples=40, deadline=None)
@given(setup=setups, seed=st.integers(0, 2**32))
def test_no_false_token_and_no_leak_whatever_happens(setup, seed):
    random_work(setup, seed, 120)


@pytest.mark.parametrize("execution", list(Execution))
@pytest.mark.parametrize("options", [ALWAYS, LAZY], ids=["eager", "lazy"])
@pytest.mark.parametrize("num_draft_tokens", [0, 2])
def test_long_work_reloads_much_and_never_falsely(execution, options, num_draft_tokens):
    engine = EngineSettings(execution=execution, num_draft_tokens=num_draft_tokens)
    reloaded = 0
    for seed in range(8):
        done = random_work(Setup(engine=engine, options=options), seed, 400)
        reloaded += done.connector.counters.value("kvtiers_blocks_reloaded_total", ("dram",))
    assert reloaded > 100


@pytest.mark.parametrize("write", ["through", "back"])
def test_long_work_over_two_tiers_and_ranks(write):
    setup = Setup(num_ranks=2, num_slots=7, store_blocks=40, store={"write": write}, options=ALWAYS)
    reloaded = 0
    for seed in range(12):
        done = random_work(setup, seed, 400, faults=seed % 2 == 0)
        reloaded += done.connector.counters.value("kvtiers_blocks_reloaded_total", ("memory",))
    assert reloaded > 20


@pytest.mark.parametrize("faults", [False, True])
def test_long_work_loads_ranges_of_layers_from_a_store_within_steps(faults):
    options = {**ALWAYS, "reload": {"sync_below": "0ms", "prefetch": "off"}}
    in_step = failed = 0
    for seed in range(8):
        engine = EngineSettings(max_running=1 + seed % 2)
        setup = Setup(engine, num_slots=14, store_blocks=80, num_layer_ranges=2, options=options)
        done = random_work(setup, seed, 400, faults=faults)
        of_store = [
            decision.outcome
            for decision in done.connector.decisions.finished()
            if decision.in_step and decision.num_hit_blocks.get("memory", 0) > 0
        ]
        in_step += len(of_store)
        failed += sum(outcome.num_failed_blocks > 0 for outcome in of_store)
    assert in_step > 40
    assert failed > 0 or not faults  # resets void some without any fault


def test_work_without_faults_fails_no_block():
    for execution in Execution:
        setup = Setup(engine=EngineSettings(execution=execution), options=ALWAYS, num_slots=200)
        done = random_work(setup, 5, 400, faults=False)
        failed = {
            labels[0]: value
            for (name, labels), value in done.connector.counters.snapshot().counters.items()
            if name == "kvtiers_blocks_failed_total"
        }
        assert failed.keys() <= {"stale", "timed_out"}  # resets and fences that ran out of time
