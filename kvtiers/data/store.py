"""The interface of a medium below DRAM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome

StoreTicket = NewType("StoreTicket", int)


@dataclass(frozen=True, slots=True)
class FrameRef:
    """One frame to move between a store and the slab.

    Attributes:
        key: what the store files it under. slot: where it lies, or lands, in the slab.
        nbytes: bytes of the frame, header included, without padding.
    """

    key: StoreKey
    slot: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """The fate of a submitted batch: one `Outcome` per frame, in order, and seconds at work.

    Attributes:
        held: rows of a put that are OK without having been written, as the key was there or
            another row brought it. A store that cannot say names none; then its link seems to
            carry them.
    """

    ticket: StoreTicket
    outcomes: tuple[Outcome, ...]
    seconds: float
    held: frozenset[int] = frozenset()


class BlockStore(Protocol):
    """Holds frames by key, up to a bound. It moves bytes; it neither seals nor verifies them.

    ``put`` and ``get`` submit and return at once; the slots of a batch belong to the store
    until its answer was polled, and only frames that are OK have changed them. One that raises
    has taken nothing. Frames become visible whole or not at all. A failed put leaves the key
    absent. Calls that concern one key take effect in their order. The bound counts frames
    that are being written. One thread calls a store.
    """

    def put(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Submit frames to keep: OK, FULL or FAILED. A key already there is OK, and held."""
        ...

    def get(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Submit frames to bring into slots: OK, MISSING, CORRUPT (another size) or FAILED."""
        ...

    def poll(self) -> list[StoreAnswer]:
        """Return the batches answered since the last call, never waiting."""
        ...

    def delete(self, keys: Iterable[StoreKey]) -> None:
        """Drop frames; keys that are not there are no error."""
        ...

    def keys(self) -> list[StoreKey]:
        """Return the keys of all frames held now."""
        ...

    def retire(self) -> None:
        """Note that nobody will ask for the frames put so far: they no longer count in the bound.

        They may be dropped at once, or when their room is needed; a shared store keeps them, as
        other engines may ask. They may answer OK or MISSING until then.
        """
        ...

    def close(self) -> None:
        """Finish what was submitted, and release everything; idempotent."""
        ...
