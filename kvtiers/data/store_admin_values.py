"""What is said of a store by those who look after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtiers.data.file_owner import Owner
from kvtiers.model.errors import StoreError

Progress = Callable[[int, int], None]
"""Told after each piece of work: frames and bytes of it."""


@dataclass(frozen=True, slots=True)
class StoreStat:
    """What a store is, and what it holds. None where it does not say.

    Attributes:
        kind: "nvme" or "lmdb". name: the folder of its index. paths: all its folders.
        problem: why it cannot be used as it is; what is not known then is None.
        num_frames: held. used_nbytes: by them. capacity_nbytes: bound of that.
        disk_nbytes: that its files take on the disk.
        num_slots, num_free, slot_nbytes: of a store of equal slots.
        generations: by the file that records it. owner: None for a store that is stopped.
        changed_seconds_ago: when a frame came or went last, by the clock of its files.
        num_changes_since_oldest_access: changes of the store since the frame that leaves next was
            used; a store of files does not note accesses.
    """

    kind: str
    name: str
    paths: tuple[str, ...]
    filesystem: str
    owner: Owner | None
    generations: dict[str, int]
    format_version: int | None = None
    problem: str | None = None
    num_frames: int | None = None
    used_nbytes: int | None = None
    capacity_nbytes: int | None = None
    disk_nbytes: int | None = None
    num_slots: int | None = None
    num_free: int | None = None
    slot_nbytes: int | None = None
    changed_seconds_ago: float | None = None
    num_changes_since_oldest_access: int | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Fault:
    """A frame that may not be served.

    Attributes:
        key: in hex. place: where it lies, for people. what: is wrong with it.
    """

    key: str
    place: str
    what: str


@dataclass(slots=True)
class Verdict:
    """What reading a whole store has found.

    Attributes:
        num_good: frames whose checksums hold. num_gone: frames that left while it read.
        faults: of all others. num_quarantined: of these, that are never served again.
        problem: of the store as a whole, or why nothing was quarantined.
    """

    name: str
    num_good: int = 0
    num_gone: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    faults: list[Fault] = field(default_factory=list)
    num_quarantined: int = 0
    problem: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults and self.problem is None

    def to_plain(self) -> dict[str, Any]:
        """Return plain data."""
        return {"ok": self.ok, **asdict(self)}


class UnansweredError(StoreError):
    """The process that owns a store has not carried an order out in time."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """What became of an order to drop frames.

    Attributes:
        num_frames: held less than before. num_left: held now. by_owner: who carried it out: the
            process that has the store open, or we ourselves.
    """

    name: str
    num_frames: int
    num_left: int
    by_owner: bool

    def to_plain(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)
