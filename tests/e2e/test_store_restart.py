"""What a start of the engine finds in its stores, and what it must not."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtiers.bench.random_model import TINY, TINY_HYBRID, RandomModel
from kvtiers.observe.metrics import BLOCKS_FAILED

from .answers import differences, random_prompt
from .harness import Engine, EngineOptions, Engines
from .tiers import SLOT_NBYTES, Tiers, dram, lmdb, nvme, tiered

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOMY = EngineOptions(num_gpu_blocks=512)
BLOCK = ROOMY.block_size
WHOLE = 30 * BLOCK
PROMPT = random_prompt(WHOLE + 1, seed=24)
LARGE_DRAM = f"{40 * SLOT_NBYTES // 1024}KiB"  # loses nothing of one prompt
#: All the time that a load needs, and nothing that comes to DRAM before the engine asks.
RELOAD = {"deadline": "10s", "lookup_deadline": "5s", "prefetch": "off"}


def both(base: Path, capacity: str = LARGE_DRAM, **sections: Any) -> dict[str, Any]:
    """Return DRAM with both stores below it; a reload has all the time that it needs."""
    stores = nvme(base / "nvme"), lmdb(base / "lmdb")
    return dram(capacity, *stores, reload=RELOAD, **sections)


def read_again(engine: Engine, expected: object) -> dict[str, int]:
    """Assert that the engine answers the prompt as before; returns the tokens by tier."""
    tiers = Tiers(engine)
    [answer] = engine.generate([PROMPT], 24)
    assert not differences({"it": expected}, {"it": answer})  # type: ignore[dict-item]
    assert tiers.count(BLOCKS_FAILED, "corrupt") == 0
    tiers.assert_at_rest()
    return tiers.by_tier()


@pytest.mark.parametrize("model", [TINY, TINY_HYBRID], ids=["one KV group", "two KV groups"])
def test_a_prompt_comes_from_the_nearest_store_after_a_restart(
    engines: Engines, tmp_path: Path, model: RandomModel
) -> None:
    import torch  # noqa: PLC0415

    options = tiered(replace(ROOMY, model=model), both(tmp_path, "16MiB"))
    engine = engines.start(options)
    [first] = engine.generate([PROMPT], 24)
    computed = engine.inside.kv_of_prompt(PROMPT)

    engine = engines.start(options)
    engine.inside.spoil_kv()
    assert read_again(engine, first) == {"nvme": WHOLE}
    reloaded = engine.inside.kv_of_prompt(PROMPT)
    assert computed.keys() == reloaded.keys()
    for layer, blocks in computed.items():
        assert torch.equal(blocks, reloaded[layer]), layer

    engines.shutdown()
    shutil.rmtree(tmp_path / "nvme")
    engine = engines.start(options)
    assert read_again(engine, first) == {"lmdb": WHOLE}
    assert engine.reset_prefix_cache()
    if model is TINY:  # what was promoted from LMDB
        assert sum(read_again(engine, first).values()) == WHOLE


def test_a_prompt_larger_than_dram_comes_whole_after_a_restart(
    engines: Engines, tmp_path: Path
) -> None:
    options = tiered(ROOMY, both(tmp_path, f"{8 * SLOT_NBYTES // 1024}KiB"))
    engine = engines.start(options)
    [first] = engine.generate([PROMPT], 24)
    engine.settle()
    assert engine.reset_prefix_cache()
    read_again(engine, first)  # stores what found no room in DRAM
    assert read_again(engines.start(options), first) == {"nvme": WHOLE}


def test_with_write_back_a_restart_finds_what_had_left_dram(
    engines: Engines, tmp_path: Path
) -> None:
    stores = nvme(tmp_path / "nvme", write="back"), lmdb(tmp_path / "lmdb", write="back")
    reload = RELOAD
    options = tiered(ROOMY, dram(LARGE_DRAM, *stores, reload=reload))
    engine = engines.start(options)
    [first] = engine.generate([PROMPT], 24)
    engine.settle()
    for seed in range(25, 33):  # take all of DRAM, and the tail of a prompt leaves first
        engine.generate([random_prompt(36 * BLOCK, seed=seed)], 24)
        engine.settle()
    found = read_again(engines.start(options), first)
    assert set(found) == {"nvme"}
    assert 0 < found["nvme"] <= WHOLE


def test_nothing_from_before_a_reset_is_served_after_it_or_after_a_restart(
    engines: Engines, tmp_path: Path
) -> None:
    options = tiered(ROOMY, both(tmp_path))
    engine = engines.start(options)
    [first] = engine.generate([PROMPT], 24)
    assert engine.reset_prefix_cache(reset_connector=True)
    assert read_again(engine, first) == {}  # computed, and stored for this life only
    assert engine.reset_prefix_cache()
    assert sum(read_again(engine, first).values()) == WHOLE

    engine = engines.start(options)
    assert read_again(engine, first) == {}  # computed, and stored for all lives from now on
    assert read_again(engines.start(options), first) == {"nvme": WHOLE}


def test_other_weights_at_the_same_place_are_another_model(
    engines: Engines, tmp_path: Path
) -> None:
    """Even where name, sizes and times of the files are those of the first."""
    place = tmp_path / "model"
    first, other = (
        engines.model_directory(model) for model in (TINY, replace(TINY, seed=TINY.seed + 1))
    )
    for name in ("model.safetensors", "config.json"):
        stat = (first / name).stat()
        os.utime(other / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    options = tiered(ROOMY, both(tmp_path))
    place.symlink_to(first)
    engine = engines.start(options, place)
    [answer] = engine.generate([PROMPT], 24)

    place.unlink()
    place.symlink_to(other)
    engine = engines.start(options, place)
    tiers = Tiers(engine)
    [of_other] = engine.generate([PROMPT], 24)
    assert tiers.by_tier() == {}
    assert of_other.token_ids != answer.token_ids
    assert engine.reset_prefix_cache(reset_connector=True)
    assert read_again(engine, of_other) == {}

    place.unlink()
    place.symlink_to(first)
    assert read_again(engines.start(options, place), answer) == {"nvme": WHOLE}


# One slot is 132 KiB in each of these, so that the file store opens.
OTHERS = {
    "RoPE scaling": replace(
        ROOMY,
        hf_overrides={
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
        },
    ),
    "dtype and block size": replace(ROOMY, model=replace(TINY, dtype="bfloat16"), block_size=64),
    "KV dtype and block size": replace(ROOMY, kv_cache_dtype="fp8", block_size=128),
}


def test_other_engines_over_the_same_folders_miss_and_destroy_nothing(
    engines: Engines, tmp_path: Path
) -> None:
    options = tiered(ROOMY, both(tmp_path))
    engine = engines.start(options)
    [first] = engine.generate([PROMPT], 24)
    for name, other in OTHERS.items():
        engine = engines.start(tiered(other, both(tmp_path, "16MiB")))
        tiers = Tiers(engine)
        [missed] = engine.generate([PROMPT], 24)
        engine.settle()
        assert tiers.by_tier() == {}, name
        if name == "RoPE scaling":  # the control: it is another model
            assert missed.token_ids != first.token_ids
        assert engine.reset_prefix_cache()
        tiers = Tiers(engine)
        [reloaded] = engine.generate([PROMPT], 24)
        assert sum(tiers.by_tier().values()) == WHOLE // other.block_size * other.block_size
        assert engine.reset_prefix_cache(reset_connector=True)
        [computed] = engine.generate([PROMPT], 24)
        assert computed.token_ids == missed.token_ids == reloaded.token_ids, name
    assert read_again(engines.start(options), first) == {"nvme": WHOLE}
    engines.shutdown()
    shutil.rmtree(tmp_path / "nvme")
    assert read_again(engines.start(options), first) == {"lmdb": WHOLE}


def test_other_slots_over_the_same_paths_lie_beside_and_destroy_nothing(
    engines: Engines, tmp_path: Path
) -> None:
    options = tiered(ROOMY, both(tmp_path))
    engine = engines.start(options)
    [first] = engine.generate([PROMPT], 24)
    larger = tiered(replace(ROOMY, block_size=64), both(tmp_path, "16MiB"))
    engine = engines.start(larger)
    tiers = Tiers(engine)
    [answer] = engine.generate([PROMPT], 24)
    assert tiers.by_tier() == {}
    assert not differences({"it": first}, {"it": answer})
    assert read_again(engines.start(options), first) == {"nvme": WHOLE}
