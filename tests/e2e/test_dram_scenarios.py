"""Every workload gives the same tokens with kvtiers as without, whatever its tiers look like."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtiers.observe.metrics import BLOCKS_DEMOTED, BLOCKS_OFFLOADED, BLOCKS_RELOADED

from .answers import differences
from .harness import EngineOptions, Engines
from .scenarios import SCENARIOS, SMALL_HYBRID_POOL, SMALL_POOL, References, Scenario
from .tiers import Tiers, dram, memory, tiered

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "eager": dram(),
    "asynchronous loads only": dram(reload={"sync_below": "0ms"}),
    "lazy": dram(policy={"offload": "lazy"}),
    "DRAM smaller than a request": dram("2MiB"),
    "memory below a tiny DRAM": dram("2MiB", memory()),
    "memory below a tiny DRAM, written back": dram("2MiB", memory(write="back")),
    "every frame verified": dram(integrity="all"),
    "numpy copies": dram(copy={"native": "off"}),
}

each_configuration = pytest.mark.parametrize(
    "config", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys()
)
each_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
each_pool = pytest.mark.parametrize(
    "pool", [SMALL_POOL, SMALL_HYBRID_POOL], ids=["one KV group", "two KV groups"]
)


# Sorted by engine: starting one costs seconds.
@each_scenario
@each_configuration
@each_pool
def test_the_same_tokens_as_without_kvtiers(
    engines: Engines,
    references: References,
    pool: EngineOptions,
    config: dict[str, Any],
    scenario: Scenario,
) -> None:
    expected = references.answers(scenario, pool)
    engine = engines.get(tiered(pool, config))
    tiers = Tiers(engine)
    answers = scenario.drive(engine)
    assert not differences(expected, answers)
    tiers.assert_at_rest()
    assert tiers.count(BLOCKS_OFFLOADED, "dram") > 0


@pytest.mark.parametrize("capacity", ["768KiB", "1MiB", "1200KiB"])
@pytest.mark.parametrize("offload", ["eager", "lazy"])
def test_blocks_that_left_a_sliding_window_are_not_offloaded_late(
    engines: Engines, references: References, offload: str, capacity: str
) -> None:
    """Refused offers were repeated with engine blocks that held another request's tokens."""
    sections = {"reload": {"sync_below": "0ms"}, "policy": {"offload": offload}}
    waves = next(s for s in SCENARIOS if s.name == "waves")
    expected = references.answers(waves, SMALL_HYBRID_POOL)
    engine = engines.get(tiered(SMALL_HYBRID_POOL, dram(capacity, **sections)))
    tiers = Tiers(engine)
    assert not differences(expected, waves.drive(engine))
    assert tiers.count(BLOCKS_RELOADED, "dram") > 0
    tiers.assert_at_rest()


@each_pool
def test_lower_tiers_are_really_used(engines: Engines, pool: EngineOptions) -> None:
    engine = engines.get(tiered(pool, CONFIGURATIONS["memory below a tiny DRAM"]))
    tiers = Tiers(engine)
    SCENARIOS[0].drive(engine)
    tiers.assert_at_rest()
    assert tiers.count(BLOCKS_DEMOTED, "memory") > 0


def test_preempted_requests_come_back_by_reload(engines: Engines, references: References) -> None:
    engine = engines.get(tiered(SMALL_POOL, CONFIGURATIONS["eager"]))
    tiers = Tiers(engine)
    preemption = next(s for s in SCENARIOS if s.name == "preemption")
    answers = preemption.drive(engine)
    num_preemptions = sum(answer.num_preemptions for answer in answers.values())
    assert num_preemptions > 0
    assert tiers.count(BLOCKS_RELOADED, "dram") >= num_preemptions
    tiers.assert_at_rest()


def test_a_mode_of_never_reloads_nothing(engines: Engines, references: References) -> None:
    config = {**dram(), "cost": {"mode": "never"}}
    engine = engines.get(tiered(SMALL_POOL, config))
    tiers = Tiers(engine)
    answers = SCENARIOS[0].drive(engine)
    assert not differences(references.answers(SCENARIOS[0]), answers)
    assert tiers.reloaded_tokens() == 0


def test_fp8_blocks_survive_the_way_down_and_back(engines: Engines) -> None:
    pool = replace(SMALL_POOL, kv_cache_dtype="fp8")
    engine = engines.get(pool)
    expected = SCENARIOS[0].drive(engine)
    engine = engines.get(tiered(pool, dram()))
    tiers = Tiers(engine)
    assert not differences(expected, SCENARIOS[0].drive(engine))
    assert tiers.reloaded_tokens() == 28 * 32
