"""The files of an LMDB environment's folder, looked at without opening it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import struct
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from kvtiers.data.lmdb_records import FORMAT_VERSION
from kvtiers.model.errors import ConfigError

DATA: Final = "data.mdb"
LOCK: Final = "lock.mdb"
STATE: Final = "state.json"
USERS: Final = "users.lock"
SET_ASIDE: Final = "set-aside.mdb"
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
DISTRUSTED: Final = "distrusted"  # instead of a boot_id: the next opener checks

_MAGIC: Final = 0xBEEFC0DE
_LAYOUT_VERSION: Final = 1
_META = struct.Struct("<IIQQ")  # magic, version, address, map bytes: at 16 of pages 0 and 1
_FREE_DB_PAD = struct.Struct("<I")  # first field of the first database: page bytes
_TAIL = struct.Struct("<QQ")  # last page, transaction
_META_AT: Final = 16
_PAD_AT: Final = _META_AT + _META.size
_TAIL_AT: Final = _PAD_AT + 2 * 48
_POLL_SECONDS: Final = 0.01


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
    """Return a folder's state, None where there is none that can be read.

    Raises:
        ConfigError: another version of the format.
    """
    try:
        found = json.loads((folder / STATE).read_text(encoding="ascii"))
        version = found["version"]
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"{folder} holds a store of format {version}, this kvtiers has {FORMAT_VERSION}: "
                "use another path, or delete that folder"
            )
        state = State(**found)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state


def write_state(folder: Path, state: State) -> None:
    """Replace a folder's state, and wait until it is on the disk.

    Raises:
        OSError: it cannot be written.
    """
    draft = folder / f"{STATE}.{os.getpid()}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, json.dumps(asdict(state)).encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(draft, folder / STATE)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def distrust(folder: Path) -> None:
    """Have the next opener check the file, whatever it says now."""
    with contextlib.suppress(OSError, ConfigError):
        state = read_state(folder)
        if state is not None:
            write_state(folder, replace(state, boot_id=DISTRUSTED, clean=False))


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
    """Read a data file's two meta pages with plain reads; None if neither is valid.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = _meta_at(file.read(4096))
        second = None
        if first is not None:
            file.seek(first[2])
            second = _meta_at(file.read(4096))
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
    """Put a data file where nobody opens it, in place of one that was put there before."""
    data, aside = folder / DATA, folder / SET_ASIDE
    if aside.is_dir():
        shutil.rmtree(aside)
    elif data.is_dir():  # which takes no file's place
        aside.unlink(missing_ok=True)
    os.replace(data, aside)
    (folder / LOCK).unlink(missing_ok=True)


class UsersLock:
    """Who has an environment open, as a lock that dies with its process.

    Whoever has it alone may create, check or set the file aside; all others share it.

    Raises:
        ConfigError: the file system has no locks. OSError: the lock file cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd: int | None = os.open(folder / USERS, flags, 0o600)
        self._folder = folder

    def try_alone(self) -> bool:
        """Take the lock alone unless another has it; gives up a share that was held."""
        return self._try(fcntl.LOCK_EX)

    def try_share(self) -> bool:
        """Take a share unless another is alone."""
        return self._try(fcntl.LOCK_SH)

    def let_go(self) -> None:
        """Give up what is held; it can be taken again."""
        self._try(fcntl.LOCK_UN)

    def share(self, seconds: float) -> bool:
        """Take a share, waiting for somebody who is alone; returns whether it came in time."""
        deadline = time.monotonic() + seconds
        while not self._try(fcntl.LOCK_SH):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def release(self) -> None:
        """Give it up; idempotent. A child process that inherited it keeps nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _try(self, kind: int) -> bool:
        assert self._fd is not None, "the lock was released"
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConfigError(
                f"{self._folder} lies on a file system without locks ({error}): an LMDB store "
                "needs a local disk"
            ) from error
        return True
