"""The files of an LMDB environment's folder, looked at without opening it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import struct
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kvtiers.data.lmdb_records import FORMAT_VERSION
from kvtiers.model.errors import StoreError

DATA: Final = "data.mdb"
LOCK: Final = "lock.mdb"
STATE: Final = "state.json"
SET_ASIDE: Final = "set-aside.mdb"
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
DISTRUSTED: Final = "distrusted"  # an empty file: the next opener checks
DRAFT: Final = "new"  # a folder: an environment that is being made

_MAGIC: Final = 0xBEEFC0DE
_LAYOUT_VERSION: Final = 1
_META = struct.Struct("<IIQQ")  # magic, version, address, map bytes: at 16 of pages 0 and 1
_FREE_DB_PAD = struct.Struct("<I")  # first field of the first database: page bytes
_TAIL = struct.Struct("<QQ")  # last page, transaction
_META_AT: Final = 16
_PAD_AT: Final = _META_AT + _META.size
_TAIL_AT: Final = _PAD_AT + 2 * 48


def current_boot_id() -> str:
    """Return what tells this run of the system from others; "unknown" where nobody says."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


@dataclass(frozen=True, slots=True)
class State:
    """What must be known of a data file before it may be opened.

    Attributes:
        boot_id: of the system that wrote it last. clean: whether all of it is on the disk.
        capacity_nbytes, map_nbytes: what its creator, or whoever grew it, decided.
        write_map: whether it is written through the mapping; all users must agree.
        version: of the format.
    """

    boot_id: str
    clean: bool
    capacity_nbytes: int
    map_nbytes: int
    write_map: bool
    version: int = FORMAT_VERSION

    def trusted(self, boot_id: str) -> bool:
        """Whether the file is what its users left, and not what a crash of the machine did."""
        return self.clean or (self.boot_id == boot_id and boot_id != "unknown")


def read_state(folder: Path) -> State | None:
    """Return a folder's state, None where there is none, or what is there is none.

    Raises:
        StoreError: another version of the format. OSError: it cannot be read now.
    """
    try:
        found = json.loads((folder / STATE).read_text(encoding="ascii"))
        version = found["version"]
        if version != FORMAT_VERSION:
            raise StoreError(
                f"{folder} holds a store of format {version}, this kvtiers has {FORMAT_VERSION}: "
                "use another path, or delete that folder"
            )
        state = State(**found)
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return state


def write_state(folder: Path, state: State) -> None:
    """Replace a folder's state, and wait until it is on the disk; only inside `passing`.

    Raises:
        OSError: it cannot be written.
    """
    fd, draft = tempfile.mkstemp(prefix=f"{STATE}.", dir=folder)  # mode 0600
    try:
        os.write(fd, json.dumps(asdict(state)).encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(draft, folder / STATE)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def distrust(folder: Path) -> None:
    """Have the next opener check the file, whatever its state says."""
    with contextlib.suppress(OSError):
        (folder / DISTRUSTED).touch(mode=0o600)


def distrusted(folder: Path) -> bool:
    """Whether somebody has found the file damaged."""
    return (folder / DISTRUSTED).exists()


def sweep(folder: Path) -> None:
    """Delete what killed processes have left half-made; only for who is alone."""
    shutil.rmtree(folder / DRAFT, ignore_errors=True)
    for draft in folder.glob(f"{STATE}.*"):
        draft.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class DataFile:
    """What a data file says of itself.

    Attributes:
        file_nbytes: its size. needed_nbytes: up to the end of its last page.
        map_nbytes: of the process that wrote last.
    """

    file_nbytes: int
    needed_nbytes: int
    map_nbytes: int

    @property
    def complete(self) -> bool:
        """Whether no page lies beyond the end; reading one that does kills the process."""
        return self.file_nbytes >= self.needed_nbytes


def inspect_data(path: Path) -> DataFile | None:
    """Read a data file's two meta pages with plain reads; None if neither is valid, or it is none.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        return None  # a folder, say
    with path.open("rb") as file:
        first = _meta_at(file.read(4096))
        second = None
        if first is not None:
            file.seek(first[2])
            second = _meta_at(file.read(4096))
        size = os.fstat(file.fileno()).st_size  # last: another process may be making it longer
    metas = [meta for meta in (first, second) if meta is not None]
    if len(metas) < 2:
        return None
    _, last_page, page_nbytes, map_nbytes = max(metas)
    return DataFile(size, (last_page + 1) * page_nbytes, map_nbytes)


def _meta_at(page: bytes) -> tuple[int, int, int, int] | None:
    """Return transaction, last page, page bytes and map bytes."""
    if len(page) < _TAIL_AT + _TAIL.size:
        return None
    magic, version, _, map_nbytes = _META.unpack_from(page, _META_AT)
    (page_nbytes,) = _FREE_DB_PAD.unpack_from(page, _PAD_AT)
    last_page, transaction = _TAIL.unpack_from(page, _TAIL_AT)
    if magic != _MAGIC or version != _LAYOUT_VERSION or page_nbytes not in _PAGE_SIZES:
        return None
    return transaction, last_page, page_nbytes, map_nbytes


_PAGE_SIZES: Final = frozenset(2**n for n in range(9, 17))


def set_aside(folder: Path) -> None:
    """Put a data file where nobody opens it, in place of one that was put there before.

    Only for who is alone.
    """
    data, aside = folder / DATA, folder / SET_ASIDE
    if aside.is_dir():
        shutil.rmtree(aside)
    elif data.is_dir():  # which takes no file's place
        aside.unlink(missing_ok=True)
    os.replace(data, aside)
    (folder / LOCK).unlink(missing_ok=True)


def lengthen(data: Path, nbytes: int) -> None:
    """Make a data file as long as it may become, without taking room for it.

    LMDB writes no page that a transaction has taken and let go of again. A file that ends before
    such a page looks as if it had been cut, and nobody can complete it in time who is killed right
    after the commit. One that is as long as its map lacks no page, whatever LMDB leaves out.

    Only where nobody else makes it longer than that meanwhile.

    Raises:
        OSError: there is no such file, or it may not become as long.
    """
    if data.stat().st_size < nbytes:
        os.truncate(data, nbytes)
