"""Opening what a file store has on disk: folders, index and files, in the order that is safe."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtiers.data.disk_check import Mount
from kvtiers.data.file_folder import OwnedFolder
from kvtiers.data.file_index import FileIndex, IndexRecord
from kvtiers.data.file_medium import judge_medium
from kvtiers.data.file_recovery import recover
from kvtiers.data.file_room import check_file_room, tell_of_other_slot_sizes
from kvtiers.data.file_settings import FileStoreSettings, index_nbytes, slots_per_file
from kvtiers.data.slab_file import SlabFile
from kvtiers.model.errors import CapacityError, StoreError
from kvtiers.model.frame import ALIGNMENT
from kvtiers.model.keys import StoreKey


@dataclass(frozen=True, slots=True)
class PathReport:
    """How one path is used.

    Attributes:
        folder: the rank's own. filesystem: its type. mount_point: where that begins. direct:
            whether the page cache is by-passed. refusal: why not, None if it is or was not wanted.
    """

    folder: Path
    filesystem: str
    mount_point: Path
    direct: bool
    refusal: str | None


@dataclass(frozen=True, slots=True)
class StoreFiles:
    """The open files of a store.

    Attributes:
        folders: one per path. mounts: what each lies on. index: of all of them, in the first.
        files: one per folder. slots_per_file: of each. records: what was found, oldest first.
    """

    folders: tuple[OwnedFolder, ...]
    mounts: tuple[Mount, ...]
    index: FileIndex
    files: tuple[SlabFile, ...]
    slots_per_file: int
    records: dict[StoreKey, IndexRecord]

    def reports(self) -> tuple[PathReport, ...]:
        """Return how each path is used now."""
        return tuple(
            PathReport(folder.path, mount.fs_type, mount.mount_point, file.direct, file.refusal)
            for folder, mount, file in zip(self.folders, self.mounts, self.files, strict=True)
        )

    def close(self) -> None:
        """Close all files, the folders last; idempotent."""
        for file in self.files:
            file.close()
        self.index.close()
        for folder in self.folders:
            folder.close()


def open_files(settings: FileStoreSettings, slot_nbytes: int) -> StoreFiles:
    """Open a store, or make it. The folders are owned first: nothing else is safe without.

    Raises:
        StoreError: a folder or file cannot be used, or another process owns it.
        CapacityError: the capacity holds no frame, or the disk has less room.
    """
    if slot_nbytes % ALIGNMENT:
        raise CapacityError(
            f"slots of {slot_nbytes} bytes are no multiple of {ALIGNMENT}, which files are moved "
            "in; make the slab with `slot_nbytes_for`"
        )
    num = slots_per_file(settings.capacity_nbytes, slot_nbytes, len(settings.paths))
    own = settings.folders(slot_nbytes)
    mounts = tuple(judge_medium(folder, settings.direct) for folder in own)
    _refuse_aliases(own)
    with contextlib.ExitStack() as opened:
        folders = tuple(
            opened.enter_context(contextlib.closing(OwnedFolder(folder))) for folder in own
        )
        for folder in folders:  # before the index: its map grows with the capacity, too
            tell_of_other_slot_sizes(folder.path)
            check_file_room(folder.path, num, slot_nbytes)
        nbytes = index_nbytes(num * len(folders))
        index = FileIndex(folders[0].path, len(folders), slot_nbytes, nbytes)
        opened.callback(index.close)
        files = tuple(
            opened.enter_context(
                contextlib.closing(
                    SlabFile(folder.path, index.store_id, i, num, slot_nbytes, settings.direct)
                )
            )
            for i, folder in enumerate(folders)
        )
        records = recover(index, files, slot_nbytes)
        opened.pop_all()
        return StoreFiles(folders, mounts, index, files, num, records)


def _refuse_aliases(folders: Sequence[Path]) -> None:
    """Refuse two paths that are one place: a link, a mount bound twice."""
    seen: dict[Path, Path] = {}
    for folder in folders:
        first = seen.setdefault(folder.resolve(), folder)
        if first is not folder:
            raise StoreError(
                f"the paths {first.parents[1]} and {folder.parents[1]} are the same folder "
                f"{folder.resolve().parents[1]}; name each once"
            )
