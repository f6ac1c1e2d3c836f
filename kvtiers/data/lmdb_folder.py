"""Making an LMDB environment's folder ready to be opened: checked, created, or set aside."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Final

import lmdb

from kvtiers.data import lmdb_check
from kvtiers.data.disk_check import (
    check_place,
    describe_mount,
    free_nbytes,
    readable_size,
)
from kvtiers.data.lmdb_errors import BusyError, DamagedError
from kvtiers.data.lmdb_files import (
    DATA,
    DISTRUSTED,
    DRAFT,
    LOCK,
    SET_ASIDE,
    DataFile,
    State,
    current_boot_id,
    distrusted,
    inspect_data,
    lengthen,
    read_state,
    set_aside,
    sweep,
    sync_folder,
    write_state,
)
from kvtiers.data.lmdb_locks import UsersLock
from kvtiers.data.lmdb_records import COUNTERS_KEY, FRAMES, INDEX, META, ORDER, Counters
from kvtiers.data.lmdb_settings import LMDBStoreSettings, WriteMap
from kvtiers.model.errors import CapacityError, StoreError
from kvtiers.model.frame import round_up

logger = logging.getLogger(__name__)

MAX_LIVE: Final = 0.8  # of the map: above 0.9 a run of free pages is hard to find
MAX_MAPPED: Final = 0.5  # of the memory: a page that is not in it is read before it is rewritten
HEADROOM_NBYTES: Final = 8 << 20  # small stores: pages return two transactions after their end

_WHAT: Final = "the LMDB store"
# A preallocated block stays the file's here; a copy-on-write system may need another to rewrite it.
_KEEPS_PREALLOCATION: Final = frozenset({"ext4", "xfs", "tmpfs"})


def map_nbytes_for(capacity_nbytes: int) -> int:
    """Return the map that holds a capacity of live frames: more than capacity / 0.85."""
    return round_up(int(capacity_nbytes / MAX_LIVE) + HEADROOM_NBYTES)


def prepare_path(path: Path, *, create: bool, judge: bool) -> Path:
    """Return the real folder of an environment, made if it is missing and may be made.

    Args:
        judge: whether to look at what it lies on, and to warn: once is enough.

    Raises:
        StoreError: it cannot be used; says why, and the remedy.
        FileNotFoundError: it is missing.
    """
    folder = Path(os.path.realpath(path))
    if judge:
        check_place(folder, _WHAT)
    if create and not folder.exists():
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            pass  # by another process, just now
        except OSError as error:
            raise StoreError(f"cannot make {path}: {error}; make its parent first") from error
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise StoreError(
            f"{path} belongs to user {found.st_uid}, this process runs as {os.geteuid()}: "
            "use a folder of its own, or run as that user"
        )
    if judge and found.st_mode & 0o077:
        logger.warning("%s may be read by other users; its files may not (mode 0600)", path)
    return folder


def state_for_use(
    folder: Path, lock: UsersLock, settings: LMDBStoreSettings, *, create: bool
) -> State | None:
    """Make a file ready to be opened, and return its state; takes a share of its lock.

    Whoever is alone checks what is there, or makes it. To be called inside `passing`.

    Args:
        lock: of who is to open the file. create: whether to make what is missing.

    Returns:
        None where others have the file open who must let it go first, or where nobody but a
        reader is here to make it ready.

    Raises:
        StoreError, CapacityError, OSError, DamagedError, lmdb.Error: it cannot be had.
    """
    boot_id = settings.boot_id or current_boot_id()
    alone = lock.try_alone()
    if alone and create:
        state = _make_ready(folder, settings, boot_id)
    elif lock.try_share():
        found = read_state(folder)
        if found is None or distrusted(folder) or not found.trusted(boot_id):
            return None
        state = found
    else:
        return None
    try:
        map_nbytes = max(state.map_nbytes, inspect(folder, state).map_nbytes)
    except DamagedError:
        if alone:
            raise
        return None  # those who have it open find out by themselves
    reach_map(folder, state, map_nbytes)
    in_use = replace(state, boot_id=boot_id, clean=False, map_nbytes=map_nbytes)
    if in_use != state:
        write_state(folder, in_use)
    return in_use if lock.try_share() else None


def inspect(folder: Path, state: State) -> DataFile:
    """Return what a data file says of itself.

    Raises:
        DamagedError: no user has left it so. OSError: it cannot be read now.
    """
    path = folder / DATA
    found = inspect_data(path)
    if found is None:
        raise DamagedError(f"{path} has no valid meta page")
    if not found.complete:
        raise DamagedError(
            f"{path} has {found.file_nbytes} bytes, its pages end at {found.needed_nbytes}"
        )
    if state.write_map and found.file_nbytes < state.map_nbytes:
        raise DamagedError(
            f"{path} has {found.file_nbytes} of the {state.map_nbytes} bytes that it was given"
        )
    return found


def reach_map(folder: Path, state: State, map_nbytes: int) -> None:
    """Make a file as long as its map; inside `passing`, after `inspect` has found it whole.

    Raises:
        CapacityError: no file may be as long here. OSError: it cannot be done now.
    """
    if state.write_map:
        return  # it is, or `inspect` refuses it
    try:
        lengthen(folder / DATA, map_nbytes)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise CapacityError(
            f"{folder / DATA} may grow to {readable_size(map_nbytes)}, which is too large a file "
            "for its file system or for this process (`ulimit -f`): write a smaller capacity"
        ) from error


def _make_ready(folder: Path, settings: LMDBStoreSettings, boot_id: str) -> State:
    """Check what lies in a folder, or create an environment in it; nobody else has it open."""
    sweep(folder)
    if not (folder / DATA).exists():
        return _create(folder, settings, boot_id)
    state = read_state(folder)
    reason = "nothing says what wrote it"
    if state is not None:
        found = _distrust(folder, state, boot_id, settings)
        if found is None:
            (folder / DISTRUSTED).unlink(missing_ok=True)
            return state
        reason = found
    logger.warning(
        "the LMDB store at %s is set aside as %s and begun anew: %s", folder, SET_ASIDE, reason
    )
    set_aside(folder)
    return _create(folder, settings, boot_id)


def _distrust(folder: Path, state: State, boot_id: str, settings: LMDBStoreSettings) -> str | None:
    """Return why a data file must not be opened, None if it may."""
    try:
        inspect(folder, state)
    except DamagedError as error:
        return str(error)
    if not distrusted(folder) and state.trusted(boot_id):
        return None
    nbytes = (folder / DATA).stat().st_blocks * 512
    seconds = settings.patience(nbytes)
    why = "found damaged" if distrusted(folder) else "in use when the machine stopped"
    size = readable_size(nbytes)
    logger.warning("%s was %s: checking all of its %s, %g s at most", folder, why, size, seconds)
    try:
        return lmdb_check.verdict(folder, seconds)
    except TimeoutError as error:
        if settings.hurried:
            raise BusyError(f"{folder}: {error}") from error
        return str(error)


def _create(folder: Path, settings: LMDBStoreSettings, boot_id: str) -> State:
    """Make an environment beside its place, and put it there when all of it is on the disk.

    A process that is killed over it leaves no data file, never one of which nothing is known.
    """
    map_nbytes = map_nbytes_for(settings.capacity_nbytes)
    check_room(folder, map_nbytes)
    draft = folder / DRAFT
    draft.mkdir(mode=0o700)
    env = lmdb.open(
        str(draft), map_size=map_nbytes, max_dbs=4, mode=0o600, max_readers=settings.max_readers
    )
    try:
        dbs = {name: env.open_db(name) for name in (FRAMES, INDEX, ORDER, META)}
        with env.begin(write=True) as txn:
            txn.put(COUNTERS_KEY, Counters(settings.capacity_nbytes).encode(), db=dbs[META])
    finally:
        env.close()
    write_map = (
        settings.write_map is WriteMap.AUTO
        and describe_mount(folder).fs_type in _KEEPS_PREALLOCATION
        and map_nbytes <= _memory_nbytes() * MAX_MAPPED
        and preallocate(draft, map_nbytes)
    )
    state = State(boot_id, False, settings.capacity_nbytes, map_nbytes, write_map)
    write_state(folder, state)
    for name in (LOCK, DISTRUSTED):  # of a file that was here before
        (folder / name).unlink(missing_ok=True)
    os.replace(draft / DATA, folder / DATA)
    sync_folder(folder)
    shutil.rmtree(draft)
    return state


def _memory_nbytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def preallocate(folder: Path, map_nbytes: int) -> bool:
    """Give a data file all its blocks, or none; returns whether it has them.

    A page that the disk cannot take is a SIGBUS when it was written through the mapping. Only
    inside `passing`: another process must not make the file longer meanwhile.
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


def check_room(folder: Path, map_nbytes: int) -> None:
    """Refuse a file that its disk cannot hold."""
    free = free_nbytes(folder)
    if map_nbytes > free:
        fits = max(0, int((free - HEADROOM_NBYTES) * MAX_LIVE))
        aside = f", or delete {SET_ASIDE} there" if (folder / SET_ASIDE).exists() else ""
        remedy = f"write a capacity of at most {readable_size(fits)}, or make room{aside}"
        if not fits:
            remedy = f"name a folder on another disk, or make room{aside}"
        raise CapacityError(
            f"{_WHAT} at {folder} may grow to {readable_size(map_nbytes)}, but its disk has "
            f"{readable_size(free)} free: {remedy}"
        )
