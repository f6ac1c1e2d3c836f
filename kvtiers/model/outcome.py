"""What became of one block of a transfer."""

from __future__ import annotations

from enum import IntEnum


class Outcome(IntEnum):
    """The fate of one block; larger is worse, so ranks are merged with ``max``.

    A failed block is always an `Outcome`, never an exception.
    """

    OK = 0  # the bytes arrived, and were verified where they crossed a medium
    FULL = 1  # the medium had no room; nothing was written
    MISSING = 2  # the source no longer holds the key: a miss
    STALE = 3  # the slot holds another key, or the order belongs to an earlier epoch
    TIMED_OUT = 4  # the deadline passed before the copy began; the target is untouched
    FAILED = 5  # the medium or the copier reported an error
    CORRUPT = 6  # wrong key, wrong checksum or short read; the entry must be dropped
