"""vLLM through `TorchCopier`, on CPU tensors: all of the path of a GPU but its streams."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvtiers.observe.metrics import BLOCKS_RELOADED

from .answers import differences, random_prompt
from .harness import Engine, EngineOptions, Engines
from .scenarios import SCENARIOS, SMALL_HYBRID_POOL, SMALL_POOL, References
from .tiers import Tiers, dram, tiered

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CHOSEN = [s for s in SCENARIOS if s.name in ("long prompt again", "preemption", "block boundaries")]


@pytest.fixture(autouse=True)
def as_on_a_gpu(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the worker side take every tensor for a GPU's."""
    from kvtiers.engines.vllm import worker_side  # noqa: PLC0415

    engines.shutdown()  # the one that runs has another copier, maybe under the same options
    monkeypatch.setattr(worker_side, "device_type", lambda kv_caches: "cuda")
    yield
    engines.shutdown()


def start(engines: Engines, options: EngineOptions, **sections: object) -> tuple[Engine, Tiers]:
    """Return an engine whose copier is torch's, and its tiers."""
    from kvtiers.data.copier_torch import TorchCopier  # noqa: PLC0415

    engine = engines.get(tiered(options, dram(**sections)))
    tiers = Tiers(engine)
    assert isinstance(tiers.worker._executor._executor._shop.copier, TorchCopier)
    return engine, tiers


@pytest.mark.parametrize("sync_below", ["1s", "0ms"], ids=["sync", "async"])
@pytest.mark.parametrize(
    "pool", [SMALL_POOL, SMALL_HYBRID_POOL], ids=["one KV group", "two KV groups"]
)
def test_the_same_tokens_as_without_kvtiers(
    engines: Engines, references: References, pool: EngineOptions, sync_below: str
) -> None:
    expected = {scenario: references.answers(scenario, pool) for scenario in CHOSEN}
    engine, tiers = start(engines, pool, reload={"sync_below": sync_below})
    for scenario in CHOSEN:
        engine.clear()
        before = tiers.count(BLOCKS_RELOADED, "dram")
        assert not differences(expected[scenario], scenario.drive(engine)), scenario
        assert tiers.count(BLOCKS_RELOADED, "dram") > before, scenario
        tiers.assert_at_rest()


def test_reloaded_blocks_are_bit_exact(engines: Engines) -> None:
    import torch  # noqa: PLC0415

    engine, tiers = start(engines, SMALL_POOL)
    prompt = random_prompt(15 * SMALL_POOL.block_size + 3, seed=19)
    engine.generate([prompt])
    computed = engine.inside.kv_of_prompt(prompt)
    assert engine.reset_prefix_cache()
    engine.inside.spoil_kv()
    engine.generate([prompt])
    assert tiers.reloaded_tokens() == 15 * SMALL_POOL.block_size
    reloaded = engine.inside.kv_of_prompt(prompt)
    assert computed.keys() == reloaded.keys()
    for layer, blocks in computed.items():
        assert torch.equal(blocks, reloaded[layer]), layer


def test_the_start_says_once_that_no_engine_was_run_so(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvtiers"):
        start(engines, SMALL_POOL)
    warned = [r for r in caplog.records if "vLLM on a GPU" in r.getMessage()]
    assert [r.levelno for r in warned] == [logging.WARNING]
