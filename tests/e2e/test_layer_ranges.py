"""Loads that come range of layers by range of layers, within the step that computes the rest."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtiers.connector import stores as stores_module
from kvtiers.control.tier import Residence
from kvtiers.cost.prefill import PrefillModel, PrefillSpeed
from kvtiers.data.memory_store import MemoryStore
from kvtiers.data.slab import Slab
from kvtiers.model.outcome import Outcome
from kvtiers.observe.metrics import BLOCKS_FAILED
from kvtiers.testing.faults import FaultyStore, Flip, ThrottledStore

from .answers import Answer, Prompt, differences, random_prompt
from .harness import Engine, EngineOptions, Engines, Refuses
from .scenarios import SCENARIOS, SMALL_HYBRID_POOL, SMALL_POOL, References
from .tiers import Tiers, dram, lmdb, memory, nvme, tiered

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOMY = EngineOptions(num_gpu_blocks=256)
NUM_BLOCKS = 12
PREFIX = random_prompt(NUM_BLOCKS * ROOMY.block_size, seed=1)
PROMPT = PREFIX + random_prompt(300, seed=2)  # the rest takes a step of its own


def ranges(num_ranges: int, **reload: Any) -> dict[str, Any]:
    """Return the section of the configuration."""
    options = {"layer_ranges": num_ranges, "sync_below": "0ms", "prefetch": "off", **reload}
    return {"reload": options}


class Below:
    """The memory store of the engine that is running: it can be slowed, and it can fail."""

    slow: ThrottledStore
    faulty: FaultyStore


@pytest.fixture
def below(monkeypatch: pytest.MonkeyPatch, engines: Engines) -> Iterator[type[Below]]:
    """Put both wrappers on memory stores of engines to come, which are not left to other tests."""

    def make(slab: Slab, capacity_nbytes: int) -> FaultyStore:
        Below.slow = ThrottledStore(MemoryStore(slab, capacity_nbytes), 1e12)
        Below.faulty = FaultyStore(Below.slow, slab)
        return Below.faulty

    monkeypatch.setattr(stores_module, "MemoryStore", make)
    yield Below
    engines.shutdown()


class Layered:
    """An engine with ranges of layers, whose reloads are all worth a place in a step."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.tiers = engine, Tiers(engine)

    def leave_to(self, store: str) -> None:
        """Leave all blocks to one store, and forget everything else."""
        self.engine.settle()
        assert self.engine.reset_prefix_cache()
        controller = self.tiers.controller
        names = [settings.name for settings in controller.settings.stores]
        above = names[: names.index(store)] if store != "dram" else []
        gone = [controller.stores[names.index(name)] for name in above]
        for tier in [*gone, *([controller.dram] if store != "dram" else [])]:
            for entry in [e for e in tier.entries() if e.residence is Residence.READY]:
                tier.doom(entry)

    def answer(self, prompt: Prompt, max_tokens: int = 8) -> Answer:
        """Answer as if computing took long: whether a load overlaps is not left to the clock."""
        cost = self.tiers.controller.cost
        cost.prefill = PrefillModel.of(PrefillSpeed(0.5, 1e12), cost.prefill.shape, 512)
        [answer] = self.engine.generate([prompt], max_tokens)
        return answer

    def reload(self, expected: Answer, store: str) -> int:
        """Assert that the prompt is answered as before by a load in a step; returns the blocks
        of it that did not come."""
        self.leave_to(store)
        num_before = len(self.tiers.scheduler.decisions.finished())
        assert not differences({"it": expected}, {"it": self.answer(PROMPT)})
        decision = self.tiers.scheduler.decisions.finished()[num_before]
        assert decision.in_step
        assert decision.num_hit_blocks == {store: NUM_BLOCKS}
        assert decision.outcome is not None
        self.tiers.assert_at_rest()
        return int(decision.outcome.num_failed_blocks)


def expected_of(engines: Engines) -> Answer:
    """Return what an engine without kvtiers answers."""
    [expected] = engines.get(ROOMY).generate([PROMPT], 8)
    return expected


def test_every_tier_gives_the_same_tokens(
    engines: Engines, below: type[Below], tmp_path: Path
) -> None:
    expected = expected_of(engines)
    for num_ranges in (2, 4):
        stores = memory(), nvme(tmp_path / f"{num_ranges}"), lmdb(tmp_path / f"{num_ranges}.lmdb")
        options = tiered(ROOMY, dram("64MiB", *stores, **ranges(num_ranges, lookup_deadline="5s")))
        layered = Layered(engines.start(options))
        layered.answer((*PREFIX, 1))  # stores the prefix, and not what comes after it
        for store in ("dram", "memory", "nvme", "lmdb"):
            below.slow.bytes_per_second = 2e7 if store == "memory" else 1e12
            assert layered.reload(expected, store) == 0, (num_ranges, store)
            forget_rest(layered)
        engines.shutdown()


def forget_rest(layered: Layered) -> None:
    """Let the tiers forget all of the prompt but its prefix."""
    controller = layered.tiers.controller
    layered.engine.settle()
    layered.engine.reset_prefix_cache(reset_connector=True)
    layered.engine.settle()
    layered.answer((*PREFIX, 1))
    assert controller.dram.num_entries


@pytest.mark.parametrize("num_ranges", [4])
def test_what_goes_wrong_in_mid_forward_costs_time_and_no_token(
    engines: Engines, below: type[Below], num_ranges: int
) -> None:
    expected = expected_of(engines)
    sections = ranges(num_ranges, deadline="500ms")
    layered = Layered(engines.start(tiered(ROOMY, dram("64MiB", memory(), **sections))))
    layered.answer((*PREFIX, 1))
    for fault in (Flip(offset=5000), Outcome.MISSING, OSError("gone")):
        below.faulty.fail("get", fault)
        assert layered.reload(expected, "memory") > 0, fault
        forget_rest(layered)
    assert layered.tiers.count(BLOCKS_FAILED, "corrupt") > 0
    below.slow.bytes_per_second = 1e6
    began = time.monotonic()
    assert layered.reload(expected, "memory") > 0
    assert time.monotonic() - began > 0.5  # the deadline
    below.slow.bytes_per_second = 1e12


def test_a_busy_engine_answers_like_one_without_kvtiers(
    engines: Engines, references: References
) -> None:
    """Aborts, preemptions and resets around loads in steps, from a store below a tiny DRAM."""
    expected = {s: references.answers(s) for s in SCENARIOS}
    reload = ranges(4)["reload"]
    options = tiered(SMALL_POOL, dram("4MiB", memory(), reload=reload))
    for scenario in SCENARIOS:
        engine = engines.get(options)
        assert not differences(expected[scenario], scenario.drive(engine)), scenario
    decisions = Tiers(engine).scheduler.decisions.finished()
    assert sum(decision.in_step for decision in decisions) >= 10
    engines.shutdown()


def test_ranks_wait_each_for_their_own(
    engines: Engines, references: References, tmp_path: Path
) -> None:
    log = tmp_path / "decisions.jsonl"
    cost = {"mode": "always", "decision_log": str(log)}
    config = dram("4MiB", memory(), **ranges(2), cost=cost)
    options = replace(tiered(SMALL_POOL, config), multiprocess=True, tensor_parallel_size=2)
    (scenario,) = (each for each in SCENARIOS if each.name == "block boundaries")
    expected = references.answers(scenario, SMALL_POOL)
    assert not differences(expected, scenario.drive(engines.get(options)))
    engines.shutdown()
    decisions = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum(decision["in_step"] for decision in decisions) > 0


@pytest.mark.parametrize(
    ("options", "num_ranges", "message"),
    [
        (SMALL_HYBRID_POOL, 2, "the model has 2 KV groups"),
        (SMALL_POOL, 5, "the model has 4 layers with KV; write 4 at most"),
    ],
    ids=["several groups", "too many"],
)
def test_ranges_that_cannot_be_had_are_refused_at_start(
    refuses: Refuses, options: EngineOptions, num_ranges: int, message: str
) -> None:
    refuses(tiered(options, dram(**ranges(num_ranges))), message)
