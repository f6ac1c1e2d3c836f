"""Whether this machine can hold what a configuration asks for."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvtiers.data import lmdb_folder
from kvtiers.data.disk_check import (
    check_room,
    describe_mount,
    device_of,
    free_nbytes,
    readable_size,
)
from kvtiers.data.file_folder import judge_own
from kvtiers.data.file_medium import judge_medium
from kvtiers.data.file_room import allocated_nbytes
from kvtiers.data.file_settings import SLAB_FILE_NAME
from kvtiers.data.host_memory import available_memory
from kvtiers.data.lmdb_files import DATA
from kvtiers.model.config import Config
from kvtiers.model.config_tiers import DramTier, LmdbTier, MemoryTier, NvmeTier
from kvtiers.model.errors import CapacityError, PlacedError, StoreError
from kvtiers.model.units import format_size

_FIRST_INSTANCE = "0"  # of an engine that is not told which one it is


def misfits(config: Config) -> list[PlacedError]:
    """Return what of a configuration this machine cannot hold; nothing is made or changed.

    The tiers of one engine are judged together: engines that share the machine are not known here.
    """
    found = _refusal(partial(check_memory, config))
    disks = _Disks()
    for idx, tier in enumerate(config.tiers):
        if isinstance(tier, NvmeTier):
            found += _file_misfits(tier, idx, disks)
        elif isinstance(tier, LmdbTier):
            place = _refusal(partial(_check_lmdb_place, tier.path, disks), idx, "path")
            found += place or _refusal(partial(_check_lmdb_room, tier, disks), idx)
    log = config.cost.decision_log
    if log is not None:
        found += _refusal(partial(_check_log, log))
    return found


def check_memory(config: Config) -> None:
    """Refuse tiers that together exceed what this machine can give.

    All of the engine's ranks are counted: each is a little less than it may use, but none has
    touched its share when the others look.

    Raises:
        CapacityError: with the tier at which the sum passes the limit.
    """
    available = available_memory()
    if available is None:
        return
    total = 0
    for idx, tier in enumerate(config.tiers):
        if not isinstance(tier, DramTier | MemoryTier):
            continue
        total += tier.capacity
        if total > available.nbytes:
            left = readable_size(max(0, available.nbytes - total + tier.capacity))
            raise CapacityError(
                f"{format_size(tier.capacity)} makes {format_size(total)} of host memory in all, "
                f"but {available.bound} leaves {readable_size(available.nbytes)}; write at most "
                f"{left} here",
                ("tiers", idx, "capacity"),
            )


class _Disks:
    """What the tiers that were looked at so far take of each disk, and which folders."""

    def __init__(self) -> None:
        self._claimed: dict[int, int] = {}
        self._folders: dict[str, Path] = {}

    def enter(self, folder: Path) -> None:
        """Refuse a folder that another path leads to as well."""
        real = os.path.realpath(folder)
        if real in self._folders:
            raise StoreError(f"{folder} is the same folder as {self._folders[real]}; name another")
        self._folders[real] = folder

    def claim(self, path: Path, nbytes: int) -> None:
        """Refuse what does not fit beside the tiers before, on a disk that it fits on alone."""
        device = device_of(path)
        claimed = self._claimed.get(device, 0)
        free = free_nbytes(path)
        if claimed and claimed + nbytes > free:
            raise CapacityError(
                f"{path} is to take {readable_size(nbytes)} more, and other paths of this "
                f"configuration {readable_size(claimed)} of the same disk, which has "
                f"{readable_size(free)} free: write less, or name folders on several disks"
            )
        self._claimed[device] = claimed + nbytes


def _file_misfits(tier: NvmeTier, idx: int, disks: _Disks) -> list[PlacedError]:
    found = []
    for path in tier.paths:
        place = _refusal(partial(_check_file_place, path, tier, disks), idx, "paths")
        found += place or _refusal(partial(_check_file_room, path, tier, disks), idx)
    return found


def _check_file_place(path: Path, tier: NvmeTier, disks: _Disks) -> None:
    judge_medium(path, tier.direct)
    disks.enter(path)
    own = path / (tier.instance or _FIRST_INSTANCE)
    if own.exists():
        judge_own(own)


def _check_file_room(path: Path, tier: NvmeTier, disks: _Disks) -> None:
    share = tier.capacity // len(tier.paths)
    own = path / (tier.instance or _FIRST_INSTANCE)
    taken = sum(allocated_nbytes(file) for file in own.glob(f"*/{SLAB_FILE_NAME}"))
    check_room(path, share, taken, "the file store", len(tier.paths))
    disks.claim(path, max(0, share - taken))


def _check_lmdb_place(path: Path, disks: _Disks) -> None:
    try:
        lmdb_folder.prepare_path(path, create=False, judge=True)
    except FileNotFoundError as error:
        if not path.parent.is_dir():
            raise StoreError(
                f"{path.parent} is no folder; make it: the store makes {path}"
            ) from error
    disks.enter(path)


def _check_lmdb_room(tier: LmdbTier, disks: _Disks) -> None:
    missing = lmdb_folder.map_nbytes_for(tier.capacity) - allocated_nbytes(tier.path / DATA)
    lmdb_folder.check_room(tier.path, missing)
    disks.claim(tier.path, max(0, missing))


def _check_log(path: Path) -> None:
    """Refuse a log that cannot be written: at start that is a warning, and no log."""
    folder = path.absolute().parent
    why = ""
    if path.exists() and not path.is_file():
        why = "is no regular file; name a file"
    elif not folder.is_dir():
        why = f"{folder} is no folder; make it first"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = f"may not be written by user {os.geteuid()}; name another file, or change the rights"
    elif describe_mount(folder).fs_type in ("proc", "sysfs"):
        why = f"{folder} belongs to the kernel; name a file on a disk"
    if why:
        raise StoreError(f"{path}: {why}", ("cost", "decision_log"))


def _refusal(check: Callable[[], object], idx: int = 0, key: str = "capacity") -> list[PlacedError]:
    try:
        check()
    except PlacedError as error:
        error.path = error.path or ("tiers", idx, key)
        return [error]
    return []
