"""Stores below DRAM, with scheduler and workers in processes of their own."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import prometheus_client
import pytest

from kvtiers.observe.metrics import BLOCKS_DEMOTED, TOKENS_RELOADED

from .answers import differences, random_prompt
from .harness import EngineOptions, Engines
from .scenarios import SCENARIOS, SMALL_HYBRID_POOL, SMALL_POOL, References
from .tiers import dram, lmdb, nvme, tiered

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCK = 32
# What came to DRAM ahead of its request would count as reloaded from there.
RELOAD = {"deadline": "10s", "lookup_deadline": "5s", "prefetch": "off"}


def counted(name: str, tier: str) -> float:
    """Return a counter's value on this process's page, for one tier."""
    return sum(
        sample.value
        for metric in prometheus_client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name and sample.labels.get("tier") == tier
    )


@pytest.mark.parametrize(
    ("pool", "tensor_parallel_size"),
    [(SMALL_POOL, 1), (SMALL_POOL, 2), (SMALL_HYBRID_POOL, 2)],
    ids=["multiprocess", "TP 2", "TP 2, two KV groups"],
)
def test_processes_answer_like_one_process_without_kvtiers(
    engines: Engines,
    references: References,
    tmp_path: Path,
    pool: EngineOptions,
    tensor_parallel_size: int,
) -> None:
    scenarios = [scenario for scenario in SCENARIOS if not scenario.in_process]
    expected = {scenario: references.answers(scenario, pool) for scenario in scenarios}
    options = in_processes(pool, tmp_path, tensor_parallel_size)
    written = {store: counted(BLOCKS_DEMOTED, store) for store in ("nvme", "lmdb")}
    read = counted(TOKENS_RELOADED, "nvme")
    for scenario in scenarios:
        assert not differences(expected[scenario], scenario.drive(engines.get(options))), scenario
    for store, before in written.items():
        assert counted(BLOCKS_DEMOTED, store) > before, store
    assert counted(TOKENS_RELOADED, "nvme") > read
    engines.shutdown()


def test_ranks_find_their_stores_again(engines: Engines, tmp_path: Path) -> None:
    options = in_processes(SMALL_POOL, tmp_path, tensor_parallel_size=2, reload=RELOAD)
    prompt = random_prompt(20 * BLOCK + 1, seed=80)
    [first] = engines.start(options).generate([prompt], 12)
    read = counted(TOKENS_RELOADED, "nvme"), counted(TOKENS_RELOADED, "lmdb")
    [again] = engines.start(options).generate([prompt], 12)
    assert not differences({"it": first}, {"it": again})
    assert counted(TOKENS_RELOADED, "nvme") - read[0] == 20 * BLOCK
    engines.shutdown()
    shutil.rmtree(tmp_path / "nvme")
    [shared] = engines.start(options).generate([prompt], 12)
    assert not differences({"it": first}, {"it": shared})
    assert counted(TOKENS_RELOADED, "lmdb") - read[1] == 20 * BLOCK
    engines.shutdown()


def in_processes(
    pool: EngineOptions, base: Path, tensor_parallel_size: int, **sections: Any
) -> EngineOptions:
    """Return options for an engine in processes of its own, with both stores."""
    return replace(
        tiered(pool, dram("4MiB", nvme(base / "nvme"), lmdb(base / "lmdb"), **sections)),
        multiprocess=True,
        tensor_parallel_size=tensor_parallel_size,
        log_stats=True,
    )
