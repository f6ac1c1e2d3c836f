"""Folders beside a store's, for measuring its disk without touching the store."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvtiers.model.errors import StoreError

PREFIX: Final = ".kvtiers-probe-"
_LOCK: Final = "lock"


@contextlib.contextmanager
def scratch_beside(path: Path, *, inside_mount: bool) -> Iterator[Path]:
    """Make an empty folder on the file system of a store's path, and remove it at the end.

    Also removes folders of earlier measurements that were killed: nobody holds their locks.

    Args:
        path: of the store, which need not exist.
        inside_mount: whether the folder may lie in `path` where that is a mount point, as where
            a store has its own folder below.

    Raises:
        StoreError: there is no place for it; says why.
    """
    anchor = _anchor(path, inside_mount=inside_mount)
    _sweep(anchor)
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=anchor))
    except OSError as error:
        raise StoreError(
            f"cannot make a folder in {anchor}, beside {path}: {error.strerror}; measure as a user "
            "who may write there"
        ) from error
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _anchor(path: Path, *, inside_mount: bool) -> Path:
    """Return the nearest existing folder above a path that is on the path's file system."""
    above = next(parent for parent in path.absolute().parents if parent.is_dir())
    if not path.is_dir() or path.stat().st_dev == above.stat().st_dev:
        return above
    if inside_mount:
        return path
    raise StoreError(
        f"{path} is a mount point, and nothing beside it lies on its disk: name a folder in it"
    )


def _sweep(anchor: Path) -> None:
    """Remove what measurements left that did not come to their end."""
    for folder in anchor.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:
            continue  # another user's, or one that is being made
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # its owner lives
        finally:
            os.close(lock)


def empty(folder: Path) -> None:
    """Remove what a store has made in a scratch folder."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def drop_page_cache(folder: Path) -> None:
    """Let the kernel forget what it keeps of the files in a folder; nobody must map them.

    A file system that lies in memory keeps everything.
    """
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        fd = os.open(path, os.O_RDWR)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
