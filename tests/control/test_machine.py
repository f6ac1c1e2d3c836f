"""State machines over the deciding plane."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvtiers.observe.metrics import BLOCKS_PREFETCHED, BLOCKS_RELOADED
from kvtiers.testing import control_machine
from kvtiers.testing.control_machine import ControllerMachine, random_walk
from kvtiers.testing.machine import TierMachine

CONFIGURATIONS = (
    "dram_only",
    "write_through",
    "write_back",
    "budgeted",
    "shared_store",
    "second_life",
    "two_groups",
)
each_configuration = pytest.mark.parametrize("name", CONFIGURATIONS)


def test_tier_loses_and_shares_no_slot():
    run_state_machine_as_test(
        TierMachine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )


@each_configuration
def test_controller_keeps_its_promises_and_returns_to_its_start(name):
    class Machine(ControllerMachine):
        SETTINGS = getattr(control_machine, name)

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


@each_configuration
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_long_random_walk_leaks_nothing(name, num_ranks):
    """R30: hours of load in one go; Hypothesis finds short stories, this one wear."""
    num_prefetched = num_from_disk = 0
    for seed in range(4):
        engine = random_walk(getattr(control_machine, name), num_ranks, seed, 6000)
        counters = engine.controller.counters
        assert counters.value(BLOCKS_RELOADED, ("dram",)) > 100
        num_prefetched += int(counters.value(BLOCKS_PREFETCHED))
        num_from_disk += int(counters.value(BLOCKS_RELOADED, ("disk",)))
    assert bool(num_prefetched) == bool(engine.settings.stores)
    assert name != "second_life" or num_from_disk > 20
