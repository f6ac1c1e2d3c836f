"""File stores of a few slots, for tests: what they are made of and what is asked of all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from kvtiers.data.file_settings import FILE_HEADER_NBYTES, INDEX_BASE_NBYTES, INDEX_SLOT_NBYTES
from kvtiers.data.file_store import FileStore, FileStoreSettings
from kvtiers.data.io.choice import make_io
from kvtiers.data.slab import Slab
from kvtiers.testing.io_faults import FaultyIo
from kvtiers.testing.store_suite import SLOT_NBYTES, Harness


def capacity_of(num_slots: int, num_paths: int = 1, slot_nbytes: int = SLOT_NBYTES) -> int:
    """Return the capacity that holds some frames, and few more."""
    num_slots += num_slots // 15  # one slot of 16 is spare
    fixed = num_paths * FILE_HEADER_NBYTES + INDEX_BASE_NBYTES
    return fixed + num_slots * (slot_nbytes + INDEX_SLOT_NBYTES)


def settings_of(*paths: Path, num_slots: int = 8, **settings: object) -> FileStoreSettings:
    """Return settings of a store of some slots."""
    return FileStoreSettings(paths, capacity_of(num_slots, len(paths)), **settings)


def open_box(slab: Slab, *paths: Path, num_slots: int = 8, **settings: object) -> Harness:
    """Open a store of some slots."""
    return Harness(FileStore(slab, settings_of(*paths, num_slots=num_slots, **settings)), slab)


def faulty_box(
    slab: Slab, *paths: Path, num_slots: int = 8, **settings: object
) -> tuple[Harness, FaultyIo]:
    """Open a store over an engine that can be told to fail."""
    engine = FaultyIo(make_io(settings.get("io", "auto")))
    store = FileStore(slab, settings_of(*paths, num_slots=num_slots, **settings), engine)
    return Harness(store, slab), engine


def disk_usage(path: Path) -> int:
    """Return the allocated bytes of a folder and all below, as ``du`` counts."""
    total = os.lstat(path).st_blocks * 512
    for folder, folders, files in os.walk(path):
        for name in folders + files:
            try:
                total += os.lstat(Path(folder) / name).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def settled_free(box: Harness) -> int:
    """Return the free slots, checking that each slot is either free or holds a frame."""
    assert box.store.num_free + len(box.held()) == box.store.num_slots
    return box.store.num_free


def fills_up(box: Harness, first: int) -> int:
    """Put new frames until none fits; returns how many did: no slot is lost."""
    number = first
    while box.put(number)[0].name == "OK":
        number += 1
    return number - first


def wait_for(happened: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that another thread or process brings about."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.002)
