"""What befalls a store's files: bytes flipped, frames swapped, files cut, lost or replaced."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtiers.data.file_settings import FILE_HEADER_NBYTES
from kvtiers.data.lmdb_files import DATA, inspect_data

from .tiers import SLOT_NBYTES

PAGE_NBYTES = 4096
_OVERFLOW = 0x04  # LMDB's flag of a run of pages with one value: here, a frame


def cut(path: Path) -> None:
    """Cut a file to half; one of LMDB's, to half of its pages: behind them it is empty."""
    found = inspect_data(path) if path.name == DATA else None
    with path.open("r+b") as file:
        file.truncate((path.stat().st_size if found is None else found.needed_nbytes) // 2)


def empty(path: Path) -> None:
    """Leave nothing of a file but its name."""
    with path.open("r+b") as file:
        file.truncate(0)


def lose(path: Path) -> None:
    """Remove a file."""
    path.unlink()


def replace_by_folder(path: Path) -> None:
    """Put a folder where a file was: nobody can read it, not even root."""
    path.unlink()
    path.mkdir()


def scribble(path: Path) -> None:
    """Overwrite the head of each page of an LMDB data file but the first two: which of the others
    are in use depends on when it was committed."""
    needed = inspect_data(path).needed_nbytes
    with path.open("r+b") as file:
        for start in range(2 * PAGE_NBYTES, needed, PAGE_NBYTES):
            file.seek(start)
            file.write(bytes((7 * i + start) & 0xFF for i in range(64)))


def flip_slots(path: Path) -> None:
    """Flip a byte of each frame in a slab file."""
    for start in _slots(path):
        _flip(path, start + SLOT_NBYTES // 2)


def flip_slot_headers(path: Path) -> None:
    """Flip a byte of each frame's key in a slab file."""
    for start in _slots(path):
        _flip(path, start + 30)


def swap_slots(path: Path) -> None:
    """Swap every frame in a slab file with its neighbour."""
    slots = list(_slots(path))
    with path.open("r+b") as file:
        for one, other in zip(slots[::2], slots[1::2], strict=False):
            frames = []
            for start in (one, other):
                file.seek(start)
                frames.append(file.read(SLOT_NBYTES))
            for start, frame in zip((other, one), frames, strict=True):
                file.seek(start)
                file.write(frame)


def flip_values(path: Path) -> None:
    """Flip a byte of each frame in an LMDB data file; its own pages stay whole."""
    for start, nbytes in _values(path):
        _flip(path, start + nbytes // 2)


def swap_values(path: Path) -> None:
    """Swap each frame in an LMDB data file with its neighbour, but for LMDB's own header."""
    values = list(_values(path))
    assert len({nbytes for _, nbytes in values}) == 1
    with path.open("r+b") as file:
        for one, other in zip(values[::2], values[1::2], strict=False):
            frames = []
            for start, nbytes in (one, other):
                file.seek(start + 16)
                frames.append(file.read(nbytes - 16))
            for (start, _), frame in zip((other, one), frames, strict=True):
                file.seek(start + 16)
                file.write(frame)


Damage = Callable[[Path], None]


def copy_store(source: Path, target: Path) -> Path:
    """Copy the folder of a store that nobody has open, holes and all."""
    return shutil.copytree(source, target)


def _slots(path: Path) -> Iterator[int]:
    """Yield where each slot begins that was ever written."""
    with path.open("rb") as file:
        for start in range(FILE_HEADER_NBYTES, path.stat().st_size, SLOT_NBYTES):
            file.seek(start)
            if any(file.read(64)):
                yield start


def _values(path: Path) -> Iterator[tuple[int, int]]:
    """Yield where each run of pages begins that a value lies in, and its bytes."""
    content = path.read_bytes()
    page = 2
    while (page + 1) * PAGE_NBYTES <= len(content):
        number, _, flags, num_pages = struct.unpack_from("<QHHI", content, page * PAGE_NBYTES)
        if number == page and flags == _OVERFLOW and 8 <= num_pages <= 64:
            yield page * PAGE_NBYTES, num_pages * PAGE_NBYTES
            page += num_pages
        else:
            page += 1


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x55]))
