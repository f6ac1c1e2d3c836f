"""Whether a disk has the room for a slab file, and whose files take it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from kvtiers.data.disk_check import readable_size
from kvtiers.data.file_settings import FILE_HEADER_NBYTES, SLAB_FILE_NAME
from kvtiers.model.errors import CapacityError

_logger = logging.getLogger(__name__)

_MAX_NAMED: Final = 3


def check_file_room(folder: Path, num_slots: int, slot_nbytes: int) -> str:
    """Refuse a slab file that its disk has no room for; returns what to say if it has not.

    Args:
        folder: of the rank: `<path>/<instance>/<rank>-<slot_nbytes>`.

    Raises:
        CapacityError: more bytes are missing than are free.
    """
    path = folder / SLAB_FILE_NAME
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    missing = FILE_HEADER_NBYTES + num_slots * slot_nbytes - allocated_nbytes(path)
    full = (
        f"{path} needs {readable_size(missing)} more for {num_slots} slots of {slot_nbytes} bytes, "
        f"but its disk has {readable_size(free)} free; lower the tier's capacity or free space"
        f"{_neighbours(folder)}"
    )
    if missing > free:
        raise CapacityError(full)
    return full


def allocated_nbytes(path: Path) -> int:
    """Return the bytes that a file takes on its disk, 0 if there is none."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def neighbours(folder: Path) -> dict[Path, int]:
    """Return the folders of other ranks, instances and slot sizes on a path, and their bytes."""
    found = folder.parents[1].glob(f"*/*/{SLAB_FILE_NAME}")
    sizes = {file.parent: allocated_nbytes(file) for file in found if file.parent != folder}
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def tell_of_other_slot_sizes(folder: Path) -> None:
    """Log what earlier models of this rank have left on the disk: only a person knows its worth."""
    rank = folder.name.partition("-")[0]
    others = {
        other: nbytes
        for other, nbytes in neighbours(folder).items()
        if other.parent == folder.parent and other.name.partition("-")[0] == rank
    }
    if others:
        _logger.info(
            "%s of frames of other slot sizes beside %s count for themselves: %s; remove what no "
            "engine uses any more",
            readable_size(sum(others.values())),
            folder,
            ", ".join(str(other) for other in list(others)[:_MAX_NAMED]),
        )


def _neighbours(folder: Path) -> str:
    others = neighbours(folder)
    if not others:
        return ""
    named = ", ".join(str(other) for other in list(others)[:_MAX_NAMED])
    more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
    return (
        f": {readable_size(sum(others.values()))} are held by other ranks, instances or slot sizes "
        f"in {named}{more}; remove what no engine uses any more"
    )
