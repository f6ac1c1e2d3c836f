"""Where vLLM clears new blocks before it uses them, a load within the step comes after that."""

from __future__ import annotations

import pytest

from .answers import differences
from .harness import Engines
from .scenarios import SCENARIOS, SMALL_POOL, References
from .tiers import Tiers, dram, tiered

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("sync_below", ["1s", "0ms"], ids=["sync", "async"])
def test_reloaded_blocks_are_not_cleared(
    engines: Engines, references: References, monkeypatch: pytest.MonkeyPatch, sync_below: str
) -> None:
    """It does where layers have KV of several precisions, which no engine on a CPU has."""
    from vllm.v1.kv_cache_interface import KVCacheConfig  # noqa: PLC0415
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # noqa: PLC0415

    expected = references.answers(SCENARIOS[0])
    engines.shutdown()
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True)
    cleared: list[int] = []
    clear = CPUModelRunner._zero_block_ids

    def note(runner: CPUModelRunner, block_ids: list[int]) -> None:
        cleared.extend(block_ids)
        clear(runner, block_ids)

    monkeypatch.setattr(CPUModelRunner, "_zero_block_ids", note)
    engine = engines.get(tiered(SMALL_POOL, dram(reload={"sync_below": sync_below})))
    tiers = Tiers(engine)
    answers = SCENARIOS[0].drive(engine)
    engines.shutdown()
    assert not differences(expected, answers)
    assert cleared
    assert tiers.reloaded_tokens() > 0
