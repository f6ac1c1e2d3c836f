"""Engines that are killed at any moment, and engines that share a store with them."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .answers import Answer, Prompt, differences, random_prompt
from .child_engine import ChildEngine
from .harness import EngineOptions, Engines, Refuses
from .tiers import RANK, SLOT_NBYTES, dram, lmdb, nvme, tiered

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOMY = EngineOptions(num_gpu_blocks=256)
BLOCK = ROOMY.block_size
NUM_KILLS = 10
CAPACITY = 64 << 20
SMALL_DRAM = f"{24 * SLOT_NBYTES // 1024}KiB"  # everything here passes through it
RELOAD = {"deadline": "30s", "lookup_deadline": "10s", "prefetch": "off"}
PUBLISHED_SECONDS = 2.0  # the file store's index follows its frames by half a second

#: One long prompt per life, and what engines work on when they are killed.
LIVES = [random_prompt(12 * BLOCK + 1, seed=400 + life) for life in range(NUM_KILLS)]
WORK = [random_prompt(6 * BLOCK + 9 * i, seed=500 + i) for i in range(12)]


@pytest.fixture(scope="module")
def expected(engines: Engines) -> dict[Prompt, Answer]:
    """What an engine without connector answers, with as many tokens as any test asks for."""
    engine = engines.get(ROOMY)
    prompts = [*LIVES, *WORK]
    return {prompt: engine.generate([prompt], 12)[0] for prompt in prompts}


def assert_right(expected: dict[Prompt, Answer], answers: list[tuple[Prompt, Answer]]) -> None:
    """Assert that answers begin as they should."""
    for prompt, answer in answers:
        num = len(answer.token_ids)
        assert num > 0
        assert answer.token_ids == expected[prompt].token_ids[:num]


def allocated_nbytes(folder: Path) -> int:
    """Return what a folder takes on its disk."""
    return sum(path.stat().st_blocks * 512 for path in [folder, *folder.rglob("*")])


def test_engines_killed_at_random_find_what_was_published(
    engines: Engines, expected: dict[Prompt, Answer], tmp_path: Path
) -> None:
    config = dram(SMALL_DRAM, nvme(tmp_path / "nvme"), lmdb(tmp_path / "lmdb"), reload=RELOAD)
    options = tiered(ROOMY, config)
    directory = engines.model_directory(ROOMY.model)
    engines.shutdown()
    source = random.Random()
    slab = tmp_path / "nvme" / RANK / "frames.slab"
    for life, prompt in enumerate(LIVES):
        with ChildEngine() as engine:
            engine.start(options, directory)
            if life:
                answer, reloaded = engine.generate(LIVES[life - 1])
                assert not differences({"it": expected[LIVES[life - 1]]}, {"it": answer})
                assert reloaded == {"nvme": 12 * BLOCK}, f"after {life} kills"
            answer, reloaded = engine.generate(prompt)
            assert not differences({"it": expected[prompt]}, {"it": answer})
            assert reloaded == {}
            facts = engine.file_store()
            assert facts.num_frames + facts.num_free == facts.num_slots
            assert slab.stat().st_size >= facts.num_slots * SLOT_NBYTES
            assert allocated_nbytes(tmp_path / "nvme") <= CAPACITY
            time.sleep(PUBLISHED_SECONDS)
            engine.work(WORK)
            if life % 2:
                time.sleep(source.uniform(0.0, 0.5))
                assert_right(expected, engine.rest())
                engine.work(WORK)
            time.sleep(source.uniform(0.0, 1.5))
    with ChildEngine() as engine:
        shutil.rmtree(tmp_path / "nvme")
        engine.start(options, directory)
        for prompt in LIVES:
            answer, reloaded = engine.generate(prompt)
            assert not differences({"it": expected[prompt]}, {"it": answer})
            assert reloaded == {"lmdb": 12 * BLOCK}
        engine.stop()


@pytest.fixture
def pair(engines: Engines, tmp_path: Path) -> Iterator[tuple[ChildEngine, ChildEngine]]:
    """Two engines over one LMDB store; the first also has files of its own."""
    directory = engines.model_directory(ROOMY.model)
    shared = lmdb(tmp_path / "lmdb")
    first = dram(SMALL_DRAM, nvme(tmp_path / "nvme", write="back"), shared, reload=RELOAD)
    second = dram(SMALL_DRAM, shared, reload=RELOAD)
    with ChildEngine() as one, ChildEngine() as other:
        one.start(tiered(ROOMY, first), directory)
        other.start(tiered(ROOMY, second), directory)
        yield one, other


def test_two_engines_share_lmdb_and_one_survives_the_other(
    engines: Engines,
    expected: dict[Prompt, Answer],
    pair: tuple[ChildEngine, ChildEngine],
    refuses: Refuses,
    tmp_path: Path,
) -> None:
    one, other = pair
    prompt = LIVES[0]
    answer, reloaded = one.generate(prompt)
    assert reloaded == {}
    from_other, reloaded = other.generate(prompt)  # which has never seen it
    assert reloaded == {"lmdb": 12 * BLOCK}
    for found in (answer, from_other):
        assert not differences({"it": expected[prompt]}, {"it": found})

    held = dram(SMALL_DRAM, nvme(tmp_path / "nvme"))
    refuses(
        tiered(ROOMY, held),
        rf"tiers\[1\]: .*nvme/{RANK} is in use by process {one.pid} .*instance of its own",
    )

    one.work(WORK)
    other.work(WORK)
    time.sleep(random.uniform(0.5, 1.5))
    one.kill()
    time.sleep(1.0)
    assert_right(expected, other.rest())
    for number, prompt in enumerate(LIVES[:3]):
        answer, reloaded = other.generate(prompt)
        assert not differences({"it": expected[prompt]}, {"it": answer})
        assert bool(reloaded) == (number == 0)
    with ChildEngine() as third:
        third.start(
            tiered(ROOMY, dram(SMALL_DRAM, lmdb(tmp_path / "lmdb"), reload=RELOAD)),
            engines.model_directory(ROOMY.model),
        )
        answer, reloaded = third.generate(LIVES[2])  # which only the survivor has written
        assert reloaded == {"lmdb": 12 * BLOCK}
        assert not differences({"it": expected[LIVES[2]]}, {"it": answer})
        third.stop()
    other.stop()
