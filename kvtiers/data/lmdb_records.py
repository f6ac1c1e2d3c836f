"""The records of the LMDB store's databases: docs/reference/lmdb-store-format.md."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from kvtiers.model.frame import round_up
from kvtiers.model.keys import StoreKey

FORMAT_VERSION: Final = 1
FRAMES: Final = b"frames"  # store key -> the frame without its first bytes
INDEX: Final = b"index"  # store key -> IndexRecord
ORDER: Final = b"order"  # clock, store key -> nothing: who leaves next
META: Final = b"meta"  # COUNTERS_KEY -> Counters
COUNTERS_KEY: Final = b"counters"
PREFIX_NBYTES: Final = 16  # LMDB's page header has as many: the rest of a frame is page-aligned

_INDEX = struct.Struct(f"<QQ{PREFIX_NBYTES}s")
_COUNTERS = struct.Struct("<6Q")
_CLOCK = struct.Struct(">Q")  # big-endian: sorts as a number


def footprint(nbytes: int) -> int:
    """Return what a frame counts against the capacity: the pages that hold it."""
    return round_up(max(nbytes, 1))


@dataclass(frozen=True, slots=True)
class IndexRecord:
    """What is known of a frame without touching it.

    Attributes:
        nbytes: of the frame. clock: of its last access that was noted.
        prefix: its first bytes, at most `PREFIX_NBYTES`.
    """

    nbytes: int
    clock: int
    prefix: bytes

    def encode(self) -> bytes:
        """Return the record."""
        return _INDEX.pack(self.nbytes, self.clock, self.prefix)

    @classmethod
    def decode(cls, record: bytes | memoryview) -> IndexRecord:
        """Read a record.

        Raises:
            ValueError: it has another size.
        """
        return cls(*unpack_index(record))


def unpack_index(record: bytes | memoryview) -> tuple[int, int, bytes]:
    """Return an `IndexRecord`'s fields: for loops to whom an object is too dear.

    Raises:
        ValueError: the record has another size.
    """
    if len(record) != _INDEX.size:
        raise ValueError(f"index record has {len(record)} bytes, expected {_INDEX.size}")
    nbytes, clock, prefix = _INDEX.unpack(record)
    return nbytes, clock, prefix if nbytes >= PREFIX_NBYTES else prefix[:nbytes]


@dataclass(slots=True)
class Counters:
    """What all frames add up to; changed in the transaction that changes them.

    Attributes:
        capacity_nbytes: the bound. used_nbytes: sum of the footprints. num_frames: frames held.
        clock: the last tick given; one tick a write transaction.
        prepared_nbytes: of the file, from its start, that have been written once.
        version: of the format.
    """

    capacity_nbytes: int
    used_nbytes: int = 0
    num_frames: int = 0
    clock: int = 0
    prepared_nbytes: int = 0
    version: int = FORMAT_VERSION

    def encode(self) -> bytes:
        """Return the record."""
        return _COUNTERS.pack(
            self.version,
            self.capacity_nbytes,
            self.used_nbytes,
            self.num_frames,
            self.clock,
            self.prepared_nbytes,
        )

    @classmethod
    def decode(cls, record: bytes | memoryview) -> Counters:
        """Read a record.

        Raises:
            ValueError: it has another size.
        """
        if len(record) != _COUNTERS.size:
            raise ValueError(f"counters have {len(record)} bytes, expected {_COUNTERS.size}")
        version, capacity, used, num_frames, clock, prepared = _COUNTERS.unpack(record)
        return cls(capacity, used, num_frames, clock, prepared, version)


def order_key(clock: int, key: StoreKey) -> bytes:
    """Return a frame's place in the order of eviction."""
    return _CLOCK.pack(clock) + key


def key_of_order(record: bytes | memoryview) -> StoreKey:
    """Return the frame whose place this is."""
    return StoreKey(bytes(record[_CLOCK.size :]))
