"""Every workload gives the same tokens with stores below DRAM, and the stores are really used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtiers.observe.metrics import BLOCKS_DEMOTED

from .answers import differences, random_prompt
from .harness import EngineOptions, Engines
from .scenarios import SCENARIOS, SMALL_HYBRID_POOL, SMALL_POOL, References, Scenario
from .tiers import SLOT_NBYTES, Tiers, dram, lmdb, nvme, tiered

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TINY_DRAM = "2MiB"  # 15 blocks: every request here has more

# How many blocks of one long prompt reach a store depends on how fast the disk is; these
# evict from DRAM what they read later, so that it must come from below.
MUST_READ = {"preemption", "waves", "cache salts", "aborts"}


@dataclass(frozen=True)
class Below:
    """The stores below a tiny DRAM, over a folder."""

    tiers: Callable[[Path], list[dict[str, Any]]]
    #: Stores that take every block, and must therefore hold some after each scenario.
    written: tuple[str, ...]
    #: Whether blocks are in a store as soon as they are in DRAM.
    through: bool = True


STORES = {
    "NVMe": Below(lambda base: [nvme(base / "nvme")], ("nvme",)),
    "LMDB": Below(lambda base: [lmdb(base / "lmdb")], ("lmdb",)),
    "through": Below(lambda base: [nvme(base / "nvme"), lmdb(base / "lmdb")], ("nvme", "lmdb")),
    "back": Below(
        lambda base: [
            nvme(base / "a", base / "b", write="back"),
            lmdb(base / "lmdb", write="back"),
        ],
        ("nvme", "lmdb"),
        through=False,
    ),
    "second touch": Below(
        lambda base: [nvme(base / "nvme", admit="second_touch"), lmdb(base / "lmdb")], ("lmdb",)
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


# Sorted by engine: starting one costs seconds.
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize(
    "pool", [SMALL_POOL, SMALL_HYBRID_POOL], ids=["one KV group", "two KV groups"]
)
def test_the_same_tokens_as_without_kvtiers(
    engines: Engines,
    references: References,
    base: Path,
    pool: EngineOptions,
    name: str,
    scenario: Scenario,
) -> None:
    expected = references.answers(scenario, pool)
    groups = "two groups" if pool is SMALL_HYBRID_POOL else "one group"
    folder = base / groups / name
    folder.mkdir(parents=True, exist_ok=True)
    below = STORES[name]
    engine = engines.get(tiered(pool, dram(TINY_DRAM, *below.tiers(folder))))
    tiers = Tiers(engine)
    answers = scenario.drive(engine)
    assert not differences(expected, answers)
    tiers.assert_at_rest()
    written = {store: tiers.count(BLOCKS_DEMOTED, store) for store in below.written}
    assert min(written.values()) > 0, written
    if below.through and scenario.name in MUST_READ:
        assert tiers.reloaded_tokens("nvme") + tiers.reloaded_tokens("lmdb") > 0


@pytest.mark.parametrize("name", ["NVMe", "LMDB", "through"])
def test_a_request_larger_than_dram_comes_whole_from_the_store(
    engines: Engines, tmp_path: Path, name: str
) -> None:
    """Its blocks flow through a DRAM of eight slots, down and up."""
    options = EngineOptions(num_gpu_blocks=512)
    config = dram(
        f"{8 * SLOT_NBYTES // 1024}KiB", *STORES[name].tiers(tmp_path), reload={"deadline": "10s"}
    )
    engine = engines.get(tiered(options, config))
    prompt = random_prompt(30 * 32 + 1, seed=24)
    [first] = engine.generate([prompt], 24)
    engine.settle()
    assert engine.reset_prefix_cache()
    [stored] = engine.generate([prompt], 24)  # offers what found no room in DRAM the first time
    engine.settle()
    assert engine.reset_prefix_cache()
    tiers = Tiers(engine)
    [again] = engine.generate([prompt], 24)
    nearest = STORES[name].written[0]
    assert tiers.reloaded_tokens("dram") + tiers.reloaded_tokens(nearest) == 30 * 32
    assert tiers.reloaded_tokens(nearest) >= 22 * 32
    assert not differences({"it": first, "then": first}, {"it": stored, "then": again})
    tiers.assert_at_rest()
