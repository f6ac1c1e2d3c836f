"""The interface of an engine of positioned, vectored file I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

DEFAULT_DEPTH: Final = 16  # calls under way; more brought nothing on an NVMe disk, 2026-11


@dataclass(frozen=True, slots=True)
class IoOp:
    """One run of bytes in a file, scattered in memory.

    Attributes:
        fd: the open file. offset: of the first byte, in bytes.
        pieces: (address, bytes) of the memory, in file order; it stays until the answer.
    """

    fd: int
    offset: int
    pieces: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class IoBatch:
    """Operations of one direction that are answered together.

    Attributes:
        batch_id: chosen by the caller, not in use. writes: memory to file; else file to memory.
    """

    batch_id: int
    writes: bool
    ops: tuple[IoOp, ...]


@dataclass(frozen=True, slots=True)
class IoDone:
    """The end of a batch: per operation, in order, the bytes moved or a negative errno.

    A short count has been continued before it is reported: fewer bytes than asked for mean
    that a file ended.
    """

    batch_id: int
    results: tuple[int, ...]


class IoEngine(Protocol):
    """Moves bytes between files and memory, many calls at a time. One thread calls it."""

    @property
    def name(self) -> str:
        """The engine as a configuration names it."""
        ...

    def submit(self, batch: IoBatch) -> None:
        """Submit operations and return at once; they may run in any order."""
        ...

    def poll(self) -> list[IoDone]:
        """Return the batches that ended since the last call, never waiting."""
        ...

    def close(self) -> None:
        """Wait for what was submitted and release everything; idempotent. `poll` still works."""
        ...
