"""vLLM through `CudaCopier`, on CPU tensors and a pretended driver: a GPU's path without one."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from .gpu_scenes import assert_bit_exact, assert_same_tokens, each_pool, each_way, starts
from .harness import EngineOptions, Engines
from .scenarios import SMALL_POOL, References

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
start = starts("CudaCopier", copy={"native": "on"})


def fake_driver() -> ModuleType:
    """The module of the tests of copiers."""
    path = Path(__file__).parents[1] / "data" / "fake_driver.py"
    spec = importlib.util.spec_from_file_location("fake_driver_of_e2e", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def as_on_a_gpu(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let tensors of the CPU pass for a GPU's, and a library of the tests for its driver."""
    from kvtiers.data import copier_cuda_make, copier_device  # noqa: PLC0415
    from kvtiers.data.cuda_device import find_device  # noqa: PLC0415
    from kvtiers.engines.vllm import worker_side  # noqa: PLC0415

    module = fake_driver()
    if module.missing:
        pytest.skip(module.missing)
    engines.shutdown()  # the one that runs has another copier, maybe under the same options
    module.FakeDriver()
    library = str(module.library())
    place = SimpleNamespace(cuda=0, current_stream=lambda: 0)
    monkeypatch.setattr(worker_side, "device_type", lambda kv_caches: "cuda")
    monkeypatch.setattr(copier_device, "place_of", lambda arrays, stream: place)
    monkeypatch.setattr(
        copier_device, "flat_addresses", lambda layout, arrays: [a.data_ptr() for a in arrays]
    )
    monkeypatch.setattr(
        copier_device, "find_device", lambda number, stream, _: find_device(number, stream, library)
    )
    kernels = {"of the tests": lambda: module.KERNELS}
    monkeypatch.setattr(copier_cuda_make, "compiled_here", lambda device: kernels)
    yield
    engines.shutdown()


@each_way
@each_pool
def test_the_same_tokens_as_without_kvtiers(
    engines: Engines, references: References, pool: EngineOptions, sync_below: str
) -> None:
    assert_same_tokens(start, engines, references, pool, sync_below)


def test_reloaded_blocks_are_bit_exact_by_every_route(engines: Engines) -> None:
    from kvtiers.data.copier_cuda_routes import Route, RouteTable  # noqa: PLC0415

    engine, tiers = start(engines, SMALL_POOL)
    copier = tiers.worker._executor._executor._shop.copier
    for seed, route in enumerate(Route):
        copier.routes = RouteTable(dict.fromkeys(copier.routes.rows, ((1, route),)))
        assert_bit_exact(engine, tiers, seed=19 + seed)


def test_the_start_says_that_no_gpu_has_run_it(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvtiers"):
        start(engines, SMALL_POOL)
    said = [record.getMessage() for record in caplog.records]
    assert any("copying by CUDA kernels and DMA: group 0" in text for text in said)
    assert any("has not been run with kvtiers" in text for text in said)
