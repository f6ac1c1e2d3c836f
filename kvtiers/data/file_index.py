"""The index of a file store on disk: which frame lies in which slot, kept by LMDB."""

from __future__ import annotations

import logging
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lmdb

from kvtiers.data.index_check import index_problem
from kvtiers.data.lmdb_files import sync_folder
from kvtiers.model.errors import StoreError
from kvtiers.model.keys import STORE_KEY_NBYTES, StoreKey

_logger = logging.getLogger(__name__)

FOLDER_NAME: Final = "index"
FORMAT: Final = 1
_RECORD = struct.Struct("<IIQQ")
_META = struct.Struct("<IIQQ16s")
_DRAFT: Final = "new"  # a folder: an index that is being made
_META_KEY: Final = b"store"
_LOCK_NBYTES: Final = 8192  # LMDB's, for 126 readers


@dataclass(frozen=True, slots=True)
class IndexRecord:
    """Where a frame lies.

    Attributes:
        file_idx: of the store's files. slot: in that file. nbytes: of the frame.
        sequence: grows with every put, also over restarts.
    """

    file_idx: int
    slot: int
    nbytes: int
    sequence: int


@dataclass(frozen=True, slots=True)
class IndexChange:
    """One step of the index's history: a frame came (record), went (None), or all went.

    Attributes:
        key: None for all of them, with the generation that begins.
    """

    key: StoreKey | None
    record: IndexRecord | None = None
    generation: int = 0


class FileIndex:
    """An LMDB environment, one commit after another; each is on disk when `commit` returns.

    Attributes:
        store_id: 16 random bytes, made with the index. generation: of the frames in it.

    Args:
        folder: of the rank. num_files, slot_nbytes: of the store; an index made for others is
            refused. map_nbytes: how large the file may grow.

    Raises:
        StoreError: it cannot be opened, or was made for another shape of store.
    """

    _env: lmdb.Environment

    def __init__(self, folder: Path, num_files: int, slot_nbytes: int, map_nbytes: int) -> None:
        self.path = folder / FOLDER_NAME
        self._num_files = num_files
        self._slot_nbytes = slot_nbytes
        self._map_nbytes = map_nbytes
        self._fd = -1
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            shutil.rmtree(self.path / _DRAFT, ignore_errors=True)  # of one that was killed
            self._remove_damaged()
            self._allocate_lock()
            self._open()
        except (OSError, lmdb.Error) as error:
            raise StoreError(
                f"cannot open the index {self.path}: {error}; it must be a folder that user "
                f"{os.geteuid()} may write; remove it to start without its frames"
            ) from error
        try:
            self._open_databases(self._env)
            self.store_id, self.generation = self._enter()
            self._size = os.fstat(self._fd).st_size
        except lmdb.Error as error:
            self.close()
            raise StoreError(
                f"cannot use the index {self.path}: {error}; free space on its disk, or remove "
                "it to start without its frames"
            ) from error
        except StoreError:
            self.close()
            raise

    def records(self) -> dict[StoreKey, IndexRecord]:
        """Return all records, the oldest first. Entries that are no records are left out."""
        found: list[tuple[StoreKey, IndexRecord]] = []
        with self._env.begin(self._frames) as txn, txn.cursor() as cursor:
            for key, value in cursor:
                if len(key) == STORE_KEY_NBYTES and len(value) == _RECORD.size:
                    found.append((StoreKey(bytes(key)), IndexRecord(*_RECORD.unpack(value))))
        found.sort(key=lambda item: item[1].sequence)
        return dict(found)

    def commit(self, changes: Sequence[IndexChange]) -> None:
        """Make changes, all or none, in their order.

        Raises:
            lmdb.Error: they were not made, and the index is as it was.
        """
        self._require_length()
        with self._env.begin(write=True) as txn:
            self._put(txn, changes)
        self._size = self._completed(self._size)

    @property
    def outgrown(self) -> bool:
        """Whether the file is larger than it may be: it was made for more slots than there are."""
        return self._size > self._map_nbytes

    def rewrite(self, records: Mapping[StoreKey, IndexRecord]) -> None:
        """Make the file anew, with some records only: it may have no room to delete the others.

        Raises:
            OSError, lmdb.Error: it was not made, and the index is as it was, but may be closed.
        """
        draft = self.path / _DRAFT
        draft.mkdir(mode=0o700)
        meta, changes = self._pack(self.generation), [IndexChange(k, r) for k, r in records.items()]
        self.close()
        self._env = lmdb.open(str(draft), map_size=self._map_nbytes, max_dbs=2, mode=0o600)
        self._open_databases(self._env)
        with self._env.begin(write=True) as txn:
            txn.put(_META_KEY, meta, db=self._meta)
            self._put(txn, changes)
        self._env.close()
        (draft / "data.mdb").replace(self.path / "data.mdb")
        sync_folder(self.path)  # the old one must not come back: its slots are written anew
        shutil.rmtree(draft)
        self._open()
        self._open_databases(self._env)
        self._size = os.fstat(self._fd).st_size

    def close(self) -> None:
        """Close the environment; idempotent."""
        self._env.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -- internals --------------------------------------------------------------------

    def _open(self) -> None:
        self._env = lmdb.open(
            str(self.path), map_size=self._map_nbytes, max_dbs=2, mode=0o600, max_spare_txns=1
        )
        self._fd = os.open(self.path / "data.mdb", os.O_RDWR | os.O_CLOEXEC)  # for its size

    def _open_databases(self, env: lmdb.Environment) -> None:
        self._meta, self._frames = env.open_db(b"meta"), env.open_db(b"frames")

    def _put(self, txn: lmdb.Transaction[Any], changes: Sequence[IndexChange]) -> None:
        for change in changes:
            if change.key is None:
                txn.drop(self._frames, delete=False)
                txn.put(_META_KEY, self._pack(change.generation), db=self._meta)
            elif change.record is None:
                txn.delete(change.key, db=self._frames)
            else:
                record = change.record
                value = _RECORD.pack(record.file_idx, record.slot, record.nbytes, record.sequence)
                txn.put(change.key, value, db=self._frames)

    def _require_length(self) -> None:
        """Refuse to touch a file that was cut: it is mapped, and reading would be a SIGBUS."""
        size = os.fstat(self._fd).st_size
        if size < self._size:
            raise lmdb.CorruptedError(f"{self.path} was cut to {size} of {self._size} bytes")

    def _completed(self, before: int) -> int:
        """Have the file reach to its last page, or it looks as if it was cut; returns its size.

        LMDB writes no page that a transaction has taken and let go of, the last one neither.

        Args:
            before: its size at the last look: of one that is shorter, pages in use may be gone.
        """
        size = os.fstat(self._fd).st_size
        needed = (int(self._env.info()["last_pgno"]) + 1) * int(self._env.stat()["psize"])
        if before <= size < needed:
            os.ftruncate(self._fd, needed)
            return needed
        return size

    def _enter(self) -> tuple[bytes, int]:
        """Read who the index is of, or write it into a new one."""
        with self._env.begin(write=True) as txn:
            found = txn.get(_META_KEY, db=self._meta)
            if found is None:
                self.store_id = os.urandom(16)
                txn.put(_META_KEY, self._pack(0), db=self._meta)
                return self.store_id, 0
        if len(found) != _META.size:
            raise StoreError(f"{self.path} is no index of a file store; remove it, or name "
                             "another path")  # fmt: skip
        version, num_files, slot_nbytes, generation, store_id = _META.unpack(found)
        wanted = (FORMAT, self._num_files, self._slot_nbytes)
        if (version, num_files, slot_nbytes) != wanted:
            raise StoreError(
                f"{self.path} was made for format {version}, {num_files} paths and slots of "
                f"{slot_nbytes} bytes, not for format {wanted[0]}, {wanted[1]} paths and slots of "
                f"{wanted[2]} bytes; it is left as it is: use another path or instance, or remove "
                "its folder"
            )
        return store_id, generation

    def _pack(self, generation: int) -> bytes:
        return _META.pack(FORMAT, self._num_files, self._slot_nbytes, generation, self.store_id)

    def _allocate_lock(self) -> None:
        """Take the lock file's blocks first: LMDB maps it, and a full disk would be a SIGBUS."""
        fd = os.open(self.path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _LOCK_NBYTES)
        except OSError as error:
            raise StoreError(
                f"cannot make the index {self.path}: {error.strerror}; free space on its disk"
            ) from error
        finally:
            os.close(fd)

    def _remove_damaged(self) -> None:
        """Remove an index that cannot be read: LMDB itself would crash on it."""
        problem = index_problem(self.path)
        if problem is None:
            return
        _logger.warning("the index %s is damaged, its frames are lost: %s", self.path, problem)
        for name in ("data.mdb", "lock.mdb"):
            (self.path / name).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class IndexMeta:
    """What an index is of; see `FileIndex` and `IndexChange`."""

    num_files: int
    slot_nbytes: int
    generation: int
    store_id: bytes


def read_meta(env: lmdb.Environment, path: Path) -> IndexMeta:
    """Return what an index that somebody else keeps is of.

    Raises:
        StoreError: it is of another format, or none. lmdb.Error: it cannot be read.
    """
    meta = env.open_db(b"meta", create=False)
    with env.begin() as txn:
        found = txn.get(_META_KEY, db=meta) or b""
    version = int.from_bytes(found[:4], "little")
    if version != FORMAT or len(found) != _META.size:
        raise StoreError(
            f"{path} is of format {version}, this kvtiers has {FORMAT}; it is left as it is: use "
            "the version of kvtiers that made it, or remove its folder"
        )
    return IndexMeta(*_META.unpack(found)[1:])


def record_of(value: bytes) -> IndexRecord | None:
    """Return what an entry says, None if it is no record."""
    return IndexRecord(*_RECORD.unpack(value)) if len(value) == _RECORD.size else None
