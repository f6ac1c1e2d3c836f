"""Fixtures of the end-to-end tests, and what the engine needs to find before it is imported."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .harness import EngineOptions, Engines, Refuses
    from .scenarios import References

#: What a quiet engine on a small machine wants to find before torch is imported.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # The sampler's one compiled function would cost the first request 14 s of inductor.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

#: What vLLM 0.32 and torch 2.13 warn of themselves while an engine starts.
_ENGINE_WARNINGS = (
    # vllm.triton_utils.dispatcher looks at every attribute of every module.
    "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning",
    # The client of a multiprocess engine leaves its context to the garbage collector.
    "ignore:Unclosed context <zmq:ResourceWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the engine's own warnings pass in these tests, and only here."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for warning in _ENGINE_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning), append=False)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines by configuration; one is alive at a time."""
    from .harness import Engines  # noqa: PLC0415

    engines = Engines(tmp_path_factory.mktemp("models"))
    yield engines
    engines.shutdown()


@pytest.fixture(autouse=True)
def _stopped_before_its_folder_goes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stop the engine whose stores or configuration lie in the folder of a test that ends."""
    if not {"engines", "tmp_path"} <= set(request.fixturenames):
        yield
        return
    folder: Path = request.getfixturevalue("tmp_path")
    engines: Engines = request.getfixturevalue("engines")
    yield
    engines.shutdown_over(folder)


@pytest.fixture(scope="session")
def references(engines: Engines) -> References:
    """The answers of engines without connector."""
    from .scenarios import References  # noqa: PLC0415

    return References(engines)


@pytest.fixture
def refuses(engines: Engines) -> Iterator[Refuses]:
    """Assert that an engine does not start, and why; its remains are cleared away."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown  # noqa: PLC0415

    def refuses(options: EngineOptions, message: str) -> None:
        engines.shutdown()
        with pytest.raises(Exception, match=message):
            engines.start(options)
        ensure_kv_transfer_shutdown()

    engines.shutdown()
    yield refuses
    ensure_kv_transfer_shutdown()
