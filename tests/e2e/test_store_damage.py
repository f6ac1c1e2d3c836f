"""Files that were damaged cost time, never a token, and the engine goes on with its stores."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtiers.observe.metrics import BLOCKS_FAILED

from . import damage
from .answers import Answer, differences, random_prompt
from .child_engine import ChildEngine
from .harness import Engine, EngineOptions, Engines, Refuses
from .tiers import RANK, SLOT_NBYTES, Tiers, dram, lmdb, nvme, tiered

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOMY = EngineOptions(num_gpu_blocks=512)
BLOCK = ROOMY.block_size
WHOLE = 30 * BLOCK
PROMPT = random_prompt(WHOLE + 1, seed=24)
OTHER = random_prompt(34 * BLOCK + 1, seed=26)
SLAB, INDEX, DATA = f"{RANK}/frames.slab", f"{RANK}/index/data.mdb", "data.mdb"


def over(base: Path, store: str) -> EngineOptions:
    """Return an engine whose DRAM keeps one prompt, and one store below it."""
    below = nvme(base, capacity="16MiB") if store == "nvme" else lmdb(base, capacity="16MiB")
    config = dram(
        f"{36 * SLOT_NBYTES // 1024}KiB",
        below,
        reload={"deadline": "10s", "lookup_deadline": "5s", "sync_below": "0ms", "prefetch": "off"},
    )
    return tiered(ROOMY, config)


@pytest.fixture(scope="module")
def stored(
    engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Answer, dict[str, Path]]:
    """The answer to the prompt, and a folder of each store that holds the prompt."""
    base = tmp_path_factory.mktemp("stored")
    folders = {"nvme": base / "nvme", "lmdb": base / "lmdb"}
    tiers = nvme(folders["nvme"], capacity="16MiB"), lmdb(folders["lmdb"], capacity="16MiB")
    engine = engines.start(tiered(ROOMY, dram("16MiB", *tiers)))
    [answer] = engine.generate([PROMPT], 24)
    engine.settle()
    engines.shutdown()
    return answer, folders


@pytest.fixture
def copies(stored: tuple[Answer, dict[str, Path]], tmp_path: Path) -> Iterator[dict[str, Path]]:
    """A copy of both folders, to be damaged."""
    yield {
        store: damage.copy_store(folder, tmp_path / store) for store, folder in stored[1].items()
    }
    shutil.rmtree(tmp_path)


def serve(engine: Engine, expected: Answer) -> dict[str, int]:
    """Assert that the prompt is answered as before; returns the tokens by tier."""
    tiers = Tiers(engine)
    [answer] = engine.generate([PROMPT], 24)
    assert not differences({"it": expected}, {"it": answer})
    tiers.assert_at_rest()
    return tiers.by_tier()


def push_down(engine: Engine) -> None:
    """Let another prompt take all of DRAM, and the engine forget its own prefix cache."""
    engine.generate([OTHER], 2)
    engine.settle()
    assert engine.reset_prefix_cache()


def assert_goes_on(engine: Engine, store: str, expected: Answer) -> None:
    """Assert that the store takes frames and gives them back."""
    push_down(engine)
    found = serve(engine, expected)
    assert found.get(store, 0) + found.get("dram", 0) == WHOLE
    assert found[store] >= 20 * BLOCK
    assert engine.reset_prefix_cache()


# What is damaged, how, and what is expected of the next start: how many tokens come from the
# store, and whether frames are found to be corrupt.
BETWEEN: dict[str, tuple[str, str, damage.Damage, int, bool]] = {
    "nothing": ("nvme", SLAB, lambda path: None, WHOLE, False),
    "slots flipped": ("nvme", SLAB, damage.flip_slots, 0, True),
    "slot headers flipped": ("nvme", SLAB, damage.flip_slot_headers, 0, True),
    "slots swapped": ("nvme", SLAB, damage.swap_slots, 0, True),
    "slab emptied": ("nvme", SLAB, damage.empty, 0, False),
    "slab lost": ("nvme", SLAB, damage.lose, 0, False),
    "index cut": ("nvme", INDEX, damage.cut, 0, False),
    "index scribbled": ("nvme", INDEX, damage.scribble, 0, False),
    "index lost": ("nvme", INDEX, damage.lose, 0, False),
    "values flipped": ("lmdb", DATA, damage.flip_values, 0, True),
    "values swapped": ("lmdb", DATA, damage.swap_values, 0, True),
    "data cut": ("lmdb", DATA, damage.cut, 0, False),
    "data lost": ("lmdb", DATA, damage.lose, 0, False),
    "data replaced": ("lmdb", DATA, damage.replace_by_folder, 0, False),
    "state lost": ("lmdb", "state.json", damage.lose, 0, False),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_damage_between_runs(
    engines: Engines,
    stored: tuple[Answer, dict[str, Path]],
    copies: dict[str, Path],
    what: str,
) -> None:
    expected = stored[0]
    store, name, spoil, num_tokens, corrupt = BETWEEN[what]
    spoil(copies[store] / name)
    engine = engines.start(over(copies[store], store))
    tiers = Tiers(engine)
    found = serve(engine, expected).get(store, 0)
    assert found == num_tokens
    assert (tiers.count(BLOCKS_FAILED, "corrupt") > 0) == corrupt
    assert engine.reset_prefix_cache()
    assert_goes_on(engine, store, expected)


def test_a_slab_that_was_cut_keeps_what_is_left(
    engines: Engines, stored: tuple[Answer, dict[str, Path]], copies: dict[str, Path]
) -> None:
    slab = copies["nvme"] / SLAB
    with slab.open("r+b") as file:
        file.truncate(damage.FILE_HEADER_NBYTES + 20 * SLOT_NBYTES)
    engine = engines.start(over(copies["nvme"], "nvme"))
    assert serve(engine, stored[0])["nvme"] == 20 * BLOCK
    assert engine.reset_prefix_cache()
    assert_goes_on(engine, "nvme", stored[0])
    assert slab.stat().st_size > 100 * SLOT_NBYTES


def test_scribbled_data_of_a_store_that_was_in_use_is_set_aside(
    engines: Engines, stored: tuple[Answer, dict[str, Path]], copies: dict[str, Path]
) -> None:
    """After a crash of the machine the whole file is checked before it is opened."""
    folder = copies["lmdb"]
    damage.scribble(folder / DATA)
    state = json.loads((folder / "state.json").read_text())
    state |= {"clean": False, "boot_id": "of an earlier run of the system"}
    (folder / "state.json").write_text(json.dumps(state))
    engine = engines.start(over(folder, "lmdb"))
    assert (folder / "set-aside.mdb").exists()
    assert serve(engine, stored[0]) == {}
    assert engine.reset_prefix_cache()
    assert_goes_on(engine, "lmdb", stored[0])


REFUSED: dict[str, tuple[str, str, damage.Damage, str]] = {
    "slab": ("nvme", SLAB, damage.replace_by_folder, "must be a regular file"),
    "index": ("nvme", INDEX, damage.replace_by_folder, "cannot open the index"),
    "generation": (
        "nvme",
        "0/generations",
        lambda path: [record.write_text("x") for record in path.iterdir()] and None,
        "no record of a generation",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_used_is_refused_at_start(
    refuses: Refuses, engines: Engines, copies: dict[str, Path], what: str
) -> None:
    store, name, spoil, message = REFUSED[what]
    if what == "generation":
        engine = engines.start(over(copies[store], store))
        assert engine.reset_prefix_cache(reset_connector=True)
        engines.shutdown()
    spoil(copies[store] / name)
    refuses(over(copies[store], store), message)


DURING: dict[str, list[tuple[str, damage.Damage]]] = {
    "nvme": [
        (SLAB, damage.flip_slots),
        (SLAB, damage.swap_slots),
        (SLAB, damage.cut),
        (SLAB, damage.empty),
        (SLAB, damage.lose),
    ],
    "lmdb": [
        (DATA, damage.flip_values),
        (DATA, damage.swap_values),
        ("state.json", damage.lose),
    ],
}


@pytest.mark.parametrize("store", DURING)
def test_damage_while_the_engine_runs(
    engines: Engines,
    stored: tuple[Answer, dict[str, Path]],
    copies: dict[str, Path],
    store: str,
) -> None:
    expected = stored[0]
    engine = engines.start(over(copies[store], store))
    assert serve(engine, expected) == {store: WHOLE}
    assert engine.reset_prefix_cache()
    for name, spoil in DURING[store]:
        push_down(engine)
        tiers = Tiers(engine)
        spoil(copies[store] / name)
        serve(engine, expected)
        if spoil in (damage.flip_slots, damage.swap_slots, damage.flip_values):
            assert tiers.count(BLOCKS_FAILED, "corrupt") > 0, spoil.__name__
        assert engine.reset_prefix_cache()
        push_down(engine)
        serve(engine, expected)  # what lay behind the first bad frames was not read yet
        assert engine.reset_prefix_cache()
        assert_goes_on(engine, store, expected)


def test_lmdb_files_that_vanish_under_a_running_engine(
    engines: Engines, stored: tuple[Answer, dict[str, Path]], copies: dict[str, Path]
) -> None:
    """In a process of its own: a mapping whose file is shorter kills who touches it."""
    expected, data = stored[0], copies["lmdb"] / DATA
    engines.shutdown()
    with ChildEngine() as engine:
        engine.start(over(copies["lmdb"], "lmdb"), engines.model_directory(ROOMY.model))
        answer, reloaded = engine.generate(PROMPT, 24)
        assert reloaded == {"lmdb": WHOLE}
        for spoil in (damage.cut, damage.lose, damage.replace_by_folder):
            engine.generate(OTHER, 2)  # takes all of DRAM
            spoil(data)
            answers, reloaded = [engine.generate(PROMPT, 24)[0]], {}
            deadline = time.monotonic() + 60
            while reloaded.get("lmdb", 0) < 20 * BLOCK:
                assert time.monotonic() < deadline, f"not back after {spoil.__name__}"
                time.sleep(0.5)  # it looks again every two seconds
                engine.generate(OTHER, 2)
                answer, reloaded = engine.generate(PROMPT, 24)
                answers.append(answer)
            for answer in answers:
                assert not differences({"it": expected}, {"it": answer}), spoil.__name__
            assert data.stat().st_size > 16 << 20
        engine.stop()
