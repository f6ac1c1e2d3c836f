"""vLLM through `TorchCopier`, on CPU tensors: all of the path of a GPU but its streams."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from .gpu_scenes import CHOSEN, assert_bit_exact, assert_same_tokens
from .harness import Engine, EngineOptions, Engines
from .scenarios import SMALL_HYBRID_POOL, SMALL_POOL, References
from .tiers import Tiers, dram, tiered

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


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
    for scenario in CHOSEN:  # asked before the engine with kvtiers starts: one runs at a time
        references.answers(scenario, pool)
    engine, tiers = start(engines, pool, reload={"sync_below": sync_below})
    assert_same_tokens(engine, tiers, references, pool)


def test_reloaded_blocks_are_bit_exact(engines: Engines) -> None:
    engine, tiers = start(engines, SMALL_POOL)
    assert_bit_exact(engine, tiers, seed=19)


def test_the_start_says_once_that_no_engine_was_run_so(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvtiers"):
        start(engines, SMALL_POOL)
    warned = [r for r in caplog.records if "vLLM on a GPU" in r.getMessage()]
    assert [r.levelno for r in warned] == [logging.WARNING]
