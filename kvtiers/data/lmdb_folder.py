"""Making an LMDB environment's folder ready to be opened: checked, created, or set aside."""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Final

import lmdb

from kvtiers.data import lmdb_check, lmdb_mount
from kvtiers.data.lmdb_files import (
    DATA,
    LOCK,
    SET_ASIDE,
    DataFile,
    State,
    current_boot_id,
    inspect_data,
    read_state,
    set_aside,
    write_state,
)
from kvtiers.data.lmdb_records import COUNTERS_KEY, FRAMES, INDEX, META, ORDER, Counters
from kvtiers.data.lmdb_settings import LMDBStoreSettings, WriteMap
from kvtiers.model.errors import CapacityError, ConfigError
from kvtiers.model.frame import round_up

logger = logging.getLogger(__name__)

MAX_LIVE: Final = 0.8  # of the map: above 0.9 a run of free pages is hard to find
MAX_MAPPED: Final = 0.5  # of the memory: a page that is not in it is read before it is rewritten
HEADROOM_NBYTES: Final = 8 << 20  # small stores: pages return two transactions after their end


def map_nbytes_for(capacity_nbytes: int) -> int:
    """Return the map that holds a capacity of live frames: more than capacity / 0.85."""
    return round_up(int(capacity_nbytes / MAX_LIVE) + HEADROOM_NBYTES)


def prepare_path(path: Path, *, create: bool) -> Path:
    """Return the real folder of an environment, made if it is missing and may be made.

    Raises:
        ConfigError: it cannot be used; says why, and the remedy.
        FileNotFoundError: it is missing.
    """
    folder = Path(os.path.realpath(path))
    kind = lmdb_mount.filesystem_of(folder)
    if kind in lmdb_mount.NETWORK:
        raise ConfigError(
            f"{path} lies on a network file system ({kind}): LMDB's locks and mappings work on one "
            "host only; put the store on a local disk"
        )
    if create and not folder.exists():
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            pass  # by another process, just now
        except OSError as error:
            raise ConfigError(f"cannot make {path}: {error}; make its parent first") from error
    _check_folder(path, folder)
    if kind == "tmpfs":
        logger.warning("%s lies on tmpfs: it takes memory, and is lost with the machine", path)
    return folder


def _check_folder(path: Path, folder: Path) -> None:
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path} is a file: an LMDB store needs a folder of its own")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user {found.st_uid}, this process runs as {os.geteuid()}: "
            "use a folder of its own, or run as that user"
        )
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{path} is not writable: check its permissions, or a read-only mount")
    if stat.S_IMODE(found.st_mode) & 0o077:
        logger.warning("%s may be read by other users; its files may not (mode 0600)", path)


def make_ready(folder: Path, settings: LMDBStoreSettings) -> State:
    """Check what lies in a folder, or create an environment in it; nobody else has it open.

    Returns the state, which is on the disk.

    Raises:
        ConfigError, CapacityError, OSError, lmdb.Error: it cannot be had.
    """
    boot_id = settings.boot_id or current_boot_id()
    state = read_state(folder)
    if (folder / DATA).exists():
        reason = _distrust(folder, state, boot_id, settings)
        if reason is not None:
            logger.warning(
                "the LMDB store at %s is set aside as %s and begun anew: %s",
                folder, SET_ASIDE, reason,
            )  # fmt: skip
            set_aside(folder)
            state = None
    else:
        (folder / LOCK).unlink(missing_ok=True)
        state = None
    if state is None:
        state = _create(folder, settings, boot_id)
    state = replace(state, boot_id=boot_id, clean=False)
    write_state(folder, state)
    return state


def inspect(folder: Path) -> DataFile:
    """Return what a data file says of itself.

    Raises:
        OSError: it cannot be read, or is none.
    """
    found = inspect_data(folder / DATA)
    if found is None:
        raise OSError(f"{folder / DATA} has no valid meta page")
    if not found.complete:
        raise OSError(
            f"{folder / DATA} has {found.file_nbytes} bytes, its pages end at {found.needed_nbytes}"
        )
    return found


def _distrust(
    folder: Path, state: State | None, boot_id: str, settings: LMDBStoreSettings
) -> str | None:
    """Return why a data file must not be opened, None if it may."""
    if state is None:
        return "nothing says what wrote it"
    try:
        inspect(folder)
    except OSError as error:
        return str(error)
    if state.write_map and (folder / DATA).stat().st_size < state.map_nbytes:
        return f"it is shorter than the {state.map_nbytes} bytes that were preallocated"
    if state.trusted(boot_id):
        return None
    logger.warning("%s was in use when the machine stopped: checking all of it", folder)
    return lmdb_check.verdict(folder, settings.check_seconds)


def _create(folder: Path, settings: LMDBStoreSettings, boot_id: str) -> State:
    map_nbytes = map_nbytes_for(settings.capacity_nbytes)
    _check_room(folder, map_nbytes)  # first: LMDB would only say that it has no memory
    env = lmdb.open(
        str(folder), map_size=map_nbytes, max_dbs=4, mode=0o600, max_readers=settings.max_readers
    )
    try:
        dbs = {name: env.open_db(name) for name in (FRAMES, INDEX, ORDER, META)}
        with env.begin(write=True) as txn:
            txn.put(COUNTERS_KEY, Counters(settings.capacity_nbytes).encode(), db=dbs[META])
    finally:
        env.close()
    write_map = (
        settings.write_map is WriteMap.AUTO
        and lmdb_mount.filesystem_of(folder) in lmdb_mount.KEEPS_PREALLOCATION
        and map_nbytes <= _memory_nbytes() * MAX_MAPPED
    )
    if write_map:
        write_map = preallocate(folder, map_nbytes)
    return State(boot_id, False, settings.capacity_nbytes, map_nbytes, write_map)


def _memory_nbytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def preallocate(folder: Path, map_nbytes: int) -> bool:
    """Give a data file all its blocks, or none; returns whether it has them.

    A page that the disk cannot take is a SIGBUS when it was written through the mapping.
    """
    fd = os.open(folder / DATA, os.O_RDWR | os.O_CLOEXEC)
    try:
        before = os.fstat(fd).st_size
        try:
            os.posix_fallocate(fd, 0, map_nbytes)
        except OSError as error:
            logger.info("%s: cannot preallocate %d bytes: %s", folder, map_nbytes, error)
            os.ftruncate(fd, before)
            return False
    finally:
        os.close(fd)
    return True


def _check_room(folder: Path, map_nbytes: int) -> None:
    """Refuse a file that its disk cannot hold."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if map_nbytes > free:
        fits = max(0, int((free - HEADROOM_NBYTES) * MAX_LIVE))
        aside = f"; delete {SET_ASIDE}" if (folder / SET_ASIDE).exists() else ""
        raise CapacityError(
            f"the LMDB store at {folder} may grow to {map_nbytes} bytes, but its disk has {free} "
            f"left: a capacity of {fits} bytes would fit{aside}"
        )
