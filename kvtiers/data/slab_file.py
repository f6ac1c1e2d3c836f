"""A preallocated file of equal slots, read and written past the page cache where possible."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_intdigest

from kvtiers.data.file_room import check_file_room
from kvtiers.data.file_settings import FILE_HEADER_NBYTES, SLAB_FILE_NAME, DirectMode
from kvtiers.model.errors import CapacityError, StoreError

_logger = logging.getLogger(__name__)

MAGIC: Final = b"KVTS"
VERSION: Final = 1
_HEADER = struct.Struct("<4sHHQ16s")
_CHECK = struct.Struct("<Q")


class SlabFile:
    """Slot ``s`` is at ``FILE_HEADER_NBYTES + s * slot_nbytes``; every block is allocated.

    Attributes:
        path: of the file. fd: open for reading and writing. direct: whether calls by-pass the
            page cache. refusal: why they do not, None if they do or were not asked to.
        num_trusted: slots that were there, with this store's mark, when the file was opened.

    Args:
        folder: where it is. store_id: 16 bytes that tie it to its index. file_idx: among the
            store's files. direct: see `FileStoreSettings`.

    Raises:
        CapacityError: the disk has not the room. StoreError: it cannot be opened, or direct
            I/O is a must and refused.
    """

    def __init__(
        self,
        folder: Path,
        store_id: bytes,
        file_idx: int,
        num_slots: int,
        slot_nbytes: int,
        direct: DirectMode,
    ) -> None:
        self.path = folder / SLAB_FILE_NAME
        self.num_slots = num_slots
        self.slot_nbytes = slot_nbytes
        self.direct = False
        self.refusal: str | None = None
        self.fd = self._open(direct)
        try:
            header = _header(store_id, file_idx, slot_nbytes)
            self.num_trusted = self._trusted(header)
            self._allocate()
            self._write_header(header, direct)
        except (CapacityError, StoreError):
            self.close()
            raise
        except OSError as error:
            self.close()
            raise StoreError(f"cannot write {self.path}: {error.strerror}") from error

    def offset(self, slot: int) -> int:
        """Return where a slot starts, in bytes."""
        return FILE_HEADER_NBYTES + slot * self.slot_nbytes

    def go_buffered(self, why: str) -> None:
        """Use the page cache from now on, and say so once."""
        if not self.direct:
            return
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._refuse(why)

    def sync(self) -> None:
        """Make what was written outlive the machine.

        Raises:
            OSError: the disk did not take it; what was written since the last call is unsure.
        """
        os.fdatasync(self.fd)

    def close(self) -> None:
        """Close the file; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # -- internals --------------------------------------------------------------------

    def _refuse(self, why: str) -> None:
        self.direct = False
        self.refusal = why
        _logger.warning("%s goes through the page cache: direct I/O %s", self.path, why)

    def _open(self, direct: DirectMode) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            if direct != "off":
                try:
                    fd = os.open(self.path, flags | os.O_DIRECT, 0o600)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                        raise
                    self._must(direct, f"refused at open: {_named(error)}")
                else:
                    self.direct = True
                    return fd
            return os.open(self.path, flags, 0o600)
        except OSError as error:
            raise StoreError(
                f"cannot open {self.path}: {error.strerror}; it must be a regular file that user "
                f"{os.geteuid()} may write; remove it to start without its frames"
            ) from error

    def _must(self, direct: DirectMode, why: str) -> None:
        """Note that direct I/O does not work; fail where it is a must."""
        if direct == "on":
            raise StoreError(f"{self.path}: direct I/O {why}; use `direct: auto` or another path")
        self._refuse(why)

    def _trusted(self, header: bytes) -> int:
        """Return how many slots of this very store the file holds."""
        size = os.fstat(self.fd).st_size
        if size < FILE_HEADER_NBYTES:
            return 0
        found = mmap.mmap(-1, FILE_HEADER_NBYTES)  # page-aligned, as direct I/O wants it
        with found, memoryview(found) as view:
            os.preadv(self.fd, [view], 0)
            if view[: len(header)] != header:
                return 0
        return min(self.num_slots, (size - FILE_HEADER_NBYTES) // self.slot_nbytes)

    def _allocate(self) -> None:
        stat = os.fstat(self.fd)
        size = self.offset(self.num_slots)
        full = check_file_room(self.path.parent, self.num_slots, self.slot_nbytes)
        if stat.st_size > size:
            os.ftruncate(self.fd, size)
        try:
            os.posix_fallocate(self.fd, 0, size)
        except OSError as error:
            os.ftruncate(self.fd, min(stat.st_size, size))
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise CapacityError(f"{full} ({error.strerror})") from error
            raise

    def _write_header(self, header: bytes, direct: DirectMode) -> None:
        """Mark the file; the first write also tells whether direct I/O works."""
        block = mmap.mmap(-1, FILE_HEADER_NBYTES)
        with block, memoryview(block) as view:
            view[: len(header)] = header
            try:
                os.pwritev(self.fd, [view], 0)
            except OSError as error:
                if not self.direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                why = f"refused at write: {_named(error)}"
                self.go_buffered(why) if direct != "on" else self._must(direct, why)
                os.pwritev(self.fd, [view], 0)


def _header(store_id: bytes, file_idx: int, slot_nbytes: int) -> bytes:
    fixed = _HEADER.pack(MAGIC, VERSION, file_idx, slot_nbytes, store_id)
    return fixed + _CHECK.pack(xxh3_64_intdigest(fixed))


def _named(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, '?')} ({error.strerror})"


@dataclass(frozen=True, slots=True)
class SlabMark:
    """What a slab file says of itself.

    Attributes:
        file_idx: among the files of its store. store_id: 16 bytes that tie it to its index.
    """

    file_idx: int
    slot_nbytes: int
    store_id: bytes


def slab_mark(path: Path) -> SlabMark | None:
    """Return a slab file's mark, None where it has none that holds.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        with contextlib.suppress(OSError):  # the slots behind it are not wanted
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        found = os.pread(fd, _HEADER.size + _CHECK.size, 0)
    finally:
        os.close(fd)
    if len(found) < _HEADER.size + _CHECK.size:
        return None
    _, _, file_idx, slot_nbytes, store_id = _HEADER.unpack_from(found)
    if found != _header(store_id, file_idx, slot_nbytes):
        return None
    return SlabMark(file_idx, slot_nbytes, store_id)


def slab_path(folder: Path) -> Path:
    """Return the slab file of a rank's folder."""
    return folder / SLAB_FILE_NAME
