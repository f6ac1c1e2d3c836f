"""What a file store is made of: paths, sizes, and how many frames fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kvtiers.data.io.base import DEFAULT_DEPTH
from kvtiers.data.io.choice import IoKind
from kvtiers.model.errors import CapacityError
from kvtiers.model.frame import ALIGNMENT, round_up
from kvtiers.model.units import format_size, whole_mib

DirectMode = Literal["auto", "on", "off"]

SLAB_FILE_NAME: Final = "frames.slab"
FILE_HEADER_NBYTES: Final = ALIGNMENT
# An entry of the index takes 74 bytes in a page that is half full at worst, and all pages are
# there three times more while they are rewritten at once: 4 * 148. The highest found by rewriting
# everything in one commit was 410, 2026-11. The file system's own map of a file takes up to 24
# bytes a slot, and the index does not get those.
INDEX_SLOT_NBYTES: Final = 640
INDEX_BASE_NBYTES: Final = 2**18  # of an empty index, its lock table and folders
SPARE_SHARE: Final = 16  # one slot of so many is spare,
MAX_SPARE_NBYTES: Final = 2**28  # but no more than a disk takes within a commit of some 10 ms
# One call over a run of slots moves so much at most, longer ones leave the disk idle; less if its
# batch is small, so that there are NUM_OPS calls to share between threads: 16 frames of 128 KiB
# gained 15 % in writes over calls of 1 MiB, and frames of 512 KiB nothing (NVMe, 2026-11).
MIN_OP_NBYTES: Final = 2**18
MAX_OP_NBYTES: Final = 2**20
NUM_OPS: Final = 8


@dataclass(frozen=True, slots=True)
class FileStoreSettings:
    """How to make a `FileStore`.

    Attributes:
        paths: folders to stripe over, best on different disks; made where missing, with
            their parents.
        capacity_nbytes: bytes on disk at most, over all paths, index included. Frames of
            another slot size, such as another model's, lie beside them and count for themselves.
        io: the I/O engine. direct: by-pass the page cache: "auto" where the file system
            allows, "on" or fail, "off".
        instance: name of the engine's own folder. rank: of the worker within it.
        depth: operations under way. publish_seconds: how long a frame that was written
            may be unknown to the index on disk.
    """

    paths: tuple[Path, ...]
    capacity_nbytes: int
    io: IoKind = "auto"
    direct: DirectMode = "auto"
    instance: str = "0"
    rank: int = 0
    depth: int = DEFAULT_DEPTH
    publish_seconds: float = 0.5

    def __post_init__(self) -> None:
        if not self.paths or len({path.absolute() for path in self.paths}) < len(self.paths):
            raise ValueError(f"paths {[str(path) for path in self.paths]} must be one or more, "
                             "each once")  # fmt: skip
        if self.direct not in ("auto", "on", "off"):
            raise ValueError(f"direct is {self.direct!r}, expected 'auto', 'on' or 'off'")
        if not self.instance or self.instance in (".", "..") or "/" in self.instance:
            raise ValueError(f"instance {self.instance!r} is no name of a folder")
        if self.rank < 0:
            raise ValueError(f"rank {self.rank} is negative")

    def folders(self, slot_nbytes: int) -> tuple[Path, ...]:
        """Return the folder below each path that belongs to this rank and slot size."""
        return tuple(path / self.instance / f"{self.rank}-{slot_nbytes}" for path in self.paths)


def slots_per_file(capacity_nbytes: int, slot_nbytes: int, num_paths: int = 1) -> int:
    """Return how many slots each path's file has, so that all bytes stay in the bound.

    Raises:
        CapacityError: not even one.
    """
    overhead = num_paths * FILE_HEADER_NBYTES + INDEX_BASE_NBYTES
    num = (capacity_nbytes - overhead) // (slot_nbytes + INDEX_SLOT_NBYTES)
    if num < num_paths:
        least = overhead + num_paths * (slot_nbytes + INDEX_SLOT_NBYTES)
        raise CapacityError(
            f"{format_size(max(0, capacity_nbytes))} a rank hold no slot of {slot_nbytes} bytes in "
            f"each of {num_paths} files beside the index; raise the tier's capacity to at least "
            f"{whole_mib(least)} a rank"
        )
    return num // num_paths


def max_frames(capacity_nbytes: int, slot_nbytes: int, num_paths: int = 1) -> int:
    """Return how many frames a store of a capacity holds: what control may count on.

    Args:
        capacity_nbytes: bytes on disk of one rank. slot_nbytes: of the slab, a multiple of 4096.
        num_paths: how many folders they are spread over.

    Raises:
        CapacityError: none.
    """
    num = num_paths * slots_per_file(capacity_nbytes, slot_nbytes, num_paths)
    return num - spare_slots(num, slot_nbytes)


def spare_slots(num_slots: int, slot_nbytes: int) -> int:
    """Return how many slots are kept beyond those that hold frames.

    They are written while the records of deleted frames leave the index, so that a full
    store need not wait for its disk to confirm that.
    """
    return min(num_slots // SPARE_SHARE, -(-MAX_SPARE_NBYTES // slot_nbytes))


def index_nbytes(num_slots: int) -> int:
    """Return how large the index may grow, in bytes."""
    # Half of the base is for folders, lock table and the lock files.
    return round_up(INDEX_BASE_NBYTES // 2 + num_slots * (INDEX_SLOT_NBYTES - 24))
