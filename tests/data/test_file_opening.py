"""What folders and files of a store may refuse while they are opened."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from kvtiers.data.file_folder import OwnedFolder
from kvtiers.data.slab_file import SlabFile
from kvtiers.model.errors import StoreError

STORE_ID = bytes(16)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A disk that lets a file be opened for direct I/O: the calls that it then refuses."""
    real, refused = os.pwritev, []

    def refusing(fd: int, *rest: object) -> int:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
        flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags"))
        if flags & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, *rest)

    monkeypatch.setattr(os, "pwritev", refusing)
    return refused


def test_auto_goes_through_the_page_cache_and_says_so_once(tmp_path, refusals, caplog):
    """R51: the first write is of the file's own mark, when it is opened."""
    file = SlabFile(tmp_path, STORE_ID, 0, 4, 8192, "auto")
    assert len(refusals) == 1
    assert (file.direct, file.refusal) == (False, "refused at write: EINVAL (Invalid argument)")
    assert sum("through the page cache" in record.message for record in caplog.records) == 1
    file.close()
    again = SlabFile(tmp_path, STORE_ID, 0, 4, 8192, "off")
    assert again.num_trusted == 4
    again.close()


def test_on_is_refused_at_start(tmp_path, refusals):
    with pytest.raises(StoreError, match=r"direct I/O refused at write: EINVAL.*direct: auto"):
        SlabFile(tmp_path, STORE_ID, 0, 4, 8192, "on")
    assert len(refusals) == 1


def test_a_folder_that_another_rank_makes_first_is_taken_over(tmp_path, monkeypatch):
    """R62: between the look whether it is there and its making."""
    make = Path.mkdir

    def late(path: Path, *args: object, **options: object) -> None:
        make(path, *args, **options)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr(Path, "mkdir", late)
    OwnedFolder(tmp_path / "a/b/0/0-12288").close()


def test_a_file_system_without_locks_is_no_other_owner(tmp_path, monkeypatch):
    """R107: nobody would find the process that it is said to be in use by."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreError, match=r"without locks \(No locks available\).*local disk"):
        OwnedFolder(tmp_path / "x")
