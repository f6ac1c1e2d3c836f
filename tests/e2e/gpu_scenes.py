"""What an engine that takes its tensors for a GPU's must do, whichever copier it has."""

from __future__ import annotations

from kvtiers.observe.metrics import BLOCKS_RELOADED

from .answers import differences, random_prompt
from .harness import Engine, EngineOptions
from .scenarios import SCENARIOS, SMALL_POOL, References
from .tiers import Tiers

CHOSEN = [s for s in SCENARIOS if s.name in ("long prompt again", "preemption", "block boundaries")]


def assert_same_tokens(
    engine: Engine, tiers: Tiers, references: References, pool: EngineOptions
) -> None:
    """Assert that scenarios are answered as without kvtiers, and from DRAM."""
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
