"""Real file systems of a few MiB, for tests of what a full disk does."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(kind: str, nbytes: int, folder: Path) -> Iterator[Path]:
    """Mount a file system in a folder; skips the test where that may not be."""
    mount_point = folder / "mnt"
    mount_point.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    if kind == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", str(mount_point)]
    elif shutil.which("mkfs.ext4") is None:
        pytest.skip("needs mkfs.ext4")
    else:
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(nbytes)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        mount = ["mount", "-o", "loop", str(image), str(mount_point)]
    if subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip(f"this container may not mount {kind}")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "-l", str(mount_point)], check=True)


def fill(folder: Path) -> Path:
    """Fill a disk to its last block; returns the file that does."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler
