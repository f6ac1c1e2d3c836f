"""A file store on a real file system of a few MiB, full before the store's capacity is reached."""

from __future__ import annotations

import os
import shutil
import time

import pytest
from file_stores import disk_usage, fills_up, open_box
from full_disks import fill, mounted

from kvtiers.data.disk_check import readable_size
from kvtiers.data.file_settings import FileStoreSettings
from kvtiers.data.file_store import FileStore
from kvtiers.data.slab import Slab
from kvtiers.model.errors import CapacityError, StoreError
from kvtiers.model.outcome import Outcome
from kvtiers.testing.store_machine import store_key_of
from kvtiers.testing.store_suite import SLOT_NBYTES, Harness

OK, FULL = Outcome.OK, Outcome.FULL


@pytest.fixture(params=["ext4", "tmpfs"])
def tiny_disk(request, tmp_path):
    """A real file system of 8 MiB; memory where a container has no loop device for a disk."""
    with mounted(request.param, 8 * 2**20, tmp_path) as folder:
        yield folder


def test_capacity_above_the_free_disk_is_told_with_numbers(store_slab, tiny_disk):
    with pytest.raises(
        CapacityError, match=r"mnt/0/0-12288.*needs \d+\w+ more.*\d+\w+ free; lower"
    ):
        open_box(store_slab, tiny_disk, num_slots=2000)
    assert disk_usage(tiny_disk / "0") < 10 * SLOT_NBYTES  # nothing is left behind
    box = open_box(store_slab, tiny_disk, num_slots=100)
    assert box.put(1) == [OK]
    box.store.close()


def test_files_of_another_slot_size_that_leave_no_room_are_named(store_slab, tiny_disk):
    open_box(store_slab, tiny_disk, num_slots=450).store.close()
    slab = Slab(4, 2 * SLOT_NBYTES, pin="off")
    settings = FileStoreSettings((tiny_disk,), 3 * 2**20)
    taken = (tiny_disk / "0/0-12288/frames.slab").stat().st_blocks * 512
    held = readable_size(taken)
    pattern = rf"{held} are held by .*slot sizes in .*/0/0-12288; remove what no engine"
    with pytest.raises(CapacityError, match=pattern):
        FileStore(slab, settings)
    shutil.rmtree(tiny_disk / "0/0-12288")
    FileStore(slab, settings).close()
    slab.close()


def test_disk_that_others_fill_does_not_hurt_a_store_that_has_its_room(store_slab, tiny_disk):
    """The slots are allocated; only the index may want more, and tries again."""
    box = open_box(store_slab, tiny_disk, num_slots=100, publish_seconds=0.01)
    assert box.put(1) == [OK]
    filler = fill(tiny_disk)
    for turn in range(8):
        assert box.put(*range(turn * 8, turn * 8 + 8)) == [OK] * 8
    assert box.get(*range(10, 20)) == [OK] * 10
    time.sleep(0.1)
    filler.unlink()
    time.sleep(1.2)
    box.store.close()
    box = open_box(store_slab, tiny_disk, num_slots=100)
    assert box.get(*range(10, 20)) == [OK] * 10
    box.store.close()


def test_file_that_was_punched_meets_a_really_full_disk(store_slab, tiny_disk):
    """A write into a hole of a full disk: FULL, and what is there stays readable."""
    box = open_box(store_slab, tiny_disk, num_slots=100)
    assert box.put(1) == [OK]
    os.truncate(tiny_disk / "0/0-12288/frames.slab", 4096 + SLOT_NBYTES)
    os.sync()
    filler = fill(tiny_disk)
    assert set(box.put(2, 3, 4, 5)) <= {FULL, OK}
    assert FULL in box.put(6, 7, 8, 9, 10, 11, 12)
    assert box.get(1) == [OK]
    filler.unlink()
    assert box.put(20) == [OK]
    box.store.close()


def test_disk_that_fills_up_while_the_file_is_allocated(store_slab, tiny_disk, monkeypatch):
    """Between the look at the free room and the allocation another process takes it."""
    fill(tiny_disk)
    monkeypatch.setattr("kvtiers.data.slab_file.check_file_room", lambda *args: "no room: lower it")
    monkeypatch.setattr("kvtiers.data.file_opening.check_file_room", lambda *args: "")
    with pytest.raises((CapacityError, StoreError), match="No space left"):
        open_box(store_slab, tiny_disk, num_slots=100)
    (tiny_disk / "filler").unlink()
    monkeypatch.undo()
    box = open_box(store_slab, tiny_disk, num_slots=100)
    assert fills_up(box, 0) == box.store.num_slots
    box.store.close()


def test_store_as_large_as_its_disk(store_slab, tiny_disk):
    """Ten times through, with every commit: neither its own files nor its index outgrow it."""
    free = os.statvfs(tiny_disk).f_bavail * os.statvfs(tiny_disk).f_frsize
    settings = FileStoreSettings((tiny_disk / "kv",), free, publish_seconds=0.0)
    box = Harness(FileStore(store_slab, settings), store_slab)
    for start in range(0, 10 * box.store.num_slots, 8):
        old = range(start - box.store.num_slots, start - box.store.num_slots + 8)
        box.store.delete([store_key_of(number) for number in old if number >= 0])
        assert box.put(*range(start, start + 8)) == [OK] * 8
        assert disk_usage(tiny_disk / "kv") <= free
    assert box.get(*range(start, start + 8)) == [OK] * 8
    box.store.close()
