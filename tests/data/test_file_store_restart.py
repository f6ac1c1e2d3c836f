"""A file store after a restart: clean, killed, resized, damaged."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time

import pytest
from file_stores import capacity_of, disk_usage, fills_up, open_box, settled_free, wait_for

from kvtiers.data.file_index import FileIndex
from kvtiers.data.file_recovery import inventory_of
from kvtiers.data.file_settings import FileStoreSettings, index_nbytes
from kvtiers.data.file_store import FileStore
from kvtiers.data.slab import Slab
from kvtiers.model.errors import StoreError
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome
from kvtiers.testing.store_machine import store_key_of
from kvtiers.testing.store_suite import SLOT_NBYTES, Harness

pytestmark = pytest.mark.filterwarnings("error")
OK, FULL, MISSING, CORRUPT = Outcome.OK, Outcome.FULL, Outcome.MISSING, Outcome.CORRUPT


def reopened(box, slab, *paths, **settings):
    box.store.close()
    return open_box(slab, *paths, **settings)


def test_frames_outlive_a_clean_exit(store_slab, tmp_path):
    box = open_box(store_slab, tmp_path)
    assert box.put(1, 2, 3) == [OK] * 3
    box = reopened(box, store_slab, tmp_path)
    assert box.store.keys() == [store_key_of(n) for n in (1, 2, 3)]
    assert box.get(3, 1, 2) == [OK] * 3
    assert [box.slot_is(slot, n) for slot, n in enumerate((3, 1, 2))] == [True] * 3
    box.store.close()


def test_usage_is_known_after_a_restart(store_slab, tmp_path):
    """R57: it starts where it ended, so that the bound holds, and no room is lost."""
    box = open_box(store_slab, tmp_path, num_slots=10)
    assert box.put(*range(9)) == [OK] * 9
    box = reopened(box, store_slab, tmp_path, num_slots=10)
    assert settled_free(box) == 1
    assert box.get(*range(9)) == [OK] * 9  # now they are asked for, so they stay
    assert box.put(100, 101, 102) == [OK, FULL, FULL]
    box = reopened(box, store_slab, tmp_path, num_slots=10)
    assert settled_free(box) == 0
    assert disk_usage(tmp_path) <= capacity_of(10)
    box.store.close()


def test_frames_that_nobody_asks_for_make_room_oldest_first(store_slab, tmp_path):
    """Control cannot evict what it cannot name: another model's frames, another life's."""
    box = open_box(store_slab, tmp_path, num_slots=4)
    for number in (3, 1, 2, 4):
        box.put(number)
    box = reopened(box, store_slab, tmp_path, num_slots=4)
    assert box.store.num_inherited == 4
    assert box.get(1) == [OK]
    assert box.put(10, 11) == [OK] * 2
    assert box.store.keys() == [store_key_of(n) for n in (1, 4, 10, 11)]
    assert box.put(12, 13) == [OK, FULL]
    box.store.close()


def test_inventory_names_what_was_found_at_opening(store_slab, tmp_path):
    box = open_box(store_slab, tmp_path)
    assert box.store.inventory == b""
    box.put(3, 1, 2)
    assert box.store.inventory == b""
    box = reopened(box, store_slab, tmp_path)
    found = b"".join(sorted(store_key_of(n)[:8] for n in (1, 2, 3)))
    assert box.store.inventory == found
    box.store.delete([store_key_of(1)])
    assert box.store.inventory == found  # of the opening: whatever goes later is told otherwise
    box.store.close()


@pytest.mark.alone
def test_inventory_of_a_million_frames_takes_less_than_a_second():
    chance = random.Random(1)
    keys = [StoreKey(chance.randbytes(32)) for _ in range(10**6)]
    started = time.thread_time()
    found = inventory_of(keys)
    assert time.thread_time() - started < 1
    assert [found[i : i + 8] for i in range(0, 80, 8)] == sorted(key[:8] for key in keys)[:10]
    assert len(found) == 8 * 10**6


def test_deleted_frames_stay_deleted(store_slab, tmp_path):
    box = open_box(store_slab, tmp_path)
    box.put(1, 2)
    box.store.delete([store_key_of(1)])
    box = reopened(box, store_slab, tmp_path)
    assert box.get(1, 2) == [MISSING, OK]
    box.store.close()


def test_clear_begins_a_generation_that_is_remembered(store_slab, tmp_path):
    box = open_box(store_slab, tmp_path)
    assert box.store.generation == 0
    box.put(1)
    box.store.clear()
    assert box.store.generation == 1
    box.put(2)
    box = reopened(box, store_slab, tmp_path)
    assert box.store.generation == 1
    assert box.get(1, 2) == [MISSING, OK]
    assert settled_free(box) == 7
    box.store.close()


def test_frames_are_published_without_a_close(store_slab, tmp_path):
    """Another process can find them, and a kill costs no more than the last moment."""
    box = open_box(store_slab, tmp_path, publish_seconds=0.01)
    box.put(1)
    copy = tmp_path / "copy"

    def published() -> bool:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tmp_path / "0/0-12288/index", copy / "index")
        index = FileIndex(copy, 1, SLOT_NBYTES, index_nbytes(8))
        try:
            return store_key_of(1) in index.records()
        finally:
            index.close()

    wait_for(published)
    box.store.close()


def test_larger_and_smaller_capacity(store_slab, tmp_path):
    box = open_box(store_slab, tmp_path, num_slots=4)
    box.put(1, 2, 3, 4)
    box = reopened(box, store_slab, tmp_path, num_slots=8)
    assert settled_free(box) == 4
    assert box.get(1, 2, 3, 4) == [OK] * 4
    box = reopened(box, store_slab, tmp_path, num_slots=2)
    assert box.get(1, 2, 3, 4) == [OK, OK, MISSING, MISSING]
    assert disk_usage(tmp_path) <= capacity_of(2)
    box.store.close()


@pytest.mark.parametrize("num_slots", [16, 900, 1700])
def test_much_smaller_capacity_has_room_for_its_index(tmp_path, num_slots):
    """The old index is larger than the new one may become: nothing could be deleted in it."""
    with contextlib.closing(Slab(64, SLOT_NBYTES, pin="off")) as slab:
        box = open_box(slab, tmp_path, num_slots=2000)
        assert fills_up(box, 0) == box.store.num_slots
        box = reopened(box, slab, tmp_path, num_slots=num_slots)
        assert box.store.num_inherited >= num_slots
        assert disk_usage(tmp_path) <= capacity_of(num_slots)
        kept = box.store.keys()
        assert box.put(*range(10_000, 10_016)) == [OK] * 16
        box = reopened(box, slab, tmp_path, num_slots=num_slots)
        assert set(box.store.keys()) >= {store_key_of(n) for n in range(10_000, 10_016)}
        assert (
            len(set(box.store.keys()) & set(kept)) >= len(kept) - 16 - len(kept) // 16
        )  # spare ones
        box.store.close()


def test_another_slot_size_misses_and_lives_beside(store_slab, tmp_path, caplog):
    """Another model over the same folder: neither touches the other's, even at the same time."""
    caplog.set_level("INFO")
    box = open_box(store_slab, tmp_path)
    assert box.put(1) == [OK]
    slab = Slab(4, 2 * SLOT_NBYTES, pin="off")
    settings = FileStoreSettings((tmp_path,), capacity_of(8, slot_nbytes=2 * SLOT_NBYTES))
    other = Harness(FileStore(slab, settings), slab)
    assert f"frames of other slot sizes beside {tmp_path}/0/0-24576" in caplog.text
    assert other.get(1) == [MISSING]
    assert other.put(1, 2) == [OK] * 2
    other.store.clear()
    assert other.put(3) == [OK]
    other.store.close()
    assert box.get(1) == [OK]
    box = reopened(box, store_slab, tmp_path)
    assert box.get(1, 3) == [OK, MISSING]
    box.store.close()
    other = Harness(FileStore(slab, settings), slab)
    assert other.get(1, 3) == [MISSING, OK]
    other.store.close()
    slab.close()


def test_another_number_of_paths_is_refused_and_left_alone(store_slab, tmp_path):
    """The first path's index is of both: what is in the second would be lost without a word."""
    paths = (tmp_path / "a", tmp_path / "b")
    three_frames(store_slab, *paths)
    with pytest.raises(StoreError, match=r"2 paths.*not for .*1 paths.*another path or instance"):
        open_box(store_slab, paths[0])
    box = open_box(store_slab, *paths)
    assert box.get(1, 2, 3) == [OK] * 3
    box.store.close()


def test_stray_and_foreign_files_are_left_alone(store_slab, tmp_path):
    box = open_box(store_slab, tmp_path)
    box.put(1)
    box.store.close()
    own = tmp_path / "0/0-12288"
    strays = [own / "frames.slab.tmp", own / "notes.txt", tmp_path / "other"]
    for stray in strays:
        stray.write_text("mine")
    box = open_box(store_slab, tmp_path)
    box.put(2)
    box.store.clear()
    box.store.close()
    assert [stray.read_text() for stray in strays] == ["mine"] * 3


# -- damage between runs --------------------------------------------------------------


def three_frames(slab, *paths):
    box = open_box(slab, *paths)
    assert box.put(1, 2, 3) == [OK] * 3
    box.store.close()


def test_file_that_was_cut_loses_its_last_frames_only(store_slab, tmp_path):
    three_frames(store_slab, tmp_path)
    os.truncate(tmp_path / "0/0-12288/frames.slab", 4096 + 2 * SLOT_NBYTES + 100)
    box = open_box(store_slab, tmp_path)
    assert box.get(1, 2, 3) == [OK, OK, MISSING]
    assert settled_free(box) == 6
    assert fills_up(box, 100) == 6
    box.store.close()


def test_file_that_was_deleted_loses_its_frames_and_the_store_goes_on(store_slab, tmp_path):
    paths = (tmp_path / "a", tmp_path / "b")
    three_frames(store_slab, *paths)
    (tmp_path / "b/0/0-12288/frames.slab").unlink()
    box = open_box(store_slab, *paths)
    outcomes = box.get(1, 2, 3)
    assert set(outcomes) == {OK, MISSING}
    assert settled_free(box) == 8 - outcomes.count(OK)
    assert fills_up(box, 100) == 8 - outcomes.count(OK)
    box.store.close()


def test_swapped_files_are_noticed(store_slab, tmp_path):
    paths = (tmp_path / "a", tmp_path / "b")
    three_frames(store_slab, *paths)
    files = [path / "0/0-12288/frames.slab" for path in paths]
    files[0].rename(tmp_path / "c")
    files[1].rename(files[0])
    (tmp_path / "c").rename(files[1])
    box = open_box(store_slab, *paths)
    assert box.get(1, 2, 3) == [MISSING] * 3
    assert fills_up(box, 100) == 8
    box.store.close()


def test_index_of_another_store_does_not_fit_the_files(store_slab, tmp_path):
    three_frames(store_slab, tmp_path / "a")
    three_frames(store_slab, tmp_path / "b")
    shutil.rmtree(tmp_path / "a/0/0-12288/index")
    shutil.copytree(tmp_path / "b/0/0-12288/index", tmp_path / "a/0/0-12288/index")
    box = open_box(store_slab, tmp_path / "a")
    assert box.get(1, 2, 3) == [MISSING] * 3
    box.store.close()


def test_index_that_was_deleted_makes_an_empty_store(store_slab, tmp_path):
    three_frames(store_slab, tmp_path)
    shutil.rmtree(tmp_path / "0/0-12288/index")
    box = open_box(store_slab, tmp_path)
    assert box.get(1, 2, 3) == [MISSING] * 3
    assert fills_up(box, 100) == 8
    box.store.close()


@pytest.mark.parametrize("nbytes", [0, 1, 100, 4096, 8191, 8192, 12288, -4096, -1])
def test_index_that_was_cut_makes_an_empty_store_or_a_whole_one(store_slab, tmp_path, nbytes):
    three_frames(store_slab, tmp_path)
    data = tmp_path / "0/0-12288/index/data.mdb"
    os.truncate(data, nbytes if nbytes >= 0 else data.stat().st_size + nbytes)
    box = open_box(store_slab, tmp_path)
    assert set(box.get(1, 2, 3)) in ({OK}, {MISSING})
    free = settled_free(box)
    assert fills_up(box, 100) == free
    box.store.close()


def test_index_with_flipped_bytes_never_ends_the_process(store_slab, tmp_path):
    """LMDB would: it is walked through in a child process first."""
    three_frames(store_slab, tmp_path / "sound")
    chance = random.Random(3)
    for turn in range(12):
        folder = tmp_path / str(turn)
        shutil.copytree(tmp_path / "sound", folder)
        data = folder / "0/0-12288/index/data.mdb"
        spoiled = bytearray(data.read_bytes())
        page = chance.randrange(0, len(spoiled), 4096)
        for offset in range(page, min(page + 64, len(spoiled))):
            spoiled[offset] ^= chance.randrange(256)
        data.write_bytes(spoiled)
        box = open_box(store_slab, folder)
        assert set(box.get(1, 2, 3)) <= {OK, MISSING, CORRUPT}
        assert box.put(9) == [OK]
        box.store.close()
