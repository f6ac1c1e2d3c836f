"""vLLM through `TorchCopier`, on CPU tensors: all of the path of a GPU but its streams."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from .gpu_scenes import assert_bit_exact, assert_same_tokens, each_pool, each_way, starts
from .harness import EngineOptions, Engines
from .scenarios import SMALL_POOL, References

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
start = starts("TorchCopier")


@pytest.fixture(autouse=True)
def as_on_a_gpu(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the worker side take every tensor for a GPU's."""
    from kvtiers.engines.vllm import worker_side  # noqa: PLC0415

    engines.shutdown()  # the one that runs has another copier, maybe under the same options
    monkeypatch.setattr(worker_side, "device_type", lambda kv_caches: "cuda")
    yield
    engines.shutdown()


@each_way
@each_pool
def test_the_same_tokens_as_without_kvtiers(
    engines: Engines, references: References, pool: EngineOptions, sync_below: str
) -> None:
    assert_same_tokens(start, engines, references, pool, sync_below)


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
