"""The byte image of one rank's share of one block: a header, then a payload.

The format, version 1; all integers little-endian::

    0   4s   magic "KVTF"
    4   u16  version, 1
    6   u16  0
    8   u32  header bytes, a multiple of 4096
    12  u32  number of pages
    16  u64  payload bytes, without padding
    24  32s  store key
    56  u64  xxh3-64 of bytes 0..55 and of the page checksums
    64  u64  xxh3-64 of page 0, then of page 1, ...

The payload starts after the header and holds the pages one after another.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from xxhash import xxh3_64_intdigest

from kvtiers.model.keys import STORE_KEY_NBYTES, StoreKey
from kvtiers.model.layout import GroupLayout

MAGIC: Final = b"KVTF"
VERSION: Final = 1
ALIGNMENT: Final = 4096  # O_DIRECT wants multiples of the device's logical block, at most 4 KiB
_FIXED = struct.Struct(f"<4sHHIIQ{STORE_KEY_NBYTES}s")
_CHECKSUM = struct.Struct("<Q")
_TABLE_OFFSET: Final = _FIXED.size + _CHECKSUM.size


def round_up(nbytes: int, multiple: int = ALIGNMENT) -> int:
    """Return the smallest multiple that is not below ``nbytes``."""
    return -(-nbytes // multiple) * multiple


@dataclass(frozen=True, slots=True)
class FrameFormat:
    """The sizes of a frame of one KV group, and its checks.

    Attributes:
        page_nbytes: bytes of each page, in payload order.
    """

    page_nbytes: tuple[int, ...]
    header_nbytes: int = field(init=False)
    payload_nbytes: int = field(init=False)
    _pages: tuple[slice, ...] = field(init=False, repr=False, compare=False)  # of a frame

    def __post_init__(self) -> None:
        header = round_up(_TABLE_OFFSET + _CHECKSUM.size * len(self.page_nbytes))
        object.__setattr__(self, "header_nbytes", header)
        object.__setattr__(self, "payload_nbytes", sum(self.page_nbytes))
        bounds = itertools.accumulate(self.page_nbytes, initial=header)
        object.__setattr__(
            self, "_pages", tuple(slice(a, b) for a, b in itertools.pairwise(bounds))
        )

    @classmethod
    def of(cls, group: GroupLayout) -> FrameFormat:
        """Return the format of a group's frames."""
        return cls(tuple(page.nbytes for page in group.pages))

    @property
    def frame_nbytes(self) -> int:
        """Header and payload, without padding."""
        return self.header_nbytes + self.payload_nbytes

    @property
    def slot_nbytes(self) -> int:
        """Header and payload, padded to `ALIGNMENT`."""
        return self.header_nbytes + round_up(self.payload_nbytes)

    def seal(self, frame: memoryview, key: StoreKey) -> None:
        """Write the header of a frame whose payload is in place.

        Args:
            frame: writable bytes, at least `frame_nbytes`.
            key: the name under which the frame will be stored.
        """
        table = self._checksums(frame)
        fixed = self._fixed(key)
        check = _CHECKSUM.pack(xxh3_64_intdigest(fixed + table))
        header = fixed + check + table
        frame[: len(header)] = header
        frame[len(header) : self.header_nbytes] = bytes(self.header_nbytes - len(header))

    def fault(self, frame: memoryview, key: StoreKey) -> str | None:
        """Return what is wrong with a frame that arrived, None when it may be served.

        Checks length, magic, version, sizes, key, header checksum and every page checksum.
        """
        if len(frame) < self.frame_nbytes:
            return f"frame has {len(frame)} bytes, expected {self.frame_nbytes}"
        expected = self._fixed(key)
        found = bytes(frame[: _FIXED.size])
        if found != expected:
            return _describe_mismatch(found, expected)
        end = _TABLE_OFFSET + _CHECKSUM.size * len(self.page_nbytes)
        table = bytes(frame[_TABLE_OFFSET:end])
        (check,) = _CHECKSUM.unpack_from(frame, _FIXED.size)
        if check != xxh3_64_intdigest(expected + table):
            return "header checksum does not hold"
        if (found := self._checksums(frame)) == table:
            return None
        pairs = zip(_CHECKSUM.iter_unpack(found), _CHECKSUM.iter_unpack(table), strict=True)
        return next(
            f"page {idx} has checksum {digest:016x}, its header says {stored:016x}"
            for idx, ((digest,), (stored,)) in enumerate(pairs)
            if digest != stored
        )

    def _fixed(self, key: StoreKey) -> bytes:
        return _FIXED.pack(
            MAGIC, VERSION, 0, self.header_nbytes, len(self.page_nbytes), self.payload_nbytes, key
        )

    def _checksums(self, frame: memoryview) -> bytes:
        """Return the table of page checksums: one call a page, which is what small pages cost."""
        digests = [xxh3_64_intdigest(frame[page]) for page in self._pages]
        return _table_of(len(digests)).pack(*digests)


@functools.lru_cache(64)
def _table_of(num_pages: int) -> struct.Struct:
    return struct.Struct(f"<{num_pages}Q")


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a frame says of itself, without the layout that it was made for.

    Attributes:
        nbytes: of the header. payload_nbytes: of all pages. digests: xxh3-64 of each page.
    """

    nbytes: int
    payload_nbytes: int
    digests: tuple[int, ...]


def read_header(head: bytes | memoryview, key: StoreKey) -> FrameHeader:
    """Return the header of a frame whose layout is not known.

    Args:
        head: the frame, or as much of its start as the header takes.
        key: the name under which it was found.

    Raises:
        ValueError: it is none, is another's, or was changed; the message says what is wrong.
    """
    if len(head) < _TABLE_OFFSET:
        raise ValueError(f"{len(head)} bytes hold no header")
    found = _FIXED.unpack_from(head)
    header_nbytes, num_pages, payload_nbytes = found[3:6]
    expected = (MAGIC, VERSION, 0, header_nbytes, num_pages, payload_nbytes, key)
    if found != expected:
        raise ValueError(_describe_mismatch(bytes(head[: _FIXED.size]), _FIXED.pack(*expected)))
    end = _TABLE_OFFSET + _CHECKSUM.size * num_pages
    if not num_pages or header_nbytes != round_up(end):
        raise ValueError(f"a header of {header_nbytes} bytes for {num_pages} pages")
    if len(head) < end:
        raise ValueError(f"{len(head)} bytes end within the header, which has {header_nbytes}")
    table = bytes(head[_TABLE_OFFSET:end])
    (check,) = _CHECKSUM.unpack_from(head, _FIXED.size)
    if check != xxh3_64_intdigest(bytes(head[: _FIXED.size]) + table):
        raise ValueError("header checksum does not hold")
    digests = tuple(digest for (digest,) in _CHECKSUM.iter_unpack(table))
    return FrameHeader(header_nbytes, payload_nbytes, digests)


def slot_nbytes_for(groups: Sequence[GroupLayout]) -> int:
    """Return the slot size that holds a frame of any of the groups."""
    return max(FrameFormat.of(group).slot_nbytes for group in groups)


def slot_nbytes_of(payload_nbytes: int) -> int:
    """Return the slot size of a frame of which only the payload is known.

    Its header is taken to be of the least size, which has room for the checksums of 504 pages.
    """
    return ALIGNMENT + round_up(payload_nbytes)


def _describe_mismatch(found: bytes, expected: bytes) -> str:
    names = ("magic", "version", "reserved", "header bytes", "pages", "payload bytes", "store key")
    for name, a, b in zip(names, _FIXED.unpack(found), _FIXED.unpack(expected), strict=True):
        if a != b:
            shown = [v.hex() if isinstance(v, bytes) else v for v in (a, b)]
            return f"{name} is {shown[0]}, expected {shown[1]}"
    return "header differs"
