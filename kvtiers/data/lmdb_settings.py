"""What the shared LMDB store is configured with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from kvtiers.model.errors import CapacityError

_SLOW_DISK: Final = 100e6  # bytes a second


class Eviction(Enum):
    """What a full store does with a new frame."""

    OLDEST = "oldest"  # drops the frames whose last access is longest ago, whoever wrote them
    NONE = "none"  # answers FULL


class WriteMap(Enum):
    """How pages are written."""

    AUTO = "auto"  # into the mapping where that is safe and fits half of the memory, else by pwrite
    OFF = "off"  # by pwrite: never a SIGBUS on a full disk, about a third of the speed at 2 MiB


@dataclass(frozen=True, slots=True)
class LMDBStoreSettings:
    """Where a shared store is, and its bounds. Picklable: this is what a spawned process gets.

    Attributes:
        path: folder of the environment; made if it is missing, not its parents.
        capacity_nbytes: bytes of live frames, in whole pages of 4 KiB. The file takes up to
            ``capacity / 0.8 + 8 MiB``. Only the creator's counts; see `LMDBEnvironment`.
        eviction: what a full store does. write_map: how pages are written.
        max_readers: entries of the reader table; 64 bytes each.
        batch_frames: frames of one transaction at most.
        num_copy_threads: threads that copy out of the mapping for one batch, its reader's own
            included; two batches are read at once.
        reprobe_seconds: shortest time between two attempts to open what has gone.
        open_seconds: how long to wait for another process that checks or creates the file.
        check_seconds: how long the check of an untrusted file may take, or as long as a disk of
            100 MB/s needs to read it. A file that is not checked by then is set aside.
        hurried: whether `check_seconds` is all the time that there is. A file that is not checked
            by then is left as it is, for somebody who has more.
        boot_id: of the running system; None asks the kernel.

    Raises:
        CapacityError: the capacity is not positive.
    """

    path: Path
    capacity_nbytes: int
    eviction: Eviction = Eviction.OLDEST
    write_map: WriteMap = WriteMap.AUTO
    max_readers: int = 4096
    batch_frames: int = 16
    num_copy_threads: int = 2
    reprobe_seconds: float = 2.0
    open_seconds: float = 90.0
    check_seconds: float = 60.0
    hurried: bool = False
    boot_id: str | None = None

    def patience(self, nbytes: int) -> float:
        """Return how long the check of a file of a size may take, in seconds."""
        return self.check_seconds if self.hurried else max(self.check_seconds, nbytes / _SLOW_DISK)

    def __post_init__(self) -> None:
        if self.capacity_nbytes < 1:
            raise CapacityError(
                f"LMDB store of {self.capacity_nbytes} bytes at {self.path}; needs at least 1"
            )
