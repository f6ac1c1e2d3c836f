"""What an engine that takes its tensors for a GPU's must do, whichever copier it has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtiers.observe.metrics import BLOCKS_RELOADED

from .answers import differences, random_prompt
from .harness import Engine, EngineOptions, Engines
from .scenarios import SCENARIOS, SMALL_HYBRID_POOL, SMALL_POOL, References
from .tiers import Tiers, dram, tiered

CHOSEN = [s for s in SCENARIOS if s.name in ("long prompt again", "preemption", "block boundaries")]
each_way = pytest.mark.parametrize("sync_below", ["1s", "0ms"], ids=["sync", "async"])
each_pool = pytest.mark.parametrize(
    "pool", [SMALL_POOL, SMALL_HYBRID_POOL], ids=["one KV group", "two KV groups"]
)

Start = Callable[..., tuple[Engine, Tiers]]


def starts(copier: str, **always: object) -> Start:
    """Return how to start an engine with the copier of a name, by options and sections."""

    def start(engines: Engines, options: EngineOptions, **sections: object) -> tuple[Engine, Tiers]:
        engine = engines.get(tiered(options, dram(**always, **sections)))
        tiers = Tiers(engine)
        assert type(tiers.worker._executor._executor._shop.copier).__name__ == copier
        return engine, tiers

    return start


def assert_same_tokens(
    start: Start, engines: Engines, references: References, pool: EngineOptions, sync_below: str
) -> None:
    """Assert that scenarios are answered as without kvtiers, and from DRAM."""
    for scenario in CHOSEN:  # asked before the engine with kvtiers starts: one runs at a time
        references.answers(scenario, pool)
    engine, tiers = start(engines, pool, reload={"sync_below": sync_below})
    for scenario in CHOSEN:
        engine.clear()
        before = tiers.count(BLOCKS_RELOADED, "dram")
        found = scenario.drive(engine)
        assert not differences(references.answers(scenario, pool), found), scenario
        assert tiers.count(BLOCKS_RELOADED, "dram") > before, scenario
        tiers.assert_at_rest()


def assert_bit_exact(engine: Engine, tiers: Tiers, seed: int) -> None:
    """Assert that what is reloaded is what was computed, byte for byte."""
    import torch  # noqa: PLC0415

    prompt = random_prompt(15 * SMALL_POOL.block_size + 3, seed=seed)
    engine.generate([prompt])
    computed = engine.inside.kv_of_prompt(prompt)
    assert engine.reset_prefix_cache()
    engine.inside.spoil_kv()
    before = tiers.reloaded_tokens()
    engine.generate([prompt])
    assert tiers.reloaded_tokens() - before == 15 * SMALL_POOL.block_size
    reloaded = engine.inside.kv_of_prompt(prompt)
    assert computed.keys() == reloaded.keys()
    for layer, blocks in computed.items():
        assert torch.equal(blocks, reloaded[layer]), layer
