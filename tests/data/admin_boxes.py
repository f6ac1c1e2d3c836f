"""File stores as their tools find them, and how they are spoilt."""

import os
from pathlib import Path

from lmdb_box import image
from store_boxes import FileBox

from kvtiers.data.store_admin import find_stores
from kvtiers.model.outcome import Outcome


def quiet(frames, nbytes):
    """Take progress."""


def rank_of(path: Path) -> Path:
    """Return the only rank's folder in a path."""
    (lock,) = path.glob("*/*/owner.lock")
    return lock.parent


def slab_of(path: Path) -> Path:
    return rank_of(path) / "frames.slab"


def slot_of(path: Path, number: int) -> int:
    """Return where the frame of a number starts in its file."""
    return slab_of(path).read_bytes().index(image(number))


def write_at(path: Path, offset: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, data, offset)
    os.fsync(fd)
    os.close(fd)


def verify(*paths, quarantine=True, patience=10.0):
    (store,) = find_stores(paths, patience)
    return store.verify(quiet, quarantine=quarantine)


def held(*paths, **settings):
    """Open a store, return the numbers of its frames that can be read."""
    box = FileBox(*paths, **settings)
    numbers = [n for n in box.numbers() if box.get(n) == [Outcome.OK]]
    assert numbers == box.numbers()
    box.close()
    return numbers
