"""A request that waits in the real engine's queue finds its blocks in DRAM when its turn comes."""

from __future__ import annotations

import pytest

from kvtiers.observe.metrics import BLOCKS_PREFETCHED

from .answers import differences, random_prompt
from .harness import Engine, EngineOptions, Engines
from .tiers import SLOT_NBYTES, Tiers, dram, memory, tiered

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ONE_AT_A_TIME = EngineOptions(num_gpu_blocks=512, max_num_seqs=1)
BLOCK = ONE_AT_A_TIME.block_size
NUM_SLOTS = 160
NUM_BLOCKS = 20  # an eighth of the slots: what one waiting request may have
PROMPT = random_prompt(NUM_BLOCKS * BLOCK + 1, seed=70)
OTHER = random_prompt(3 * BLOCK, seed=71)
BELOW = dram(f"{NUM_SLOTS * SLOT_NBYTES // 1024}KiB", memory(), reload={"sync_below": "0ms"})


def push_down(engine: Engine) -> None:
    """Let other prompts take all of DRAM."""
    for seed in range(80, 85):
        engine.generate([random_prompt(36 * BLOCK + 1, seed=seed)], 2)
    engine.settle()


def test_what_waits_is_prefetched_but_for_what_the_engine_has(engines: Engines) -> None:
    engine = engines.get(tiered(ONE_AT_A_TIME, BELOW))
    [first] = engine.generate([PROMPT], 12)
    push_down(engine)
    assert engine.reset_prefix_cache()
    tiers = Tiers(engine)

    def behind_another(name: str) -> None:
        engine.add(OTHER, 40, name=f"before {name}")
        engine.step()
        engine.add(PROMPT, 12, name=name)
        assert not differences({name: first}, {name: engine.run()[name]})

    behind_another("again")
    assert tiers.count(BLOCKS_PREFETCHED) == NUM_BLOCKS
    assert tiers.reloaded_tokens("memory") == 0
    assert tiers.reloaded_tokens("dram") == NUM_BLOCKS * BLOCK
    push_down(engine)  # 180 of 512 blocks: vLLM's own cache keeps the prompt
    behind_another("from HBM")
    assert tiers.count(BLOCKS_PREFETCHED) == NUM_BLOCKS
    tiers.assert_at_rest()
