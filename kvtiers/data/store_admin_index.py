"""The index of a file store, read beside the process that owns it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final

import lmdb

from kvtiers.data.file_index import FOLDER_NAME, IndexRecord, read_meta, record_of
from kvtiers.data.lmdb_files import DATA, inspect_data
from kvtiers.model.errors import StoreError
from kvtiers.model.keys import STORE_KEY_NBYTES, StoreKey

_ATTEMPTS: Final = 3


def damaged(path: Path, why: str) -> DamagedIndexError:
    """Return the error that says so."""
    return DamagedIndexError(
        f"the index {path} is damaged ({why}): its frames are lost, and the next start of the "
        "engine begins it anew"
    )


def index_of(folder: Path) -> Path:
    """Return the folder of the index in a rank's folder."""
    return folder / FOLDER_NAME


class DamagedIndexError(StoreError):
    """The index cannot be read: the next start of its engine begins it anew."""


class IndexView:
    """Reads in short transactions, so that its owner finds free pages; changes nothing.

    Attributes:
        num_files, slot_nbytes, store_id: what the index says it is of.
        map_nbytes: that it may grow to.

    Raises:
        DamagedIndexError: see there.
        StoreError: there is none, it cannot be read, or is of another format.
    """

    def __init__(self, folder: Path) -> None:
        self.path = index_of(folder)
        try:
            found = inspect_data(self.path / DATA)
        except OSError as error:
            raise StoreError(f"cannot read the index {self.path}: {error.strerror}") from error
        if found is None or not found.complete:
            raise damaged(self.path, "it was cut, or has no meta pages")
        self.map_nbytes = max(found.map_nbytes, found.needed_nbytes)
        try:
            self._env = lmdb.open(
                str(self.path), map_size=self.map_nbytes, max_dbs=2, readonly=True, create=False
            )
        except lmdb.Error as error:
            raise StoreError(f"cannot open the index {self.path}: {error}") from error
        try:
            meta = read_meta(self._env, self.path)
            self._frames = self._env.open_db(b"frames", create=False)
        except lmdb.Error as error:
            self._env.close()
            raise StoreError(
                f"{self.path} is no index of a file store ({error}); remove it, or name another "
                "path"
            ) from error
        except StoreError:
            self._env.close()
            raise
        self.num_files, self.slot_nbytes = meta.num_files, meta.slot_nbytes
        self.store_id = meta.store_id

    def __enter__(self) -> IndexView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def num_frames(self) -> int:
        """Records now."""
        with self._begin() as txn:
            return int(txn.stat(self._frames)["entries"])

    def records(self) -> list[tuple[StoreKey, IndexRecord]]:
        """Return all records, in no order. Entries that are no records are left out."""
        with self._begin() as txn, txn.cursor(self._frames) as cursor:
            found = ((bytes(key), record_of(value)) for key, value in cursor)
            return [
                (StoreKey(key), record)
                for key, record in found
                if record is not None and len(key) == STORE_KEY_NBYTES
            ]

    def still_there(
        self, records: Iterable[tuple[StoreKey, IndexRecord]]
    ) -> list[tuple[StoreKey, IndexRecord]]:
        """Return which of some records are as they were."""
        with self._begin() as txn:
            return [
                (key, record)
                for key, record in records
                if record_of(txn.get(key, db=self._frames) or b"") == record
            ]

    def close(self) -> None:
        """Close the environment; idempotent."""
        self._env.close()

    def _begin(self) -> lmdb.Transaction[bytes]:
        for _ in range(_ATTEMPTS):
            try:
                return self._env.begin()
            except lmdb.MapResizedError:
                self._env.set_mapsize(0)  # what its owner, restarted, has made it
            except lmdb.Error as error:
                raise StoreError(f"cannot read the index {self.path}: {error}") from error
        raise StoreError(f"cannot read the index {self.path}: its size changes all the time")
