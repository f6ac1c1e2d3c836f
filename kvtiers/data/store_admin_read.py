"""Slots of a store's files, read in large pieces in their order, beside who uses them."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtiers.data.file_index import IndexRecord
from kvtiers.data.file_settings import FILE_HEADER_NBYTES
from kvtiers.data.slab_file import slab_path
from kvtiers.model.keys import StoreKey

Keyed = tuple[StoreKey, IndexRecord]

_RUN_NBYTES: Final = 8 * 2**20  # of one piece of work, unless a slot is larger
_CALL_NBYTES: Final = 2 * 2**20  # of one read


@dataclass(frozen=True, slots=True)
class Run:
    """Frames in neighbouring slots of one file."""

    records: tuple[Keyed, ...]

    @property
    def file_idx(self) -> int:
        """Of the file."""
        return self.records[0][1].file_idx

    @property
    def first_slot(self) -> int:
        """Of the first frame."""
        return self.records[0][1].slot

    def nbytes(self, slot_nbytes: int) -> int:
        """Return the bytes from the first frame's start to the last one's end."""
        last = self.records[-1][1]
        return (last.slot - self.first_slot) * slot_nbytes + last.nbytes


def runs_of(records: Sequence[Keyed], slot_nbytes: int) -> Iterator[Run]:
    """Yield records in the order of their places, neighbours together."""
    most = max(1, _RUN_NBYTES // slot_nbytes)
    run: list[Keyed] = []
    for keyed in sorted(records, key=lambda item: (item[1].file_idx, item[1].slot)):
        record = keyed[1]
        if run:
            last = run[-1][1]
            follows = (record.file_idx, record.slot) == (last.file_idx, last.slot + 1)
            if not follows or len(run) == most:
                yield Run(tuple(run))
                run = []
        run.append(keyed)
    if run:
        yield Run(tuple(run))


class SlotReader:
    """Reads through the page cache, and leaves in it what was there before, and no more.

    Args:
        folders: of the files, by their number.
    """

    def __init__(self, folders: Mapping[int, Path], slot_nbytes: int) -> None:
        self._slot_nbytes = slot_nbytes
        self._fds: dict[int, int] = {}
        self._whys: dict[int, str] = {}
        for idx, folder in folders.items():
            try:
                fd = os.open(slab_path(folder), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:
                self._whys[idx] = f"{slab_path(folder)}: {error.strerror}"
                continue
            self._fds[idx] = fd
            with contextlib.suppress(OSError):  # reading ahead would look like somebody's pages
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def close(self) -> None:
        """Close the files; idempotent."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def read(self, runs: Sequence[Run]) -> Iterator[tuple[Run, memoryview, str]]:
        """Yield each run with its bytes, as many as could be read, and why not all, or "".

        The bytes are good until the next run is asked for.
        """
        largest = max((run.nbytes(self._slot_nbytes) for run in runs), default=0)
        views = [memoryview(mmap.mmap(-1, max(largest, 1))) for _ in range(2)]
        with ThreadPoolExecutor(1, "kvtiers-verify") as pool:
            waiting = None
            for i, run in enumerate(runs):
                now = waiting or pool.submit(self._fill, run, views[i % 2])
                num, why = now.result()
                waiting = (
                    pool.submit(self._fill, runs[i + 1], views[(i + 1) % 2])
                    if i + 1 < len(runs)
                    else None
                )
                yield run, views[i % 2][:num], why

    def read_again(self, keyed: Keyed) -> tuple[memoryview, str]:
        """Return a frame from the disk itself, or what of it could be read, and why not all."""
        run = Run((keyed,))
        view = memoryview(bytearray(max(1, keyed[1].nbytes)))
        fd = self._fds.get(run.file_idx)
        if fd is not None:
            start = FILE_HEADER_NBYTES + run.first_slot * self._slot_nbytes
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, start, len(view), os.POSIX_FADV_DONTNEED)
        num, why = self._fill(run, view)
        return view[:num], why

    def _fill(self, run: Run, view: memoryview) -> tuple[int, str]:
        """Read a run; returns how many bytes came, and why not all."""
        fd = self._fds.get(run.file_idx)
        if fd is None:
            return 0, self._whys.get(run.file_idx, f"file {run.file_idx} is not there")
        start = FILE_HEADER_NBYTES + run.first_slot * self._slot_nbytes
        done, nbytes = 0, run.nbytes(self._slot_nbytes)
        try:
            while done < nbytes:
                piece = view[done : min(nbytes, done + _CALL_NBYTES)]
                num = _read(fd, piece, start + done)
                if not num:
                    return done, "its file ends before it does"
                done += num
        except OSError as error:
            return done, f"it cannot be read: {error.strerror}"
        return done, ""


def _read(fd: int, view: memoryview, offset: int) -> int:
    """Read some bytes; what was not in the page cache does not stay there."""
    try:
        return os.preadv(fd, [view], offset, os.RWF_NOWAIT)
    except OSError:  # not there, or the file system cannot tell
        num = os.preadv(fd, [view], offset)
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, len(view), os.POSIX_FADV_DONTNEED)
    return num
